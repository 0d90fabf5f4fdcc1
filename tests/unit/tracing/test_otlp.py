"""Exports as receivers see them, and what of their refusals may pass."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from gateway.features.tracing.otlp import GrpcReceiver, HttpReceiver, NotTaken, OtlpSettings
from gateway.features.tracing.settings import TracingConfig
from gateway.features.tracing.tracing import Exporter

Answer = tuple[int, dict[str, str]]
OK: Answer = 200, {}


class Web:
    """A receiver over HTTP; `answers`: in turn, and 200 after them."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = iter(answers)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []

    @contextmanager
    def listening(self) -> Iterator[str]:
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                web.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                web.headers.append({name.lower(): value for name, value in self.headers.items()})
                status, headers = next(web.answers, OK)
                self.send_response(status)
                for name, value in {"content-length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def settings(**variables: str) -> OtlpSettings:
    return OtlpSettings.of({f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}, "gateway/1.0")


def sent(web: Web, **variables: str) -> None:
    with web.listening() as url:
        receiver = HttpReceiver(url, settings(**variables))
        try:
            receiver.send(b"spans", 5)
        finally:
            receiver.close()


def test_settings_of_traces_come_first() -> None:
    both = settings(TIMEOUT="20", TRACES_TIMEOUT="3", HEADERS="api-key=a%20b,x-team=c", CERTIFICATE="/ca.pem")
    assert both.timeout_seconds == 3
    assert both.headers == {"api-key": "a b", "x-team": "c"}
    assert (both.certificate, both.client_key, both.compression) == ("/ca.pem", None, "none")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_COMPRESSION must be gzip"):
        settings(COMPRESSION="zstd")


@pytest.mark.parametrize(
    ("compression", "read"), [("none", bytes), ("gzip", gzip.decompress), ("deflate", zlib.decompress)]
)
def test_an_export_over_http(compression: str, read: Callable[[bytes], bytes]) -> None:
    web = Web()
    sent(web, COMPRESSION=compression, HEADERS="api-key=secret")
    assert [read(body) for body in web.bodies] == [b"spans"]
    [headers] = web.headers
    assert headers["content-type"] == "application/x-protobuf"
    assert headers.get("content-encoding", "none") == compression
    assert (headers["api-key"], headers["user-agent"]) == ("secret", "gateway/1.0")


@pytest.mark.parametrize(("status", "is_passing"), [(400, False), (302, False), (429, True), (503, True), (500, False)])
def test_a_refusal_has_its_status_and_may_pass(status: int, is_passing: bool) -> None:
    with pytest.raises(NotTaken, match=str(status)) as raised:
        sent(Web((status, {"retry-after": "7"})))
    assert (raised.value.is_passing, raised.value.retry_after_seconds) == (is_passing, 7.0)


@pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])
def test_a_receiver_that_is_gone_may_come_back(kind: type[HttpReceiver | GrpcReceiver]) -> None:
    receiver = kind("http://127.0.0.1:9", settings())
    with pytest.raises(NotTaken) as raised:
        receiver.send(b"", 2)
    assert raised.value.is_passing
    receiver.close()


def exported(web: Web, stops: bool = False) -> tuple[str, list[float]]:
    """The reason why an export failed, and the pauses before it was sent again."""
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return stops

    with web.listening() as url:
        exporter = Exporter(TracingConfig(endpoint=url), "1.0", pause, clock=lambda: sum(pauses))
        reason = exporter.export([])
        exporter.close()
    return reason, pauses


def test_an_export_is_sent_again_until_it_is_taken() -> None:
    web = Web((503, {}), (429, {"retry-after": "4"}))
    assert exported(web) == ("", [1.0, 4.0])
    assert len(web.bodies) == 3


def test_an_export_is_given_up_at_its_timeout() -> None:
    reason, pauses = exported(Web(*[(503, {})] * 9))
    assert reason.startswith("503")
    assert pauses == [1.0, 2.0, 4.0]  # the next one would end after the 10 seconds of an export


def test_a_gateway_that_stops_sends_nothing_again() -> None:
    web = Web((503, {}))
    reason, _ = exported(web, stops=True)
    assert reason.startswith("503")
    assert len(web.bodies) == 1
