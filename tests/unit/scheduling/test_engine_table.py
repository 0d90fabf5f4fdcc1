"""Which engines may take a request."""

import pytest

from gateway.core.errors import InvalidRequest, ModelNotFound, NoBackend
from gateway.core.request import Demand
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import ask, hall
from tests.unit.scheduling.test_scheduler import bind, drain, wait


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="'other' does not exist") as error:
        hall(1).scheduler.place(Demand("other"), 0.0)
    assert error.value.param == "model"


def test_a_model_without_a_backend_that_is_up_is_unavailable_with_a_hint() -> None:
    here = hall(1, holds=False)
    here.serving["m"] = []
    with pytest.raises(NoBackend) as error:
        here.scheduler.place(ask(), 0.0)
    assert error.value.retry_after_seconds == 2.0


def test_a_retry_avoids_the_backend_that_failed() -> None:
    here = hall(4, 4)
    assert bind(here, avoid=frozenset("a")).engine.name == "b"


def test_a_retry_takes_a_backend_that_failed_when_there_is_no_other() -> None:
    here = hall(4)
    assert bind(here, avoid=frozenset("a")).engine.name == "a"


def test_a_pinned_request_goes_to_its_backend_alone() -> None:
    here = hall(4, 4)
    assert bind(here, ask(pinned="b")).engine.name == "b"
    assert bind(here, ask(pinned="b"), avoid=frozenset("b")).engine.name == "b"
    assert isinstance(here.scheduler.place(ask(pinned="z"), 0.0), Ticket)
    with pytest.raises(NoBackend):
        hall(4, holds=False).scheduler.place(ask(pinned="z"), 0.0)


def test_a_request_that_no_backend_can_ever_run_is_refused() -> None:
    here = hall(2, 4)
    with pytest.raises(InvalidRequest, match="is 4\\. Send fewer") as error:
        here.scheduler.place(ask(sequences=5), 0.0)
    assert error.value.param == "n"
    assert bind(here, ask(sequences=4)).engine.name == "b"


def test_a_limit_that_grew_is_seen_after_a_refresh() -> None:
    here = hall(4)
    here.sites[0].slots = 1
    here.changed()
    bind(here)
    ticket = wait(here)
    here.sites[0].slots = 2
    here.changed()
    assert drain(here) == {ticket: "a"}


def test_a_limit_that_moves_voids_what_was_made_of_it_and_one_that_does_not_voids_nothing() -> None:
    here = hall(4, 4)
    bind(here, ask())
    [engine, _] = here.sites
    before = engine.load.changes
    engine.configure(4, 32, caches_prefixes=False)
    engine.resize(4, None)
    assert (engine.slots, engine.load.changes) == (4, before)
    assert (engine.kv.block_tokens, engine.kv.shares) == (32, False)
    engine.resize(2, None)
    assert engine.slots == 2
    assert engine.load.changes > before


def test_a_model_is_served_while_a_backend_of_it_is_there() -> None:
    here = hall(1)
    table = here.scheduler
    assert table.is_served(ask())
    assert not table.is_served(ask(pinned="z"))
    assert not table.is_served(ask(model="other"))
    assert here.scheduler._may_be_served("m")
    assert here.scheduler._may_be_served("other")  # it never will be: requests that wait for it are refused
    here.serving["m"] = []
    here.changed()
    assert not table.is_served(ask())
    assert not here.scheduler._may_be_served("m")
