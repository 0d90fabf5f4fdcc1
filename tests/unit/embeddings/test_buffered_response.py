"""An answer in memory, of which no more is kept than may be."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.core.errors import BackendFault, GatewayError, MemoryFull, WrongAnswer
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind, Sink, UpstreamResult
from gateway.core.resources import Holding, MemoryBudget
from gateway.features.embeddings.waiter import BufferedResponse
from tests.unit.scheduling.virtual_time import run


def collected(most_bytes: int = 100, limit_bytes: int = 1000) -> tuple[BufferedResponse, MemoryBudget]:
    budget = MemoryBudget(limit_bytes)
    return BufferedResponse(most_bytes, Holding(budget)), budget


async def fetched(step: Callable[[Sink], Awaitable[object]], most_bytes: int, budget: MemoryBudget) -> BufferedResponse:
    """What is kept of an answer."""

    async def dispatch(_request: InferenceRequest, sink: Sink, _record: Record) -> UpstreamResult:
        await step(sink)
        return UpstreamResult(200, None, None)

    request = InferenceRequest("embeddings", Kind.POOL, b"POST", b"/v1/embeddings", Demand("m"), "id")
    return await BufferedResponse(most_bytes, Holding(budget)).fetch(dispatch, request, Record("id", "embeddings", 0.0))


def test_a_whole_answer() -> None:
    sink, budget = collected()
    sink.comment()
    assert not sink.begun
    sink.send(200, b"application/json", b"x: y\r\n", b"{}")
    assert sink.begun
    assert (sink.status, sink.content_type, sink.headers, sink.body) == (200, b"application/json", b"x: y\r\n", b"{}")
    assert budget.used_bytes == 2


def test_a_long_answer_in_pieces() -> None:
    sink, budget = collected(most_bytes=4)
    sink.begin(200, b"application/json", b"")
    assert [sink.write(b"ab"), sink.write(b"cd")] == [False, False]
    sink.end()
    assert sink.body == b"abcd"
    assert budget.used_bytes == 4
    assert repr(sink) == "<BufferedResponse 200, 4 of at most 4 bytes>"


def test_nothing_has_begun_or_is_in_the_way_at_first() -> None:
    sink, _ = collected()
    assert (sink.blocked, sink.begun) == (False, False)


@pytest.mark.parametrize(
    ("most_bytes", "limit_bytes", "error"), [(10, 1000, WrongAnswer), (1000, 10, MemoryFull)], ids=["bound", "budget"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_over_the_bound_is_aborted_and_not_kept(
    most_bytes: int, limit_bytes: int, error: type[GatewayError], whole: bool
) -> None:
    async def main() -> None:
        budget, aborted = MemoryBudget(limit_bytes), asyncio.Event()
        kept: list[BufferedResponse] = []

        async def answers(sink: Sink) -> None:
            assert isinstance(sink, BufferedResponse)
            kept.append(sink)
            try:
                sink.begin(200, b"", b"")
                assert not sink.write(b"12345")
                assert sink.write(b"123456")
                assert sink.write(b"1")  # and nothing of what still comes
                if not whole:
                    await asyncio.sleep(60)
            except asyncio.CancelledError:
                aborted.set()
                raise

        with pytest.raises(error):
            await fetched(answers, most_bytes, budget)
        assert aborted.is_set() is not whole
        assert (kept[0].body, budget.used_bytes) == (b"12345", 5)
        async with asyncio.timeout(60):
            await asyncio.sleep(1)

    run(main())


async def _fails(_: Sink) -> None:
    raise BackendFault("broken")


async def _times_out(_: Sink) -> None:
    async with asyncio.timeout(1):
        await asyncio.sleep(60)


@pytest.mark.parametrize(("step", "error"), [(_fails, BackendFault), (_times_out, TimeoutError)])
def test_what_fails_otherwise_fails_as_it_does(step: Callable[[Sink], Awaitable[None]], error: type[Exception]) -> None:
    async def main() -> None:
        with pytest.raises(error):
            await fetched(step, 100, MemoryBudget(1000))

    run(main())


def test_an_answer_within_the_bounds_is_kept() -> None:
    async def answers(sink: Sink) -> None:
        sink.send(200, b"text/plain", b"", b"1234")

    async def main() -> None:
        assert (await fetched(answers, 4, MemoryBudget(4))).body == b"1234"

    run(main())
