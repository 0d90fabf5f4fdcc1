import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.errors import QueueFull
from gateway.core.request import Demand
from gateway.core.scheduling.wait_queue import Queue, Ticket
from tests.unit.scheduling import builders
from tests.unit.scheduling.builders import in_order

MAX_REQUESTS, MAX_BYTES = 5, 100


def ticket(model: str = "m", size_bytes: int = 10) -> Ticket:
    return builders.ticket(Demand(model, size_bytes=size_bytes))


class QueueMachine(RuleBasedStateMachine):
    """Tickets join and leave in any order; the model is a list of waiting tickets."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(MAX_REQUESTS, MAX_BYTES)
        self.waiting: list[Ticket] = []
        self.gone: list[Ticket] = []

    @rule(model=st.sampled_from("xyz"), size_bytes=st.integers(0, 60))
    def join(self, model: str, size_bytes: int) -> None:
        joining = ticket(model, size_bytes)
        held = sum(waiting.demand.size_bytes for waiting in self.waiting)
        if len(self.waiting) == MAX_REQUESTS or held + size_bytes > MAX_BYTES:
            with pytest.raises(QueueFull):
                self.queue.join(joining)
            self.gone.append(joining)
        else:
            self.queue.join(joining)
            self.waiting.append(joining)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            leaving = data.draw(st.sampled_from(self.waiting))
            assert self.queue.leave(leaving) is True
            self.waiting.remove(leaving)
            self.gone.append(leaving)

    @rule(data=st.data())
    def leave_again(self, data: st.DataObject) -> None:
        if self.gone:
            assert self.queue.leave(data.draw(st.sampled_from(self.gone))) is False

    @rule(model=st.sampled_from("xyz"), count=st.integers(0, 6))
    def look(self, model: str, count: int) -> None:
        of_model = [waiting for waiting in self.waiting if waiting.demand.model == model]
        assert in_order(self.queue, model, count) == of_model[:count]
        assert self.queue.waiting(model) == len(of_model)

    @invariant()
    def it_holds_exactly_who_waits(self) -> None:
        held = sum(waiting.demand.size_bytes for waiting in self.waiting)
        assert len(self.queue) == len(self.waiting) <= MAX_REQUESTS
        assert repr(self.queue).startswith(f"<Queue {len(self.waiting)} waiting, {held} bytes")
        assert set(self.queue) == set(self.waiting)
        assert set(self.queue.models()) == {waiting.demand.model for waiting in self.waiting}

    def teardown(self) -> None:
        for left in self.waiting:
            self.queue.leave(left)
        assert repr(self.queue) == "<Queue 0 waiting, 0 bytes: empty>"


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_exactly_the_bound_of_requests_may_wait() -> None:
    queue = Queue(2, 1000)
    queue.join(ticket())
    queue.join(ticket())
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        queue.join(ticket())


def test_exactly_the_bound_of_bytes_may_wait() -> None:
    queue = Queue(10, 20)
    queue.join(ticket(size_bytes=15))
    with pytest.raises(QueueFull):
        queue.join(ticket(size_bytes=6))
    queue.join(ticket(size_bytes=5))


def test_with_a_bound_of_zero_no_request_waits() -> None:
    with pytest.raises(QueueFull):
        Queue(0, 1000).join(ticket())


def test_one_models_queue_does_not_show_in_anothers() -> None:
    queue = Queue(10, 1000)
    queue.join(ticket("x"))
    assert in_order(queue, "y", 5) == []
    assert repr(queue) == "<Queue 1 waiting, 10 bytes: x 1>"


def test_names_that_clients_make_up_are_not_kept() -> None:
    queue = Queue(MAX_REQUESTS, MAX_BYTES)
    waiting, busy = ticket("waiting"), queue.tenants.of("busy")
    queue.join(waiting)
    busy.in_flight = 1
    for number in range(5000):
        queue.tenants.of(f"made up {number}")
    assert len(queue.tenants.items()) <= 1024
    assert queue.tenants.of("waiting").waiting == 1
    assert queue.tenants.of("busy") is busy


def test_a_full_queue_refuses_before_any_request_joins_it() -> None:
    queue = Queue(1, MAX_BYTES)
    for now in range(3):
        queue.tenants.of("m").rate.left(1.5 * now)
    queue.refuse_if_full(Demand("m"), 3.0)
    queue.join(ticket())
    with pytest.raises(QueueFull) as refused:
        queue.refuse_if_full(Demand("m"), 3.0)
    assert refused.value.retry_after_seconds == pytest.approx(3.0)
    assert len(queue) == 1


def test_the_last_places_are_kept_from_a_tenant_with_more_than_its_share_while_another_is_about() -> None:
    queue = Queue(32, 320)

    def join(tenant: str, size_bytes: int = 10) -> None:
        wish = Demand("m", tenant=tenant, size_bytes=size_bytes)
        queue.tenants.of("m").arrived(wish, 1.0)
        queue.join(builders.ticket(wish, 1.0))

    join("b")
    for _ in range(29):
        join("a")
    for _ in range(2):
        with pytest.raises(QueueFull):
            join("a")
    join("b")
    join("b")
    with pytest.raises(QueueFull):
        join("b")


def test_a_single_tenant_may_fill_the_queue() -> None:
    queue = Queue(32, 1000)
    for _ in range(32):
        wish = Demand("m", tenant="a")
        queue.tenants.of("m").arrived(wish, 1.0)
        queue.join(builders.ticket(wish, 1.0))
    assert len(queue) == 32
