import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.app import Gateway
from gateway.config.file import parse
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard, Telemetry
from gateway.core.backends.health import ProbeResult
from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage
from gateway.core.scheduling.scheduler import Lease

WISH = Demand("m", prompt_tokens=1, output_tokens=1)


class Scene:
    """A gateway that is put together and not started, before one backend of eight engines and a line of nine."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.preemptions = 0.0
        config = parse(
            {"backends": [{"url": "http://10.0.0.1:1", "name": "a"}], "admission": {"itl_objective_seconds": 0.05}}
        )
        self.gateway = Gateway(config, None, clock=lambda: self.now)
        self.fleet = self.gateway.core.fleet
        self.fleet.learned(self.backend, Facts(models=(ModelCard("m"),), max_num_seqs=16))
        self.fleet.probed(self.backend, ProbeResult.OK)

    @property
    def backend(self) -> Backend:
        return self.gateway.core.fleet.backends[0]

    def fill(self) -> list[Lease]:
        """Take every place."""
        taken = []
        while isinstance(placed := self.gateway.core.scheduler.place(WISH, self.now), Lease):
            self.gateway.core.scheduler.first_token(placed, self.now)
            taken.append(placed)
        self.gateway.core.queue.leave(placed)
        return taken

    def look(self, preempted: int = 0) -> None:
        self.now += 2.0
        self.preemptions += preempted
        kv_usage = 0.99 if preempted else 0.5
        self.fleet.measured(
            self.backend, Telemetry(self.now, running=8, waiting=0, preemptions=self.preemptions, kv_usage=kv_usage)
        )

    def moves(self, reason: str) -> float:
        return self.gateway.core.metrics.limit_moves.values.get(("a", reason), 0.0)

    def stream(self, tokens: int = 101, seconds: float = 10.0, **changes: object) -> None:
        record = Record("id", "chat", self.now - seconds - 1)
        record.backend, record.streams, record.demand = "a", True, WISH
        record.usage, record.first_byte_seconds = Usage(5, tokens), self.now - seconds
        record.ended_seconds = self.now
        for name, value in changes.items():
            setattr(record, name, value)
        self.gateway.core.finished.add(record)
        self.gateway.core.finished.settle()


def test_a_falling_limit_holds_at_once_and_a_growing_one_admits_waiting_requests() -> None:
    async def main() -> None:
        scene = Scene()
        lease_broker = scene.gateway.core.lease_broker
        taken = scene.fill()
        assert len(taken) == 16
        waiting = asyncio.get_running_loop().create_task(lease_broker.lease(WISH))
        await asyncio.sleep(0)
        scene.look()
        scene.look(preempted=4)
        assert scene.backend.limit(scene.now) == 15
        for lease in taken[:2]:
            lease_broker.release(lease)
        await asyncio.sleep(0)
        assert not waiting.done()
        for _ in range(2):
            scene.look()
        with await waiting as lease:
            assert lease.backend == "a"
        assert (scene.moves("preemptions"), scene.moves("room")) == (1, 1)

    asyncio.run(main())


def test_the_limiter_gets_the_counts_sent_and_in_flight() -> None:
    scene = Scene()
    taken = scene.fill()
    scene.gateway.core.scheduler.release(taken[0], scene.now)
    assert (scene.backend.in_flight, sum(engine.placed for engine in scene.backend.all_engines)) == (15, 16)


def test_the_pace_of_a_stream_is_that_of_the_tokens_after_the_first() -> None:
    scene = Scene()
    scene.stream(tokens=101, seconds=10.0)
    assert scene.backend.limiter.pace_seconds == pytest.approx(0.1)


def test_several_answers_of_one_request_come_side_by_side() -> None:
    scene = Scene()
    scene.stream(tokens=202, demand=Demand("m", sequences=2))
    assert scene.backend.limiter.pace_seconds == pytest.approx(0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"client_was_slow": True},
        {"streams": False},
        {"first_byte_seconds": None},
        {"usage": None},
        {"demand": None},
        {"backend": ""},
        {"usage": Usage(5, 7)},
    ],
)
def test_what_says_nothing_of_the_engines_pace_is_left_out(changes: dict[str, object]) -> None:
    scene = Scene()
    scene.stream(**changes)
    assert scene.backend.limiter.pace_seconds == 0.0


def test_slow_streams_lower_the_limit() -> None:
    scene = Scene()
    scene.fill()
    scene.look()
    for _ in range(8):
        scene.stream()
    scene.look()
    assert (scene.backend.limiter.limit, scene.moves("inter_token_latency")) == (8, 1)


def test_a_fall_is_logged_once_a_minute_and_a_rise_is_not() -> None:
    scene = Scene()
    with capture_logs() as lines:
        for _ in range(40):
            taken = scene.fill()
            scene.look(preempted=4)
            for lease in taken:
                scene.gateway.core.scheduler.release(lease, scene.now)
            scene.look()
    assert scene.moves("preemptions") > 3
    falls = [line for line in lines if line["event"] == "limit_fell"]
    assert falls[0] == {
        "event": "limit_fell",
        "log_level": "warning",
        "backend": "a",
        "reason": "preemptions",
        "before": falls[0]["before"],
        "after": falls[0]["after"],
    }
    assert 1 <= len(falls) <= 160 / 60 + 1


def test_the_overview_has_the_limit_its_bound_and_its_last_change() -> None:
    scene = Scene()
    [shown] = scene.gateway.operators.overview.backends()
    assert (shown["limit"], shown["limit_upper"], shown["limit_moved"]) == (16, 16, None)
    scene.fill()
    scene.look()
    scene.look(preempted=4)
    scene.now += 5.0
    [shown] = scene.gateway.operators.overview.backends()
    assert (shown["limit"], shown["limit_upper"]) == (15, 16)
    assert shown["limit_moved"] == {"reason": "preemptions", "before": 16, "after": 15, "seconds_ago": 5.0}
