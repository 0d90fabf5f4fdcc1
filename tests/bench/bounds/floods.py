"""A backend that answers 16 MiB of the smallest items that it can: frames, chunks, events, labels, objects."""

import base64
import hashlib
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

FLOOD_BYTES = 16 << 20
WATCH_SECONDS = 6.0
MODEL = "flood"
ALIAS = "alias"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_METRIC = b"vllm:num_requests_running{%s} 1\n"
_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@dataclass(frozen=True)
class Flood:
    """What is sent again and again after a beginning, in the answer to requests whose target has `path` in it."""

    path: bytes
    head: bytes
    unit: bytes


LONG = b"content-length: 999999999\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
FLOODS = {
    "frames": Flood(b"realtime", b"", b"\x89\0"),
    "frames-of-one": Flood(b"realtime", b"", b"\x81\x01a"),
    "chunks": Flood(b"chat", _SSE + CHUNKED, b"1\r\n\n\r\n"),
    "newlines": Flood(b"chat", _SSE + LONG, b"\n"),
    "usage": Flood(b"chat", _SSE + LONG, b'"usage":{}\n\n'),
    "one-event": Flood(b"chat", _SSE + LONG, b"x" * 64),
    "brackets": Flood(b"chat", b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + LONG, b"[{"),
    "headers": Flood(b"chat", b"HTTP/1.1 200 OK\r\n", b"a:\r\n"),
    "continues": Flood(b"chat", b"", b"HTTP/1.1 100 \r\n\r\n"),
    "probe-continues": Flood(b"/health", b"", b"HTTP/1.1 100 \r\n\r\n"),
    "labels": Flood(b"/metrics", b"HTTP/1.1 200 OK\r\n" + LONG, b"".join(b'a%d="",' % number for number in range(300))),
    "objects": Flood(b"/v1/models", b"HTTP/1.1 200 OK\r\n" + LONG + b"[", b"[],"),
}


class Flooder:
    """Serves one flood in threads, and what the gateway asks of a backend."""

    def __init__(self, flood: Flood) -> None:
        self._flood = flood
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def sections(self) -> dict[str, Any]:
        """A configuration whose only backend this is."""
        return {
            "backends": [{"url": f"http://127.0.0.1:{self.port}"}],
            "models": {"aliases": {ALIAS: MODEL}},
        }

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            received = b""
            while True:
                while b"\r\n\r\n" not in received:
                    if not (data := connection.recv(65536)):
                        return
                    received += data
                head, _, received = received.partition(b"\r\n\r\n")
                self._answer(connection, head)

    def _answer(self, connection: socket.socket, head: bytes) -> None:
        flood, target = self._flood, head.split(b" ")[1]
        if b"upgrade: websocket" in head.lower():
            key = next(line.split(b": ")[1] for line in head.split(b"\r\n") if b"sec-websocket-key" in line.lower())
            accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
            connection.sendall(
                b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: %b\r\n\r\n"
                % accept
            )
        if flood.path in target:
            connection.sendall(flood.head + _units(flood))
            connection.recv(65536)
        elif target == b"/v1/models":
            body = b'{"data":[{"id":"%b","max_model_len":32768}]}' % MODEL.encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def _units(flood: Flood) -> bytes:
    if flood.path != b"/metrics":
        return flood.unit * (FLOOD_BYTES // len(flood.unit))
    lines, size = [], 0
    while size < FLOOD_BYTES:  # series that differ, so that none is known
        lines.append(_METRIC % (flood.unit + b'n="%d"' % len(lines)))
        size += len(lines[-1])
    return b"".join(lines)


def request(flood: Flood) -> bytes:
    """What makes the gateway read the flood; empty = its probes do."""
    if flood.path == b"realtime":
        return (
            b"GET /v1/realtime?model=flood HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
    if flood.path != b"chat":
        return b""
    body = (
        b'{"model":"%b","stream":true,"messages":[{"role":"user","content":"a"}]}'
        % (ALIAS if b"json" in flood.head else MODEL).encode()
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def read(port: int, flood: Flood) -> int:
    """Send the request and read for a while; the number of bytes that came."""
    ends, received = time.monotonic() + WATCH_SECONDS, 0
    if not (asked := request(flood)):
        time.sleep(WATCH_SECONDS)
        return 0
    with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
        client.sendall(asked)
        while (left := ends - time.monotonic()) > 0:
            client.settimeout(left)
            if not (data := client.recv(1048576)):
                break
            received += len(data)
    return received


def flooded(name: str) -> Callable[[int], dict[str, Any]]:
    return lambda _: Flooder(FLOODS[name]).sections()
