"""A small HTTP server on a thread of its own, for commands that ask over the network."""

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any


@contextmanager
def serving(answer: Callable[[str], tuple[int, bytes]], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Its URL; `answer` gives status and body for each path that is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
