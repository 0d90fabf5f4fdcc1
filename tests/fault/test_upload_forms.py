"""Audio forms on real sockets: what a client may write in any order, and what the backend reads of it."""

import asyncio
from typing import Any

import pytest
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartParser

from tests.clients import request
from tests.fault.rig import CLIENT_KEY, holds, running
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import answer, hang, head

AUDIO = b"/v1/audio/transcriptions"
OTHER = "other"
ALIAS: dict[str, Any] = {"models": {"aliases": {"whisper-1": MODEL}}}
KEYS: dict[str, Any] = {"auth": {"keys": [{"name": "one", "key": CLIENT_KEY, "models": [MODEL, "whisper-1"]}]}}
AS_CLIENT = b"authorization: Bearer " + CLIENT_KEY.encode()
TYPES = [
    b"multipart/form-data; boundary=b",
    b'multipart/form-data; boundary="b"',
    b"multipart/form-data;charset=UTF-8;boundary=b",
    b"multipart/form-data; boundary=b; charset=utf-16",
    b"Multipart/Form-Data; Boundary=b",
]


def field(name: bytes, value: bytes) -> bytes:
    return b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, value)


def form(*models: bytes, size: int = 100, first: bool = True) -> bytes:
    fields = b"".join(field(b"model", each) for each in models)
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n' % bytes(size)
    return (fields + file if first else file + fields) + b"--b--\r\n"


async def as_read_by_vllm(content_type: str, body: bytes) -> FormData:
    async def stream() -> Any:
        yield body

    return await MultiPartParser(Headers({"content-type": content_type}), stream()).parse()


@pytest.mark.parametrize("content_type", TYPES)
@pytest.mark.parametrize("name", [MODEL, "whisper-1"])
@pytest.mark.parametrize("first", [True, False])
async def test_an_alias_and_either_order_reach_the_model_whatever_the_type_looks_like(
    backend: ScriptedBackend, content_type: bytes, name: str, first: bool
) -> None:
    backend.plays(*answer(200, {"text": "Hello."}))
    async with ScriptedBackend(OTHER) as other, running(backend, other, sections=ALIAS | KEYS) as under_test:
        body = form(name.encode(), size=3_000_000, first=first)
        found = await under_test.ask(body, AS_CLIENT, b"content-type: " + content_type, target=AUDIO)
        assert (found.status, found.json) == (200, {"text": "Hello."})
        [seen] = backend.ledger
        read = await as_read_by_vllm((seen.header(b"content-type") or b"").decode(), seen.body)
        assert read["model"] == MODEL
        assert len(await read["file"].read()) == 3_000_000  # type: ignore[union-attr]
        await read.close()


@pytest.mark.parametrize("size", [100, 3_000_000])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("models", [(OTHER,), (MODEL, OTHER), (OTHER, MODEL), ("whisper-1", OTHER)])
async def test_no_form_reaches_a_model_that_its_key_may_not_use(
    backend: ScriptedBackend, models: tuple[str, ...], first: bool, size: int
) -> None:
    backend.plays(*answer(200, {"text": "Hello."}))
    async with ScriptedBackend(OTHER) as other, running(backend, other, sections=ALIAS | KEYS) as under_test:
        body = form(*[each.encode() for each in models], size=size, first=first)
        found = await under_test.ask(body, AS_CLIENT, b"content-type: " + TYPES[0], target=AUDIO)
        assert found.status == (403 if len(models) == 1 else 400)
        assert not [seen for seen in (*backend.ledger, *other.ledger) if seen.whole]


async def test_a_second_model_behind_the_file_breaks_off_the_request_that_has_begun(backend: ScriptedBackend) -> None:
    backend.plays(*answer(200, {"text": "Hello."}))
    body = form(MODEL.encode(), size=4_000_000)[:-7] + field(b"model", OTHER.encode()) + b"--b--\r\n"
    async with running(backend) as under_test, await under_test.client() as client:
        data = request(body, b"content-type: " + TYPES[0], target=AUDIO)
        await client.send(data[:2_000_000])
        await holds(lambda: bool(backend.ledger), "the upload is passed on while it arrives")
        await client.send(data[2_000_000:])
        found = await client.answer()
        assert (found.status, found.error["param"]) == (400, "model")
        assert not backend.ledger[0].whole
        assert under_test.attempts.get(("scripted", "completed"), 0) == 0


async def test_a_streamed_transcription_gets_comments_while_it_waits(backend: ScriptedBackend) -> None:
    backend.plays(head(200), hang())
    sections = {"admission": {"comment_seconds": 0.1}}
    async with running(backend, sections=sections) as under_test, await under_test.client() as client:
        body = field(b"stream", b"true") + form(MODEL.encode())
        await client.send(request(body, b"content-type: " + TYPES[0], target=AUDIO))
        async with asyncio.timeout(20):
            received = b""
            while received.count(b": ") < 3 or b"text/event-stream" not in received:
                received += await client.read()
