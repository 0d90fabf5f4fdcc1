import asyncio
import gc
import socket
import time

import pytest
from aiohttp import web

from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.backends.vllm_api import MAX_METRICS_BYTES, ControlClient, ControlError

from .scripted import Scripted, hang, json_answer, pour, text_answer


def backend(url: str, api_key: str = "") -> BackendConfig:
    return BackendConfig(url=url, api_key=api_key)


def client(timeout_seconds: float = 5.0) -> ControlClient:
    return ControlClient(timeout_seconds, time.monotonic)


def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.mark.parametrize(
    ("status", "probe"),
    [(200, ProbeResult.OK), (404, ProbeResult.OK), (503, ProbeResult.UNWELL), (500, ProbeResult.UNWELL)],
)
async def test_a_probe_goes_by_the_status(status: int, probe: ProbeResult) -> None:
    async with Scripted() as server, client() as asking:
        server.answers["/health"] = text_answer("", status)
        assert (await asking.probe(backend(server.url)))[0] is probe


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_port_where_nothing_listens_refuses(host: str) -> None:
    async with client() as asking:
        assert (await asking.probe(backend(f"http://{host}:{closed_port()}")))[0] is ProbeResult.REFUSED


@pytest.mark.parametrize("is_refused", [True, False])
async def test_probes_that_fail_leave_nothing_to_the_garbage_collector(is_refused: bool) -> None:
    """Before, 80 objects of each were in cycles: those of 600 probes took 50 ms of CPU time at once."""
    async with Scripted() as server, client(0.01) as asking:
        server.answers["/health"] = hang
        asked = backend(f"http://127.0.0.1:{closed_port()}" if is_refused else server.url)
        await asking.probe(asked)
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                await asking.probe(asked)
            found = gc.collect()
        finally:
            gc.enable()
    assert found < (10 if is_refused else 500)


async def test_a_probe_without_an_answer_times_out() -> None:
    async with Scripted() as server, client(0.05) as asking:
        server.answers["/health"] = hang
        assert (await asking.probe(backend(server.url)))[0] is ProbeResult.TIMEOUT


async def test_a_full_backlog_times_out_and_does_not_refuse() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with client(0.1) as asking:
            assert (await asking.probe(backend(f"http://127.0.0.1:{full.getsockname()[1]}")))[0] is ProbeResult.TIMEOUT


@pytest.mark.parametrize("reply", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70000])
async def test_what_is_not_http_is_no_good_probe(reply: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server, client() as asking:
        port = server.sockets[0].getsockname()[1]
        assert (await asking.probe(backend(f"http://127.0.0.1:{port}")))[0] is ProbeResult.BROKEN


async def test_questions_carry_the_backends_key_and_no_cookie() -> None:
    async def bake(request: web.Request) -> web.StreamResponse:
        response = web.json_response({})
        response.set_cookie("seen", "1")
        return response

    async with Scripted() as server, client() as asking:
        server.answers["/version"] = bake
        for _ in range(2):
            await asking.ask(backend(server.url, api_key="sk-1"), "/version")
        assert [headers.get("Authorization") for headers in server.headers] == ["Bearer sk-1"] * 2
        assert not any("Cookie" in headers for headers in server.headers)


async def test_a_document_is_posted_as_json_with_the_backends_key() -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        sent = await request.json()
        return web.json_response({"sent": sent, "type": request.content_type, "method": request.method})

    async with Scripted() as server, client() as asking:
        server.answers["/tokenize"] = echo
        answer = await asking.ask(backend(server.url, api_key="sk-1"), "/tokenize", {"prompt": "žluť"})
        assert answer == {"sent": {"prompt": "žluť"}, "type": "application/json", "method": "POST"}
        assert [headers.get("Authorization") for headers in server.headers] == ["Bearer sk-1"]


@pytest.mark.parametrize(
    ("answer", "status"), [(hang, None), (text_answer("x" * 2000000), None), (json_answer({}, 400), 400)]
)
async def test_a_post_has_the_limits_of_a_question(answer, status: int | None) -> None:  # type: ignore[no-untyped-def]
    async with Scripted() as server, client(0.3) as asking:
        server.answers["/tokenize"] = answer
        with pytest.raises(ControlError, match="/tokenize") as error:
            await asking.ask(backend(server.url), "/tokenize", {})
        assert error.value.status == status


async def test_a_redirect_is_not_followed() -> None:
    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/version")

    async with Scripted() as server, client() as asking:
        server.answers["/moved"] = redirect
        with pytest.raises(ControlError, match="302"):
            await asking.ask(backend(server.url), "/moved")
        assert server.asked == ["/moved"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (hang, "timed out"),
        (text_answer("not json"), "/version"),
        (text_answer("x" * 2000000), "the limit"),
        (json_answer({}, 404), "404"),
    ],
)
async def test_a_bad_answer_is_one_error_whatever_is_wrong_with_it(answer, message: str) -> None:  # type: ignore[no-untyped-def]
    async with Scripted() as server, client(0.3) as asking:
        server.answers["/version"] = answer
        with pytest.raises(ControlError, match=message):
            await asking.ask(backend(server.url), "/version")


async def test_compressed_answers_are_not_inflated() -> None:
    async def squeeze(request: web.Request) -> web.StreamResponse:
        response = web.json_response({"version": "0" * 100})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async with Scripted() as server, client() as asking:
        server.answers["/version"] = squeeze
        with pytest.raises(ControlError):
            await asking.ask(backend(server.url), "/version")


async def test_an_endless_metrics_page_is_cut() -> None:
    async with Scripted() as server, client() as asking:
        server.answers["/metrics"] = pour
        found = await asking.read(backend(server.url), "/metrics")
        assert found.telemetry is None
    assert MAX_METRICS_BYTES < 10**7


async def test_a_garbage_metrics_page_is_a_control_error() -> None:
    async with Scripted() as server, client() as asking:
        server.answers["/metrics"] = text_answer('vllm:num_requests_running{engine="0" 3')
        with pytest.raises(ControlError, match="/metrics"):
            await asking.read(backend(server.url), "/metrics")
