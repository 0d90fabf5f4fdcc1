"""When the requests scanned first keep waiting for busy engines, idle ones are offered to those behind them."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.request import Demand
from gateway.core.scheduling.admission import QueueScan
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import POLICIES, Hall, ask, hall

SCAN = 4
FURTHER = 4 * SCAN  # are looked at then
KEYS = tuple(range(1, 42))
EDGES = tuple(range(2500, 102_501, 2500))


def wait(here: Hall, wish: Demand) -> Ticket:
    placed = here.scheduler.place(wish, here.now)
    assert isinstance(placed, Ticket)
    return placed


def drain(here: Hall) -> dict[Ticket, str]:
    return {
        ticket: bound.engine.name
        for ticket, bound in here.scheduler.scan_queue("m", here.now)
        if isinstance(bound, Lease)
    }


def busy_hall(policy: str = "prefix", pinned: int = 0) -> tuple[Hall, Lease]:
    """Backend a is busy, b is idle; so many wait for a, whatever happens. Returns what runs on a, too."""
    here = hall(1, 1, policy=policy, scan=SCAN, max_bytes=1 << 30, max_requests=1000)
    running = here.scheduler.place(ask(pinned="a"), here.now)
    assert isinstance(running, Lease)
    for _ in range(pinned):
        wait(here, ask(pinned="a"))
    return here, running


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_engine_is_offered_to_those_behind_the_first(policy: str) -> None:
    here, _ = busy_hall(policy, pinned=SCAN)
    last = wait(here, ask())
    assert drain(here) == {last: "b"}


def test_another_engine_is_used_when_too_many_wait_for_the_best_one() -> None:
    here, _ = busy_hall()
    here.index.record(0, KEYS, EDGES)
    tickets = [
        wait(
            here,
            ask(
                keys=(*KEYS, more), edges=(*EDGES, 125_000), prompt_size=125_000, prompt_tokens=34_000, output_tokens=1
            ),
        )
        for more in range(100, 100 + FURTHER)
    ]
    [(ticket, engine)] = drain(here).items()
    assert engine == "b"
    assert tickets.index(ticket) > SCAN


def test_all_are_asked_after_a_while_however_many_wait() -> None:
    here, _ = busy_hall(pinned=3 * FURTHER)
    last = wait(here, ask())
    for _ in range(3):
        assert drain(here) == {}
        here.now += 0.06
    [(ticket, lease)] = here.scheduler.scan_queue("m", here.now)
    assert ticket is last
    assert isinstance(lease, Lease)
    here.scheduler.release(lease, here.now)
    last = wait(here, ask())
    for _ in range(4):  # once more from the first on
        here.now += 0.06
        granted = drain(here)
    assert granted == {last: "b"}


def test_an_engine_that_is_as_busy_as_others_is_not_worth_asking_further() -> None:
    here = hall(1, 2, policy="least_loaded", scan=SCAN, max_bytes=1 << 30)
    for name in "ab":
        here.scheduler.place(ask(pinned=name), here.now)
    for _ in range(SCAN):
        wait(here, ask(pinned="a"))
    wait(here, ask())
    assert drain(here) == {}


def test_the_cost_of_a_scan_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = busy_hall("least_loaded", pinned=10 * FURTHER)
    looks: list[int] = []
    run = QueueScan.run

    def counted(self: QueueScan, tickets: Sequence[Ticket], *others: Any) -> None:
        looks.append(len(tickets))
        run(self, tickets, *others)

    monkeypatch.setattr(QueueScan, "run", counted)
    for now in (1.0, 1.01, 1.04, 1.06, 1.07):
        here.now = now
        drain(here)
    assert looks == [SCAN, FURTHER, SCAN, SCAN, SCAN, FURTHER, SCAN]
