"""Leases of offline lines: they wait without a limit, run when nothing else does, and are called back."""

import asyncio

from gateway.request import Demand, OfflineLine
from gateway.scheduling.leases import LeaseBroker
from tests.unit.scheduling.builders import ask, hall
from tests.unit.scheduling.test_leases import MAX_WAIT_SECONDS, gate_of
from tests.unit.scheduling.virtual_time import run, turns

WINDOW_SECONDS = 86400.0


def line_of(revoked: asyncio.Event) -> Demand:
    offline = OfflineLine(WINDOW_SECONDS, lambda now: WINDOW_SECONDS - now, revoked.set)
    return ask(batch=True, offline=offline)


async def hold_until_revoked(broker: LeaseBroker, order: list[str], name: str) -> None:
    """As the runner of a batch does."""
    revoked = asyncio.Event()
    with await broker.lease(line_of(revoked)) as lease:
        order.append(f"{name} runs")
        lease.on_first_token()
        await revoked.wait()
    order.append(f"{name} is paused")


def test_a_line_runs_at_once_on_an_idle_engine_and_gives_its_slot_back() -> None:
    async def main() -> None:
        here = hall(2)
        with await gate_of(here).lease(line_of(asyncio.Event())):
            assert here.state == "a 1/2; 0 waiting"
        assert here.state == "a 0/2; 0 waiting"
        assert not here.scheduler.offline

    run(main())


def test_a_line_waits_for_longer_than_others_may() -> None:
    async def main() -> None:
        here = hall(1)
        broker, order = gate_of(here), list[str]()
        with await broker.lease(ask()):
            waiting = asyncio.create_task(hold_until_revoked(broker, order, "line"))
            await asyncio.sleep(10 * MAX_WAIT_SECONDS)
            assert order == []
            assert not waiting.done()
        await turns(5)
        assert order == ["line runs"]
        waiting.cancel()
        await turns(5)
        assert here.state == "a 0/1; 0 waiting"

    run(main())


def test_an_interactive_request_gets_the_slot_of_a_line() -> None:
    async def main() -> None:
        here = hall(1)
        broker, order = gate_of(here), list[str]()
        line = asyncio.create_task(hold_until_revoked(broker, order, "line"))
        await turns(5)
        with await broker.lease(ask()):
            order.append("request runs")
        await line
        assert order == ["line runs", "line is paused", "request runs"]
        assert here.state == "a 0/1; 0 waiting"

    run(main())


def test_a_line_whose_holder_leaves_while_it_waits_has_taken_nothing() -> None:
    async def main() -> None:
        here = hall(1)
        broker = gate_of(here)
        with await broker.lease(ask()):
            waiting = asyncio.create_task(hold_until_revoked(broker, [], "line"))
            await turns(5)
            assert len(here.scheduler.offline) == 1
            waiting.cancel()
            await turns(5)
        assert not here.scheduler.offline
        assert broker.waiting == 0

    run(main())
