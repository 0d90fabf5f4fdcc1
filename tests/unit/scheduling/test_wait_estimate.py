import pytest

from gateway.core.errors import DeadlineUnmeetable, NoBackend
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import Hall, ask, hall


class Moving:
    """One backend with one slot that comes free once a second; twenty have waited, and so many still do."""

    def __init__(self, waiting: int = 30) -> None:
        self.here: Hall = hall(1, max_requests=1000, max_bytes=100_000)
        self.held = self.here.scheduler.place(ask(tenant="a"), 0.0)
        for _ in range(20 + waiting):
            assert isinstance(self.here.scheduler.place(ask(tenant="a"), 0.0), Ticket)
        for _ in range(20):
            self.move()

    def move(self) -> None:
        self.here.now += 1.0
        assert isinstance(self.held, Lease)
        self.here.scheduler.release(self.held, self.here.now)
        [(_, granted)] = self.here.scheduler.scan_queue("m", self.here.now)
        assert isinstance(granted, Lease)
        self.held = granted

    def wait(self, tenant: str) -> float | None:
        return self.here.queue.wait_seconds(ask(tenant=tenant), self.here.now)

    def place(self, within_seconds: float, tenant: str = "a") -> Lease | Ticket:
        wish = ask(tenant=tenant, deadline_seconds=self.here.now + within_seconds)
        return self.here.scheduler.place(wish, self.here.now)


def test_the_wait_follows_from_the_requests_ahead_and_their_service_rate() -> None:
    line = Moving()
    assert line.wait("a") == pytest.approx(31, rel=0.05)
    assert line.wait("b") == pytest.approx(2, rel=0.05)
    assert line.here.queue.tenants.of("m").rate.between_seconds(line.here.now) == pytest.approx(1.0, rel=0.1)


def test_while_few_have_waited_the_wait_is_unknown_and_no_request_is_refused() -> None:
    here = hall(1)
    assert here.queue.wait_seconds(ask(), 0.0) is None
    here.scheduler.place(ask(), 0.0)
    here.scheduler.place(ask(), 0.0)
    assert here.queue.wait_seconds(ask(), 0.0) is None
    assert isinstance(here.scheduler.place(ask(deadline_seconds=0.01), 0.0), Ticket)


def test_a_deadline_is_refused_if_the_wait_is_twice_as_long() -> None:
    line = Moving()
    with pytest.raises(DeadlineUnmeetable) as refused:
        line.place(14.0)
    assert refused.value.retry_after_seconds is not None
    assert len(line.here.queue) == 30
    assert isinstance(line.place(17.0), Ticket)


def test_whose_tenant_is_served_soon_is_not_refused_for_others_that_wait() -> None:
    assert isinstance(Moving().place(2.0, "b"), Ticket)


def test_one_whose_prefill_alone_takes_too_long_is_refused_if_it_would_have_to_wait() -> None:
    here = hall(1, policy="prefix")
    here.scheduler.place(ask(), 0.0)
    with pytest.raises(DeadlineUnmeetable):
        here.scheduler.place(ask(prompt_tokens=100_000, deadline_seconds=1.0), 0.0)


def test_without_a_backend_a_passed_deadline_is_reported_as_such() -> None:
    here = hall(1)
    here.serving["m"] = []
    here.changed()
    assert isinstance(here.scheduler.place(ask(deadline_seconds=5.0), 0.0), Ticket)
    with pytest.raises(NoBackend):
        here.scheduler.place(ask(deadline_seconds=5.0), 6.0)
