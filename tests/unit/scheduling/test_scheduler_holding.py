"""Requests that no backend can serve for now wait in the queue, and harm no others there."""

import pytest

from gateway.core.errors import NoBackend
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import ask, hall
from tests.unit.scheduling.test_scheduler import bind, drain, wait


def test_while_no_backend_serves_a_model_its_requests_are_queued() -> None:
    here = hall(2, 2)
    here.serving["m"] = []
    held = [wait(here), wait(here, ask(sequences=0)), wait(here, ask(pinned="b"))]
    assert drain(here) == {}
    assert not here.scheduler.is_served(ask())
    here.serving["m"] = here.sites
    here.changed()
    assert here.scheduler.is_served(ask())
    granted = drain(here)
    assert set(granted) == set(held)
    assert granted[held[2]] == "b"


def test_a_held_request_that_no_backend_can_ever_run_is_refused_when_they_are_back() -> None:
    here = hall(2)
    here.serving["m"] = []
    ticket = wait(here, ask(sequences=3))
    here.serving["m"] = here.sites
    here.changed()
    assert drain(here) == {ticket: "InvalidRequest"}


def test_requests_held_for_a_lost_backend_do_not_block_others() -> None:
    here = hall(1, 1, scan=4)
    running = [bind(here, ask(pinned=name)) for name in "ab"]
    here.serving["m"] = here.sites[:1]
    here.changed()
    held = [wait(here, ask(pinned="b")) for _ in range(11)]
    last = wait(here)
    here.scheduler.release(running[0], 0.0)
    assert drain(here) == {last: "a"}
    here.scheduler.release(running[1], 0.0)
    here.serving["m"] = here.sites
    here.changed()
    assert drain(here) == {held[0]: "b"}


def test_a_request_that_is_not_to_be_held_fails_when_its_last_backend_is_lost() -> None:
    here = hall(1)
    bind(here)
    held = wait(here)
    unheld = here.scheduler.place(ask(), 0.0, holds=False)
    assert isinstance(unheld, Ticket)
    assert drain(here) == {}
    here.serving["m"] = []
    here.changed()
    assert drain(here) == {unheld: "NoBackend"}
    assert [*here.queue] == [held]
    with pytest.raises(NoBackend):
        here.scheduler.place(ask(), 0.0, holds=False)
    here.serving["m"] = here.sites
    here.changed()
    assert isinstance(here.scheduler.place(ask(), 0.0, holds=False), Ticket)  # it waits while a backend is there
