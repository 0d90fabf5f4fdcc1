"""Leases of offline lines: they wait without a limit, run when nothing else does, and are called back."""

import asyncio

from gateway.core.request import Demand
from gateway.features.batches.line_leases import LineLeases
from gateway.features.batches.pace import OfflineLine
from tests.unit.batches.offline_hall import DAY_SECONDS, offline_hall
from tests.unit.scheduling.builders import ask
from tests.unit.scheduling.test_leases import MAX_WAIT_SECONDS
from tests.unit.scheduling.virtual_time import run, turns


def line_of(revoked: asyncio.Event) -> Demand:
    offline = OfflineLine(DAY_SECONDS, lambda now: DAY_SECONDS - now, revoked.set)
    return ask(batch=True, offline=offline)


async def hold_until_revoked(leases: LineLeases, order: list[str], name: str) -> None:
    """As the runner of a batch does."""
    revoked = asyncio.Event()
    with await leases.lease(line_of(revoked)) as lease:
        order.append(f"{name} runs")
        lease.on_first_token()
        await revoked.wait()
    order.append(f"{name} is paused")


def test_a_line_runs_at_once_on_an_idle_engine_and_gives_its_slot_back() -> None:
    async def main() -> None:
        here = offline_hall(2)
        _, lines = here.leases()
        with await lines.lease(line_of(asyncio.Event())):
            assert here.state == "a 1/2; 0 waiting"
        assert here.state == "a 0/2; 0 waiting"
        assert not here.offline

    run(main())


def test_a_request_that_is_no_line_gets_a_usual_lease() -> None:
    async def main() -> None:
        here = offline_hall(1)
        broker, lines = here.leases()
        with await broker.lease(ask()):
            waiting = asyncio.create_task(lines.lease(ask()))
            await turns(5)
            assert here.state == "a 1/1; 1 waiting"
        with await waiting:
            assert not here.offline
        with await lines.lease(ask()):
            assert here.state == "a 1/1; 0 waiting"

    run(main())


def test_a_line_waits_for_longer_than_others_may() -> None:
    async def main() -> None:
        here = offline_hall(1)
        (broker, lines), order = here.leases(), list[str]()
        with await broker.lease(ask()):
            waiting = asyncio.create_task(hold_until_revoked(lines, order, "line"))
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
        here = offline_hall(1)
        (broker, lines), order = here.leases(), list[str]()
        line = asyncio.create_task(hold_until_revoked(lines, order, "line"))
        await turns(5)
        with await broker.lease(ask()):
            order.append("request runs")
        await line
        assert order == ["line runs", "line is paused", "request runs"]
        assert here.state == "a 0/1; 0 waiting"

    run(main())


def test_a_line_whose_holder_leaves_while_it_waits_has_taken_nothing() -> None:
    async def main() -> None:
        here = offline_hall(1)
        broker, lines = here.leases()
        with await broker.lease(ask()):
            waiting = asyncio.create_task(hold_until_revoked(lines, [], "line"))
            await turns(5)
            assert len(here.offline) == 1
            waiting.cancel()
            await turns(5)
        assert not here.offline
        assert broker.waiting == 0

    run(main())
