"""Every way in which a request of any route can end leaves none of its bytes in memory, while the gateway runs on."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.request import Kind
from tests import live_bytes
from tests.clients import Client, EndOfConnection, request
from tests.fault import rig
from tests.fault.rig import CLIENT_KEY, Engine, UnderTest, holds, merged
from tests.fault.test_realtime import UPGRADE
from tests.realtime_engine import RealtimeEngine
from tests.routes import ROUTES
from tests.scripted import MODEL, ScriptedBackend
from tests.scripts import Step, chunk, fin, hang, head, raw, reset, until, whole

MEBIBYTE = 1048576
WORD = "words "
WORDS = MEBIBYTE // len(WORD)
UPLOADS = [path for (_, path), route in ROUTES.items() if route.kind is Kind.UPLOAD and route.answered_by != "batches"]
POSTS = [
    path
    for (method, path), route in ROUTES.items()
    if method == b"POST" and route.kind is not Kind.UPLOAD and not route.local
]
QUEUED = [path for path in POSTS if ROUTES[b"POST", path].kind is not Kind.LIGHT] + UPLOADS  # others take no slot
MULTIPART = b"content-type: multipart/form-data; boundary=b"
KEY = b"authorization: Bearer " + CLIENT_KEY.encode()
QUICK = {"admission": {"max_wait_seconds": 0.3}, "upstream": {"retry_budget_min": 0, "retry_budget_fraction": 0}}
LIMITS = {"server": {"max_json_containers": 50_000, "max_json_strings": 50_000, "max_json_values": 30_000}}
Spoil = Callable[[dict[str, Any]], bytes]


def document_for(path: bytes) -> dict[str, Any]:
    """A valid body of a MiB for a route."""
    text, texts = WORD * WORDS, [WORD * 200 for _ in range(WORDS // 200)]
    turns = [{"role": "user", "content": text}]
    by_route: dict[bytes, dict[str, Any]] = {
        b"/v1/chat/completions": {"messages": turns, "stream": True},
        b"/v1/chat/completions/batch": {"messages": [turns]},
        b"/v1/completions": {"prompt": text, "stream": True},
        b"/v1/messages": {"messages": turns, "max_tokens": 5, "stream": True},
        b"/v1/messages/count_tokens": {"messages": turns},
        b"/v1/responses": {"input": text, "stream": True},
        b"/v1/embeddings": {"input": texts},
        b"/detokenize": {"tokens": [1234567] * (MEBIBYTE // 8)},
        b"/tokenize": {"prompt": text},
        b"/invocations": {"messages": turns},
        b"/v2/embed": {"texts": texts},
    }
    scored = {"query": "q", "documents": texts} if b"rank" in path else {"text_1": "q", "text_2": texts}
    pooled = {"query": "q", "items": [text]} if path == b"/generative_scoring" else {"input": text}
    return {"model": MODEL, **by_route.get(path, scored if b"score" in path or b"rank" in path else pooled)}


def form(model: bytes = MODEL.encode(), last: bytes = b"--b--\r\n") -> bytes:
    field = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n' % model
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n' % (b"x" * MEBIBYTE)
    return field + file + last


def data_for(path: bytes, *headers: bytes) -> bytes:
    """A valid request of a MiB."""
    if path in UPLOADS:
        return request(form(), MULTIPART, *headers, target=path)
    return request(orjson.dumps(document_for(path)), *headers, target=path)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else []


BODIES: dict[str, tuple[Spoil, int]] = {
    "not JSON": (lambda it: orjson.dumps(it)[:-1], 400),
    "more than JSON": (lambda it: orjson.dumps(it) + b"x", 400),
    "unbalanced brackets": (lambda it: orjson.dumps({**it, "more": nested(40)})[:-3], 400),
    "a list": (lambda it: orjson.dumps([it]), 400),
    "a key twice": (lambda it: orjson.dumps(it)[:-1] + b',"model":"x"}', 400),
    "a refused field": (lambda it: orjson.dumps({**it, "kv_transfer_params": {}}), 400),
    "a refused extra argument": (lambda it: orjson.dumps({**it, "vllm_xargs": {"kv_transfer_params": 1}}), 400),
    "a media URL": (lambda it: orjson.dumps({**it, "image_url": {"url": "http://a/b"}}), 400),
    "nesting": (lambda it: orjson.dumps({**it, "more": nested(200)}), 400),
    "strings": (lambda it: orjson.dumps({**it, "more": ["a"] * 70_000}), 400),
    "keys": (lambda it: orjson.dumps({**it, "more": {str(number): 1 for number in range(26_000)}}), 400),
    "containers": (lambda it: orjson.dumps({**it, "more": [[]] * 70_000}), 400),
    "values": (lambda it: orjson.dumps({**it, "more": ["a"] * 35_000}), 400),
    "a model that is no text": (lambda it: orjson.dumps({**it, "model": 5}), 400),
    "an unknown model": (lambda it: orjson.dumps({**it, "model": "x"}), 404),
}


def running(*engines: Engine, sections: Any = None, **more: Any) -> AbstractAsyncContextManager[UnderTest]:
    """A gateway whose probes have the time of a loaded machine: aiohttp leaves a cycle behind one that is cut."""
    return rig.running(*engines, sections=merged(sections or {}, {"health": {"probe_timeout_seconds": 20.0}}), **more)


async def answered(under_test: UnderTest, data: bytes) -> int:
    """The status of the answer to a request on a connection of its own, even while it is being sent."""
    async with await under_test.client() as client:
        with suppress(EndOfConnection):
            await client.send(data)
        answer = await client.answer()
        return answer.status


async def nothing_is_left(under_test: UnderTest, backend: ScriptedBackend, what: object) -> None:
    """Nothing is under way, no large bytes are in memory, and no object waits for a collection."""
    await under_test.comes_to_rest()
    await holds(lambda: not backend.running, "the backend has read what it was sent")
    backend.forget()
    await under_test.forgets_all(what)
    assert not live_bytes.in_cycles(), what


async def ends(under_test: UnderTest, backend: ScriptedBackend, path: bytes, body: bytes, *headers: bytes) -> int:
    status = await answered(under_test, request(body, *headers, target=path))
    del body
    return status


@pytest.mark.parametrize("kind", BODIES)
async def test_bodies_that_are_refused(backend: ScriptedBackend, kind: str) -> None:
    spoil, status = BODIES[kind]
    async with running(backend, sections=LIMITS) as under_test:
        for path in POSTS:
            assert await ends(under_test, backend, path, spoil(document_for(path))) == status, path
            await nothing_is_left(under_test, backend, path)
        assert backend.ledger == []


@pytest.mark.parametrize("kind", BODIES)
async def test_bodies_that_are_refused_on_a_connection_that_stays(backend: ScriptedBackend, kind: str) -> None:
    spoil, status = BODIES[kind]
    async with running(backend, sections=LIMITS) as under_test, await under_test.client() as client:
        for path in POSTS[:3]:
            await client.send(request(spoil(document_for(path)), target=path))
            assert (await client.answer()).status == status
            await under_test.forgets_all(path)


HEADS: dict[str, tuple[dict[str, Any], list[bytes], int]] = {
    "no key": ({}, [], 401),
    "a wrong key": ({}, [KEY + b"x"], 401),
    "a compressed body": ({}, [KEY, b"content-encoding: gzip"], 415),
    "too long": ({"server": {"max_body_bytes": 1000, "max_upload_bytes": 1000}}, [KEY], 413),
    "no memory": ({"server": {"memory_budget_bytes": MEBIBYTE // 2}}, [KEY], 503),
    "a model that is not allowed": ({"models": ["another"]}, [KEY], 403),
    "too many requests": ({"requests_per_minute": 1}, [KEY], 429),
    "too many tokens": ({"tokens_per_day": 1000}, [KEY], 429),
}


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("kind", HEADS)
async def test_requests_that_are_refused_by_their_heads_or_their_keys(
    backend: ScriptedBackend, kind: str, is_chunked: bool
) -> None:
    more, headers, status = HEADS[kind]
    server = {"server": more["server"]} if "server" in more else {}
    limits = {} if server else more
    sections = {**server, "auth": {"keys": [{"name": "one", "key": CLIENT_KEY, **limits}]}}
    async with running(backend, sections=sections) as under_test:
        if "requests_per_minute" in limits:
            assert (await under_test.ask(None, KEY)).status == 200
        for path in POSTS + UPLOADS:
            data = data_for(path, *headers)
            if is_chunked:
                start, _, body = data.partition(b"\r\n\r\n")
                start = b"\r\n".join(line for line in start.split(b"\r\n") if not line.startswith(b"content-length"))
                data = b"%b\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (start, len(body), body)
                del body
            found = await answered(under_test, data)
            del data
            assert found == status or (status == 429 and found == 200), path  # some cost no tokens
            await nothing_is_left(under_test, backend, path)


FORMS: dict[str, tuple[list[bytes], bytes, int]] = {
    "an unknown model": ([MULTIPART], b"x", 404),
    "no form": ([b"content-type: text/plain"], MODEL.encode(), 400),
    "no boundary": ([b"content-type: multipart/form-data"], MODEL.encode(), 400),
}


@pytest.mark.parametrize("kind", FORMS)
async def test_forms_that_are_refused(backend: ScriptedBackend, kind: str) -> None:
    headers, model, status = FORMS[kind]
    async with running(backend) as under_test:
        for path in UPLOADS:
            assert await ends(under_test, backend, path, form(model), *headers) == status
            await nothing_is_left(under_test, backend, path)


EVENT = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"t" * 200_000)
FAILURES: dict[str, tuple[Step, ...]] = {
    "refuses": (raw(whole(400, b'{"error":{"message":"%b"}}' % (b"m" * 100_000))),),
    "has lost the model": (raw(whole(404, b'{"error":{"message":"does not exist"}}')),),
    "refuses the key": (raw(whole(401, b"{}")),),
    "fails": (raw(whole(500, b'{"error":{"message":"%b"}}' % (b"m" * 100_000))),),
    "is dead": (raw(whole(500, b'{"error":{"message":"EngineCore is dead"}}')),),
    "is busy": (raw(whole(503, b'{"error":{"message":"%b"}}' % (b"m" * 100_000))),),
    "answers junk": (raw(b"x" * 100_000), fin()),
    "closes": (fin(),),
    "resets": (reset(),),
    "breaks a plain answer off": (raw(whole(200, b"x" * 300_000)[:-100_000]), fin()),
    "breaks a short answer off": (raw(whole(200, b"x" * 1000)[:-100]), fin()),
    "breaks a stream off": (head(200), chunk(EVENT), fin()),
    "ends a stream with an error": (head(200), chunk(EVENT), chunk(b'data: {"error":{"message":"m"}}\n\n'), fin()),
    "answers something else": (raw(whole(200, b'{"data":"%b"}' % (b"x" * 100_000))),),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_requests_whose_backend(backend: ScriptedBackend, other: ScriptedBackend, kind: str) -> None:
    for each in (backend, other):
        each.plays(*FAILURES[kind])
    quiet = {"health": {"eject_failures": 1000}}
    async with running(backend, other, sections={**QUICK, **quiet}) as under_test:
        for path in POSTS + UPLOADS:
            with suppress(EndOfConnection):
                await answered(under_test, data_for(path))
            other.forget()
            await nothing_is_left(under_test, backend, path)


@pytest.mark.parametrize("kind", sorted({*FAILURES} - {"is dead"}))  # no other batch is sent to one that is
async def test_batches_of_several_clients_whose_backend(backend: ScriptedBackend, kind: str) -> None:
    texts = [WORD * 2400 for _ in range(5)]  # each within the context, and together large
    data = request(orjson.dumps({"model": MODEL, "input": texts}), target=b"/v1/embeddings")
    sections = {
        "health": {"eject_failures": 1000},
        "embeddings": {"max_batch_tokens": 1_000_000, "max_delay_seconds": 30},
    }
    async with running(backend, sections=sections, per_backend={"max_in_flight": 16}) as under_test:
        backlog, largest = under_test.gateway.core.queue.backlog, 0
        while largest <= 2 * len(data):  # how many are sent together depends on how soon one after the other ends
            release, asking = asyncio.Event(), list[asyncio.Task[int]]()
            backend.plays(until(release), *FAILURES[kind])
            backend.forget()
            while backlog.requests < 3:
                asking.append(asyncio.create_task(answered(under_test, data)))
                await holds(
                    lambda sent=asking: len(backend.ledger) + backlog.requests == len(sent), "it is sent or waits"
                )
            release.set()
            await asyncio.gather(*asking, return_exceptions=True)
            largest = max(len(seen.body) for seen in backend.ledger)
            await under_test.comes_to_rest()
        del data
        asking.clear()
        await nothing_is_left(under_test, backend, "batch")


async def _leave(under_test: UnderTest, backend: ScriptedBackend, path: bytes, leave: Callable[[Client], None]) -> None:
    """Leave when a backend has the request, and perhaps a part of the answer is here."""
    async with await under_test.client() as client:
        await client.send(data_for(path))
        await holds(lambda: any(seen.whole for seen in backend.ledger), f"a backend has {path!r}")
        leave(client)


LEAVING = pytest.mark.parametrize("leave", [Client.close, Client.reset, Client.half_close])


@LEAVING
@pytest.mark.parametrize("answer", [[hang()], [head(200), chunk(EVENT), hang()]], ids=["before the answer", "in it"])
async def test_clients_that_leave_a_backend(
    backend: ScriptedBackend, answer: list[Step], leave: Callable[[Client], None]
) -> None:
    backend.plays(*answer)
    async with running(backend) as under_test:
        for path in POSTS + UPLOADS:
            await _leave(under_test, backend, path, leave)
            await nothing_is_left(under_test, backend, path)


@pytest.mark.parametrize(
    ("leave", "ahead"), [(Client.close, 0), (Client.half_close, 0), (Client.reset, 0), (Client.reset, 1)]
)
async def test_clients_that_leave_in_the_middle_of_a_body(
    backend: ScriptedBackend, leave: Callable[[Client], None], ahead: int
) -> None:
    """`ahead`: requests before it, whose answers it waits for."""
    backend.plays(hang())
    least = 1000 if ahead else MEBIBYTE // 2  # little is read ahead
    async with running(backend) as under_test:
        for path in POSTS + UPLOADS:
            async with await under_test.client() as client:
                for _ in range(ahead):
                    await client.send(request(orjson.dumps({"model": MODEL, "prompt": "x"}), target=b"/v1/completions"))
                await client.send(data_for(path)[: MEBIBYTE * 3 // 4])
                await holds(lambda: under_test.gateway.core.memory.used_bytes > least, "it has come")
                leave(client)
                await under_test.comes_to_rest() if leave is not Client.half_close else None
            await nothing_is_left(under_test, backend, path)


@pytest.mark.parametrize("waits", [False, True], ids=["leave", "wait in vain"])
async def test_clients_that_wait_in_the_queue(backend: ScriptedBackend, waits: bool) -> None:
    backend.plays(hang())
    sections = {"admission": {"max_wait_seconds": 0.3 if waits else 60}}
    async with running(backend, sections=sections, per_backend={"max_in_flight": 1}) as under_test:
        for path in QUEUED:
            async with await under_test.client() as first, await under_test.client() as second:
                await first.send(request(orjson.dumps({"model": MODEL, "prompt": "x"}), target=b"/v1/completions"))
                await holds(lambda: len(backend.ledger) == 1, "the slot is taken")
                await second.send(data_for(path))
                if waits:
                    assert (await second.answer()).status == 429, path
                else:
                    await holds(lambda: under_test.gateway.core.queue.backlog.requests > 0, f"{path!r} waits")
            await nothing_is_left(under_test, backend, path)


def input_file(last: bytes = b"", purpose: bytes = b"batch") -> bytes:
    part = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    return part % (b"purpose", b"", purpose) + part % (b"file", b'; filename="a"', b"x" * MEBIBYTE) + last


@pytest.mark.parametrize(
    ("last", "purpose", "status"), [(b"--b--\r\n", b"batch", 200), (b"", b"batch", 400), (b"", b"x", 400)]
)
async def test_files_of_batches(
    backend: ScriptedBackend, tmp_path: Path, last: bytes, purpose: bytes, status: int
) -> None:
    sections = {"batches": {"path": str(tmp_path)}}
    async with running(backend, sections=sections) as under_test:
        for _ in range(3):
            assert await ends(under_test, backend, b"/v1/files", input_file(last, purpose), MULTIPART) == status
            await nothing_is_left(under_test, backend, "a file")
        async with await under_test.client() as client:
            await client.send(request(input_file(), MULTIPART, target=b"/v1/files")[: MEBIBYTE * 3 // 4])
            client.reset()
        await nothing_is_left(under_test, backend, "a part of a file")


async def opened(under_test: UnderTest, model: str = MODEL) -> Client:
    client = await under_test.client()
    await client.send(UPGRADE % (b"?model=" + model.encode(), b""))
    return client


@pytest.mark.parametrize("kind", ["has another model", *FAILURES])
async def test_sessions_whose_backend(backend: ScriptedBackend, kind: str) -> None:
    backend.plays(*FAILURES.get(kind, ()))
    async with running(backend, sections={**QUICK, "health": {"eject_failures": 1000}}) as under_test:
        for _ in range(3):
            async with await opened(under_test, MODEL if kind in FAILURES else "x") as client:
                assert (await client.answer()).status >= 400
            await nothing_is_left(under_test, backend, kind)


@pytest.mark.parametrize("leave", [Client.close, Client.reset, None])
async def test_sessions_that_their_client_or_their_engine_ends(
    backend: ScriptedBackend, leave: Callable[[Client], None] | None
) -> None:
    async with RealtimeEngine() as engine, running(engine) as under_test:
        for _ in range(3):
            async with await opened(under_test) as client:
                await holds(lambda: len(engine.open) == 1, "the session is open")
                if leave is None:
                    await engine.open[0].socket.close()
                else:
                    leave(client)
                await holds(lambda: not len(under_test.gateway.features["realtime"].tunnels), "the session has ended")
            await nothing_is_left(under_test, backend, leave)
