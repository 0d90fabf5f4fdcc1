import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.core.supervisor import Supervisor
from tests.unit.scheduling.virtual_time import VirtualLoop, run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_guarded_block_ends_by_its_exception_and_nothing_else_does() -> None:
    supervisor = Supervisor(Clock())
    with capture_logs() as events:
        with supervisor.guard("work"):
            raise ValueError("a fault")
        with supervisor.guard("work"):
            pass
    assert supervisor.faults == {"work": 1}
    assert [(event["event"], event["task"], str(event["exc_info"])) for event in events] == [
        ("background_error", "work", "a fault")
    ]


def test_cancellation_is_no_fault() -> None:
    supervisor = Supervisor(Clock())
    with pytest.raises(asyncio.CancelledError), supervisor.guard("work"):
        raise asyncio.CancelledError
    assert supervisor.faults == {}


def test_each_fault_is_counted_and_one_of_a_kind_is_logged_a_minute() -> None:
    clock = Clock()
    supervisor = Supervisor(clock)
    with capture_logs() as events:
        for error in (ValueError(), ValueError(), KeyError()):
            supervisor.caught("work", error)
        assert len(events) == 2
        clock.now = 61.0
        supervisor.caught("work", ValueError())
    assert len(events) == 3
    assert supervisor.faults == {"work": 4}


async def test_a_step_that_raises_is_taken_again_until_the_block_ends() -> None:
    supervisor, taken = Supervisor(Clock()), 0
    enough = asyncio.Event()

    async def step() -> None:
        nonlocal taken
        taken += 1
        if taken == 5:
            enough.set()
        await asyncio.sleep(0)
        raise RuntimeError

    with capture_logs():
        async with supervisor.repeating("work", step, 0.0), asyncio.timeout(5):
            await enough.wait()
        faults = supervisor.faults["work"]
        await asyncio.sleep(0)
    assert supervisor.faults["work"] == faults >= 4


async def test_what_a_callback_of_the_loop_raises_is_counted() -> None:
    supervisor, loop = Supervisor(Clock()), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: supervisor.on_loop_error(context))

    def fail() -> None:
        raise ValueError("in a callback")

    with capture_logs() as events:
        loop.call_soon(fail)
        loop.call_exception_handler({"message": "words alone"})
        await asyncio.sleep(0)
    assert supervisor.faults == {"event_loop": 2}
    assert {str(event["exc_info"]) for event in events} == {"in a callback", "words alone"}


def test_one_timer_wakes_for_all_looks_and_only_while_there_are_any() -> None:
    supervisor, seen = Supervisor(Clock()), list[tuple[str, float]]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()

        def look(name: str) -> None:
            seen.append((name, round(loop.time() - began, 3)))

        with supervisor.looking("often", lambda: look("often")):
            with supervisor.looking("seldom", lambda: look("seldom"), 0.3):
                await asyncio.sleep(0.65)
            await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)

    run(main())
    assert [when for name, when in seen if name == "often"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    assert [when for name, when in seen if name == "seldom"] == [0.2, 0.5]


def test_a_look_that_raises_is_counted_and_taken_again_and_holds_up_no_other() -> None:
    supervisor, taken = Supervisor(Clock()), list[int]()

    def faulty() -> None:
        raise RuntimeError

    async def main() -> None:
        with supervisor.looking("faulty", faulty), supervisor.looking("sound", lambda: taken.append(1)):
            await asyncio.sleep(0.35)

    with capture_logs():
        run(main())
    assert (supervisor.faults, len(taken)) == ({"faulty": 3}, 3)


def test_a_loop_that_is_held_up_shows_by_how_much() -> None:
    supervisor, late = Supervisor(Clock()), list[float]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        with supervisor.looking("loop_lag", lambda: late.append(round(supervisor.late_seconds, 3))):
            await asyncio.sleep(0.15)
            loop.call_later(0.0, loop.hold_up, 0.35)
            await asyncio.sleep(0.45)

    run(main())
    assert late == [0.0, 0.3, 0.0]
