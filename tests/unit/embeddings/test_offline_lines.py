"""A thousand embeddings lines of an offline batch, and clients' requests to the same engine, which works in order."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from gateway.core.backends.backend import Backend
from gateway.core.request import Demand, InferenceRequest, Sink, UpstreamResult
from gateway.core.routing.estimates import CostModel
from gateway.features.batches.offline import line_of
from gateway.features.batches.pace import OfflineLine
from tests.unit.embeddings.scene import Scene, Sent, tokens, vectors_in
from tests.unit.scheduling.virtual_time import run, turns

LINES = 1000
CLIENTS = 60
CHUNK_TOKENS = 8192  # of an engine step
TOKEN_SECONDS = CostModel().b
CHUNK_SECONDS = CHUNK_TOKENS * TOKEN_SECONDS
DAY_SECONDS = 86400.0
TEXT = "word " * 98


class InOrder(Scene):
    """One engine that computes one call after the other; `slowness`: compared with what the gateway expects."""

    def __init__(self, slowness: float = 1.0) -> None:
        super().__init__()
        self.token_seconds = slowness * TOKEN_SECONDS
        self.free_at = self.clock()
        self.asked_at: dict[str, float] = {}  # by the texts of clients
        self.came_at: dict[str, float] = {}  # to the engine, by all texts
        self.most_ahead_tokens = 0  # of lines, when a client's call came
        self._line_tokens = 0  # of calls that are not over

    async def send(
        self,
        request: InferenceRequest,
        to: Backend,
        sink: Sink,
        first_token: Callable[[], None],
        came: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool,
        last: bool,
    ) -> UpstreamResult:
        now, is_line, items = self.clock(), request.demand.batch, Sent(to.name, request, 0.0).items
        count = sum(map(tokens, items))
        self.came_at.update(dict.fromkeys(map(str, items), now))
        if is_line:
            self._line_tokens += count
        else:
            self.most_ahead_tokens = max(self.most_ahead_tokens, self._line_tokens)
        self.free_at = max(now, self.free_at) + self.token_seconds * count
        await asyncio.sleep(self.free_at - now)
        if is_line:
            self._line_tokens -= count
        return await super().send(request, to, sink, first_token, came, rank=rank, fresh=fresh, last=last)

    async def client(self, number: int, at_seconds: float) -> float:
        """How long a client waits that asks at this time."""
        await asyncio.sleep(at_seconds)
        text, began = f"{TEXT}client {number}", self.clock()
        self.asked_at[text] = began
        wire = await self.ask(text, f"client-{number}")
        assert len(vectors_in(wire)) == 1
        return self.clock() - began

    async def line(self, number: int, line: OfflineLine | None) -> None:
        wire = await self.ask(f"{TEXT}line {number}", f"line-{number}", batch=True, offline=line)
        assert len(vectors_in(wire)) == 1


def a_line() -> OfflineLine:
    return OfflineLine(DAY_SECONDS, lambda now: DAY_SECONDS - now, lambda: None)


def beside(lines: int, line: OfflineLine | None, slowness: float = 1.0) -> tuple[list[float], InOrder]:
    """The waits of clients that ask at random times beside so many lines, and the engine."""

    async def main() -> tuple[list[float], InOrder]:
        scene, random = InOrder(slowness), Random(1)
        running = [asyncio.create_task(scene.line(number, line)) for number in range(lines)]
        times = [random.uniform(0.0, 4.0) for _ in range(CLIENTS)]
        waits = await asyncio.gather(*(scene.client(number, at) for number, at in enumerate(times)))
        await asyncio.gather(*running)
        await scene.check_that_nothing_is_left()
        return list(waits), scene

    return run(main())


def test_batch_requests_make_clients_wait_for_several_engine_steps() -> None:
    waits, scene = beside(LINES, None)
    assert max(waits) > 2 * CHUNK_SECONDS
    assert scene.most_ahead_tokens > 2 * CHUNK_TOKENS


def test_lines_make_no_client_wait_for_a_whole_engine_step() -> None:
    alone, _ = beside(0, None)
    waits, scene = beside(LINES, a_line())
    assert max(wait - without for wait, without in zip(waits, alone, strict=True)) < CHUNK_SECONDS
    assert scene.most_ahead_tokens <= CHUNK_TOKENS / 2


def test_an_engine_that_is_slower_than_expected_has_no_more_lines_before_clients() -> None:
    _, scene = beside(LINES // 5, a_line(), slowness=10.0)
    assert scene.most_ahead_tokens <= CHUNK_TOKENS / 2


def test_lines_share_calls_with_each_other_alone() -> None:
    _, scene = beside(LINES, a_line())
    calls = [sent for sent in scene.sent if sent.request.demand.batch]
    assert len(calls) <= LINES / 10
    for sent in scene.sent:
        are_lines = {"line" in str(item) for item in sent.items}
        assert are_lines == {sent.request.demand.batch}
        assert (sent.request.demand.offline is not None) is sent.request.demand.batch


def test_the_batcher_keeps_no_client_behind_lines() -> None:
    _, scene = beside(LINES, a_line())
    for text, asked_at in scene.asked_at.items():
        assert scene.came_at[text] - asked_at < scene.batcher.config.max_delay_seconds + 1e-9


def test_lines_that_wait_take_no_room_from_clients_in_the_queue() -> None:
    async def main() -> None:
        scene = InOrder()
        waiting = [asyncio.create_task(scene.line(number, a_line())) for number in range(LINES)]
        await turns(5)
        assert repr(scene.queue.backlog) == "<Backlog 0 requests, 0 bytes>"
        await asyncio.gather(*waiting)
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_line_waits_until_its_batch_expires_and_not_as_long_as_requests_may() -> None:
    async def main() -> None:
        scene = InOrder()
        in_prefill = await scene.lease_broker.lease(Demand("m", prompt_tokens=10_000_000, streams=True))
        expires = OfflineLine(scene.clock() + 600.0, lambda _: DAY_SECONDS, lambda: None)
        began = scene.clock()
        wire = await scene.ask(f"{TEXT}line", batch=True, offline=expires)
        assert wire.status == 429
        assert scene.clock() - began == pytest.approx(600.0)
        scene.lease_broker.release(in_prefill)
        await scene.check_that_nothing_is_left()

    run(main())


def test_a_call_of_lines_whose_lease_is_revoked_ends_by_itself() -> None:
    async def main() -> None:
        scene = InOrder()
        revoked: list[int] = []
        line = OfflineLine(DAY_SECONDS, lambda _: DAY_SECONDS, lambda: revoked.append(1))
        lines = [asyncio.create_task(scene.line(number, line)) for number in range(40)]
        [engine, *_] = scene.fleet.candidates("m")
        while not scene.offline.leases(engine).held:
            await asyncio.sleep(0.001)
        held = list(scene.offline.leases(engine).held)
        scene.offline.revoke(held)
        for lease in held:
            line_of(lease.demand).on_revoked()
        await asyncio.gather(*lines)
        assert not any(sent.aborted for sent in scene.sent)
        await scene.check_that_nothing_is_left()

    run(main())
