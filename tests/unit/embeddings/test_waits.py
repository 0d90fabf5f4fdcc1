"""Requests wait for a batch within the bounds of all that waits, and no longer than they may."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.config import EmbeddingsConfig
from gateway.core.errors import DeadlineUnmeetable, QueueFull, WaitExpired
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind
from gateway.core.resources import MemoryBudget
from gateway.core.scheduling.fair_share import Backlog
from gateway.features.embeddings.batcher import Batcher
from gateway.features.embeddings.batching import BatchKey, BatchReason, SentBatch
from gateway.features.embeddings.metrics import EmbeddingMetrics
from gateway.features.embeddings.waiter import BufferedResponse, Outcome, SendUnchanged, Waiter
from tests.unit.scheduling.virtual_time import run, turns

KEY = BatchKey("m", b"{")
IN_FLIGHT_SECONDS = 60.0


class Things:
    """What is batched; a batch takes a minute."""

    work = "things"

    def observe(self, batch: SentBatch, reason: BatchReason) -> None: ...

    async def answer(self, batch: SentBatch) -> BufferedResponse | None:
        await asyncio.sleep(IN_FLIGHT_SECONDS)
        for piece in batch.pieces:
            piece.owner.finish(SendUnchanged.ISOLATED)
        return None


class Waits:
    """A batcher of a model that is so crowded that only the first batch goes at once."""

    def __init__(self, max_requests: int = 100, max_bytes: int = 1000, most_seconds: float = 5.0) -> None:
        self.things = Things()
        self.backlog = Backlog(max_requests, max_bytes)
        self.batcher = Batcher(
            cast(Any, SimpleNamespace(candidates=lambda _: None, on_change=[], on_limit=[])),
            dispatch=cast(Any, None),
            config=EmbeddingsConfig(),
            backlog=self.backlog,
            max_wait_seconds=most_seconds,
            retry_after=lambda _: 3.0,
            metrics=EmbeddingMetrics(Metrics()),
            clock=asyncio.get_running_loop().time,
            memory=MemoryBudget(1000),
            crowded=lambda _: 1,
            response_headers=True,
        )
        self.batcher.sizes_of(self.things, "m").limit = 64
        self.tasks: list[asyncio.Task[Outcome]] = []

    async def ask(
        self, size_bytes: int = 10, deadline_seconds: float | None = None, pieces: int = 1, key: BatchKey = KEY
    ) -> Outcome:
        demand = Demand("m", size_bytes=size_bytes, deadline_seconds=deadline_seconds)
        request = InferenceRequest("embeddings", Kind.POOL, b"POST", b"/v1/embeddings", demand, "id-1")
        waiter = Waiter(request, Record("id-1", "embeddings", 0.0), asyncio.get_running_loop().time())
        pending = self.batcher.pending_for(request, key, self.things)
        waiter.split([range(n, n + 1) for n in range(pieces)], [1] * pieces, [1] * pieces)
        try:
            return await self.batcher.join(pending, waiter)
        finally:
            self.batcher.leave(pending, waiter)

    async def start(self, *given: Any, **options: Any) -> asyncio.Task[Outcome]:
        task = asyncio.get_running_loop().create_task(self.ask(*given, **options))
        self.tasks.append(task)
        await turns(4)
        return task

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await turns(4)
        assert self.batcher.busy == 0, self.batcher
        assert repr(self.backlog) == "<Backlog 0 requests, 0 bytes>"


def test_no_more_wait_than_may() -> None:
    async def main() -> None:
        waits = Waits(max_requests=2, max_bytes=100)
        await waits.start(90)  # goes at once, and does not count
        await waits.start(60)
        with pytest.raises(QueueFull, match="busy with other things and 1 requests are waiting") as full:
            await waits.ask(35)  # one byte in sixteen is kept for the queue
        assert full.value.retry_after_seconds == 3.0
        await waits.start(33)
        with pytest.raises(QueueFull):
            await waits.ask(1)
        await waits.end()

    run(main())


def test_a_request_that_leaves_makes_room() -> None:
    async def main() -> None:
        waits = Waits(max_requests=2, max_bytes=100)
        await waits.start()
        first = await waits.start(40)
        await waits.start(40)
        first.cancel()
        await turns(2)
        with pytest.raises(QueueFull):
            await waits.ask(55)
        await waits.start(54)
        assert repr(waits.backlog) == "<Backlog 2 requests, 94 bytes>"
        await waits.end()

    run(main())


@pytest.mark.parametrize(
    ("deadline_seconds", "error", "ends_after"), [(None, WaitExpired, 5.0), (2.0, DeadlineUnmeetable, 2.0)]
)
def test_a_wait_ends_in_time(
    deadline_seconds: float | None, error: type[WaitExpired | DeadlineUnmeetable], ends_after: float
) -> None:
    async def main() -> None:
        now, waits = asyncio.get_running_loop().time, Waits()
        await waits.start()
        began = now()
        with pytest.raises(error, match="busy with other things until") as raised:
            await waits.ask(10, None if deadline_seconds is None else began + deadline_seconds)
        assert raised.value.retry_after_seconds == 3.0
        assert now() - began == pytest.approx(ends_after)
        await waits.end()

    run(main())


def test_a_wait_that_is_over_lasts_as_long_as_it_likes() -> None:
    async def main() -> None:
        waits = Waits()
        assert await waits.ask() == SendUnchanged.ISOLATED
        assert asyncio.get_running_loop().time() > IN_FLIGHT_SECONDS
        await waits.end()

    run(main())


def test_a_list_counts_until_its_last_piece_is_sent_but_waits_for_the_first_only() -> None:
    async def main() -> None:
        waits, bulk = Waits(), KEY._replace(bulk=True)
        await waits.start(pieces=2, key=bulk)
        await asyncio.sleep(10)
        assert not waits.tasks[0].done()
        assert repr(waits.backlog) == "<Backlog 1 requests, 10 bytes>"
        await asyncio.sleep(IN_FLIGHT_SECONDS)
        assert repr(waits.backlog) == "<Backlog 0 requests, 0 bytes>"
        await waits.end()

    run(main())
