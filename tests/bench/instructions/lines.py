"""Lines of a batch, and the same requests of clients: in steps, in each of which every answer goes on by one event."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from heapq import heappop, heappush
from io import BytesIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import orjson

from gateway.config import ServerConfig
from gateway.core.threads import Threads
from gateway.features.batches.input import InputLimits, check_input
from gateway.features.batches.settings import BatchesConfig
from tests.bench.bodies import SIZES, chats
from tests.bench.instructions.gateway import Backend, Client, Loop, clients, unrouted
from tests.bench.instructions.workloads import CHAT, EVENT, STREAM_END, STREAM_HEAD, Counter, answer, chunk, request

TOKENS = 100  # of an answer
TOGETHER = 16  # requests of clients; more lines are in flight, so that some always wait
_LINES_IN_FLIGHT = 48
_SLOTS = 12  # of each of two engines; some of them are kept free of lines
_STEP_SECONDS = 0.02
_STEPS = 20  # between two looks at a batch
_WARM_UPS = 16
_PATH = b"/v1/chat/completions"
_PLAIN_END = b'"total_tokens": 310}}'


class _Steps(Loop):
    """A loop whose time passes in steps. Timers follow."""

    def __init__(self) -> None:
        super().__init__(_answered)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0
        self._under_way: list[tuple[Backend, Iterator[bytes]]] = []

    def step(self) -> None:
        """A decode step of the engines."""
        self.pass_time(_STEP_SECONDS)
        now = self.time()
        while self._timers and self._timers[0][0] <= now:
            timer = heappop(self._timers)[2]
            if not timer.cancelled():
                timer._run()
        self._under_way = [each for each in self._under_way if _goes_on(*each)]

    def begin(self, backend: Backend, chunks: Iterator[bytes]) -> None:
        self._under_way.append((backend, chunks))

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heappush(self._timers, (when, self._number, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...


def _goes_on(backend: Backend, chunks: Iterator[bytes]) -> bool:
    """Send the next chunk; False after the last one."""
    piece = next(chunks, None)
    if piece:
        backend.data_received(piece)
    return piece is not None


def _stream(*, has_ids: bool) -> list[bytes]:
    """The chunks of a streamed answer as vLLM writes them, in so many steps."""

    def event(content: str, ids: list[int] | None, reason: str | None = None, **more: Any) -> bytes:
        shown = {"finish_reason": reason, "token_ids": ids if has_ids else None}
        choice = EVENT["choices"][0] | {"delta": {"content": content}} | shown
        return chunk(orjson.dumps(EVENT | {"choices": [choice]} | more))

    first = event("", None, prompt_token_ids=list(range(250)) if has_ids else None)
    texts = [event(f' tok"en{number}', [1000 + number]) for number in range(TOKENS - 1)]
    last = event("end", [7], "length") + chunk(orjson.dumps(EVENT | {"choices": [], "usage": CHAT["usage"]}))
    return [STREAM_HEAD + first, *texts, last + chunk(b"[DONE]") + STREAM_END]


_STREAM, _STREAM_WITH_IDS = _stream(has_ids=False), _stream(has_ids=True)
_WHOLE = [b""] * TOKENS + answer(CHAT)


def _answered(data: bytes) -> list[bytes]:
    """What the engine sends in each step."""
    if b'"return_token_ids":true' in data:
        return _STREAM_WITH_IDS
    return _STREAM if b'"stream": true' in data else _WHOLE


def _documents(count: int, *, streams: bool) -> list[dict[str, object]]:
    """With a stop string, an answer is not continued after a pause, and so its line is not streamed."""
    more: dict[str, object] = {} if streams else {"stop": ["a text that no answer has"]}
    return [each | {"max_tokens": TOKENS} | more for each in islice(chats(SIZES["1k"], 3), count)]


def asked(counter: Counter, units: int, *, streams: bool, through: bool = True) -> None:
    """The requests of clients, streamed or not; `through` a gateway, or without one."""
    more = {"stream": True} if streams else {}
    bodies = [request(_PATH, each | more) for each in _documents(_WARM_UPS + units, streams=streams)]

    async def work(client: Client, own: Iterator[bytes]) -> None:
        for body in own:
            await client.ask(body)

    async def run() -> None:
        with (clients if through else unrouted)(TOGETHER, STREAM_END if streams else _PLAIN_END) as (gateway, each):

            async def all_of(part: list[bytes]) -> None:
                left = iter(part)
                await _stepped(asyncio.gather(*[work(client, left) for client in each]))
                if gateway is not None:
                    gateway.core.finished.settle()

            await all_of(bodies[:_WARM_UPS])
            counter.begin()
            await all_of(bodies[:_WARM_UPS])  # translated
            with counter.counting():
                await all_of(bodies[_WARM_UPS:])

    _run(run())


def batched(counter: Counter, units: int, *, streams: bool) -> None:
    """A batch from its creation to its end, whose lines are sent as streams, or whole."""

    async def run(folder: Path) -> None:
        settings = {"path": str(folder), "lines_in_flight": _LINES_IN_FLIGHT}
        with clients(3, b"", _SLOTS, batches=settings) as (gateway, (client, *uploading)):
            batches = gateway.features["batches"].batches
            assert batches is not None
            await batches.open()
            documents = _documents(_WARM_UPS + units, streams=streams)
            parts = documents[:_WARM_UPS], documents[_WARM_UPS:]
            files = [await _uploaded(each, part) for each, part in zip(uploading, parts, strict=True)]

            async def of(file_id: str) -> None:
                wanted = {"input_file_id": file_id, "endpoint": _PATH.decode(), "completion_window": "24h"}
                await client.ask(request(b"/v1/batches", wanted))
                while batches.runner.states():
                    for _ in range(_STEPS):
                        await _step()
                gateway.core.finished.settle()

            await of(files[0])
            counter.begin()
            await of(files[0])  # translated
            with counter.counting():
                await of(files[1])
            await batches.stop()

    with TemporaryDirectory() as folder:
        _run(run(Path(folder)))


async def _uploaded(client: Client, documents: list[dict[str, object]]) -> str:
    """The id of a file with a line for each of these."""
    lines = [
        orjson.dumps({"custom_id": str(number), "method": "POST", "url": _PATH.decode(), "body": body})
        for number, body in enumerate(documents)
    ]
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="a.jsonl"\r\n\r\n' + b"\n".join(lines))
    form = b"".join([b"--line\r\ncontent-disposition: form-data; %b\r\n" % part for part in parts]) + b"--line--"
    head = b"POST /v1/files HTTP/1.1\r\nhost: gateway:8000\r\ncontent-type: multipart/form-data; boundary=line\r\n"
    found = await client.ask(head + b"content-length: %d\r\n\r\n" % len(form) + form)
    return str(orjson.loads(found.partition(b"\r\n\r\n")[2])["id"])


async def _stepped(work: asyncio.Future[Any]) -> None:
    """Let the engines go on until the work is done."""
    while not work.done():
        await _step()
    await work


async def _step() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Steps)
    loop.step()
    await asyncio.sleep(0)


async def _at_once(_: Threads, do: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Work for threads is done at once, so that it is counted."""
    return do(*args, **options)


def _run(work: Coroutine[None, None, None]) -> None:
    inline = patch.multiple(Threads, run=_at_once, later=lambda _, do: do())
    with inline, asyncio.Runner(loop_factory=_Steps) as runner:
        runner.run(work)


def checked(counter: Counter, units: int) -> None:
    """Lines of one input file, as an upload of a batch checks them."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1500}]}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    source = BytesIO(b"".join(orjson.dumps({"custom_id": str(n), **request}) + b"\n" for n in range(units)))
    limits = InputLimits.of(BatchesConfig(), ServerConfig())
    counter.begin()
    with counter.counting():
        found = check_input(source, request["url"], limits, lambda: None)
    assert len(found.index) == units
