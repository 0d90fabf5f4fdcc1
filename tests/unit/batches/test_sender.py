"""Which requests lines become, and what a line teaches of lengths: its whole answer, once, whatever its pauses."""

import asyncio
from collections import defaultdict
from typing import Any, cast

import orjson
import pytest

from gateway.config.file import parse
from gateway.core.ledger import RequestLedger
from gateway.core.observe.record import Record
from gateway.core.request import InferenceRequest, UpstreamResult, Usage
from gateway.core.resources import Holding, MemoryBudget
from gateway.core.routing.estimates import Estimates, OutputLengths
from gateway.core.turns import in_turns
from gateway.features.batches.batch import Owner
from gateway.features.batches.input import Line, LineRequest
from gateway.features.batches.offline import line_of as offline_line_of
from gateway.features.batches.pace import BatchPace
from gateway.features.batches.partial import PartialAnswer
from gateway.features.batches.sender import LineAnswer, LinePaused, LineSender, LinesInFlight, SentLine
from gateway.features.batches.sink import LineSink
from tests.unit.batches.test_partial import Engine
from tests.unit.front.readers import request_reader
from tests.unit.scheduling.virtual_time import run

CHAT = "/v1/chat/completions"
OWNER = Owner("", "")
PACE = BatchPace(0.0, 86400.0, 1)


def line_of(body: dict[str, Any]) -> LineRequest:
    """The first line of an input file."""
    written = orjson.dumps(body)
    return LineRequest(Line(0, 0, len(written)), "a", written, body)


class Backend:
    """Generates an answer of letters, and is interrupted after so many tokens of it, once for each number here."""

    def __init__(self, tokens: int, interrupted_at: tuple[int, ...]) -> None:
        self.engine = Engine([b"a"] * tokens)
        self.interrupted_at = [*interrupted_at]
        self.asked: list[InferenceRequest] = []

    async def dispatch(self, request: InferenceRequest, reply: LineSink, record: Record) -> UpstreamResult:
        self.asked.append(request)
        body = orjson.loads(request.body)
        replayed = body.get("kv_transfer_params", {}).get("prompt_token_ids", [])
        events = self.engine.stream(replayed, ())
        generated = max(0, len(replayed) - len(self.engine.prompt))
        reply.begin(200, b"text/event-stream", b"")
        if self.interrupted_at:
            reply.write(b"".join(events[: 1 + self.interrupted_at.pop(0) - generated]))
            offline_line_of(request.demand).on_revoked()
            raise TimeoutError
        reply.write(b"".join(events))
        usage = Usage(len(self.engine.prompt) + generated, len(self.engine.pieces) - generated)
        record.answered(usage, request.demand, 0, client_was_slow=False)
        return UpstreamResult(200, usage, 0.0)


class Desk:
    """Sends a line until it has its answer, and learns as the gateway does of each request."""

    def __init__(self, backend: Backend, **sections: Any) -> None:
        self.lengths = OutputLengths()
        config = parse({"backends": [{"url": "http://10.0.0.1:8000"}], **sections})
        plain = cast(Any, backend)
        numbers = iter(range(100))
        self.memory = MemoryBudget(1 << 20)
        ledger = RequestLedger(Estimates(), self.finished)
        self.sender = LineSender(
            defaultdict(lambda: plain),
            _as_it_is,
            ledger=ledger,
            memory=self.memory,
            clock=lambda: 0.0,
            unix_seconds=lambda: 0.0,
            new_id=lambda: f"line-{next(numbers)}",
        )
        self.sender.apply(config, request_reader(config))
        self.sender.apply_keys((), are_needed=False)

    def finished(self, record: Record) -> None:
        if record.demand is not None and record.usage is not None:
            self.lengths.answered(record.demand, record.usage)

    async def send(
        self, endpoint: str, line: LineRequest, lines: LinesInFlight, partial: PartialAnswer | None = None
    ) -> LineAnswer:
        """Send it once. Its memory is given back."""
        with Holding(self.memory) as holding:
            return await self.sender.send(
                SentLine(line, endpoint=endpoint, owner=OWNER, lines=lines, holding=holding, partial=partial)
            )

    async def answer(self, max_tokens: int) -> dict[str, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens}
        partial: PartialAnswer | None = None
        while True:
            try:
                answer = await self.send(CHAT, line_of(body), LinesInFlight(PACE), partial)
            except LinePaused as paused:
                partial = paused.partial
            else:
                found: dict[str, Any] = orjson.loads(answer.body)
                return found


async def _as_it_is(request: InferenceRequest) -> InferenceRequest:
    return request


def learned(tokens: int, *interrupted_at: int, max_tokens: int = 1000) -> OutputLengths:
    backend = Backend(tokens, interrupted_at)
    desk = Desk(backend)
    answer = run(desk.answer(max_tokens))
    assert answer["usage"]["completion_tokens"] == tokens
    assert len(backend.asked) == 1 + len(interrupted_at)
    return desk.lengths


@pytest.mark.parametrize("interrupted_at", [(30,), (30, 90), (1, 2, 3, 119), (0, 0, 50)])
def test_a_line_that_is_paused_teaches_what_one_without_a_pause_does(interrupted_at: tuple[int, ...]) -> None:
    assert learned(120, *interrupted_at).learned() == learned(120).learned()


@pytest.mark.parametrize("interrupted_at", [(), (30,), (30, 90)])
def test_an_answer_that_its_own_limit_ends_counts_as_cut_there(interrupted_at: tuple[int, ...]) -> None:
    lengths = learned(120, *interrupted_at, max_tokens=120)
    assert lengths.expected("m", "", None)[0] > 120, "without the limit, it would have been longer"
    assert lengths.expected("m", "", 120)[0] >= 120


def test_lines_that_no_engine_has_are_withdrawn_and_those_on_engines_end() -> None:
    lines, numbers = LinesInFlight(PACE), iter(range(3))

    class Engines:
        """One runs the first line, one fails at the second, and none has room for the third."""

        async def dispatch(self, request: InferenceRequest, reply: LineSink, record: Record) -> UpstreamResult:
            number = next(numbers)
            if number < 2:
                record.placed("m", "http://10.0.0.1:8000", 0.0, 0)
            if number:
                record.attempted(None, 0)
                await asyncio.Event().wait()
            await asyncio.sleep(5)
            reply.send(200, b"application/json", b"", b"{}")
            return UpstreamResult(200, None, 0.0)

    async def withdrawn() -> None:
        desk, line = Desk(cast(Backend, Engines())), line_of(POOLED["/v1/score"])
        runs, *wait = [asyncio.create_task(desk.send("/v1/score", line, lines)) for _ in range(3)]
        await asyncio.sleep(1)
        lines.withdraw()
        for each in wait:
            with pytest.raises(LinePaused):
                await each
        assert not runs.done()
        with pytest.raises(LinePaused):
            await desk.send("/v1/score", line, lines)
        assert (await runs).status == 200

    run(withdrawn())


POOLED = {
    "/v1/embeddings": {"model": "m", "input": ["a", "b"]},
    "/v1/rerank": {"model": "m", "query": "a", "documents": ["b", "c"]},
    "/v1/score": {"model": "m", "text_1": "a", "text_2": ["b", "c"]},
}


@pytest.mark.parametrize("endpoint", POOLED)
def test_lines_of_pooled_endpoints_use_idle_capacity_only(endpoint: str) -> None:
    asked: list[InferenceRequest] = []

    class Pooling:
        async def dispatch(self, request: InferenceRequest, reply: LineSink, record: Record) -> UpstreamResult:
            asked.append(request)
            reply.send(200, b"application/json", b"", b"{}")
            return UpstreamResult(200, None, 0.0)

    desk = Desk(cast(Backend, Pooling()))
    answer = run(desk.send(endpoint, line_of(POOLED[endpoint]), LinesInFlight(PACE)))
    assert answer.status == 200
    [demand] = [request.demand for request in asked]
    assert demand.offline is not None
    assert (demand.batch, demand.divisible, demand.sequences) == (True, True, 2)


def test_a_line_of_a_fallback_uses_idle_capacity_only() -> None:
    asked: list[InferenceRequest] = []

    class NoneServesIt:
        async def dispatch(self, request: InferenceRequest, reply: LineSink, record: Record) -> UpstreamResult:
            assert request.model_choice is not None
            assert request.model_choice.remade is not None
            asked.append(await in_turns(request.model_choice.remade(request, "small")))
            reply.send(200, b"application/json", b"", b"{}")
            return UpstreamResult(200, None, 0.0)

    desk = Desk(cast(Backend, NoneServesIt()), models={"m": {"fallback": ["small"]}})
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    assert run(desk.send(CHAT, line_of(body), LinesInFlight(PACE))).status == 200
    [demand] = [request.demand for request in asked]
    assert (demand.model, demand.batch) == ("small", True)
    assert demand.offline is not None
