"""Sums that add up pass the recount; each way of spoiling them is found, and named."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from gateway.config.file import parse
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Queue, Ticket
from tests.recount import mismatches
from tests.recounted_gateway import LOGGED, VIOLATIONS, RecountedGateway
from tests.unit.routing.crowds import work
from tests.unit.scheduling.builders import Hall, ask, hall


class Scene:
    """One backend of two slots, both taken by prompts that share a block; two requests wait."""

    def __init__(self) -> None:
        self.here: Hall = hall(2)
        wish = ask(keys=(1, 2), edges=(50, 100), prompt_size=120)
        self.bound = [self._bind(wish), self._bind(wish)]
        self.here.scheduler.first_token(self.bound[0], 0.0)
        for _ in range(2):
            assert isinstance(self.here.scheduler.place(ask(), 0.0), Ticket)
        self.load, self.ledger = self.bound[0].engine.load, self.bound[0].engine.kv

    def _bind(self, wish: object) -> Lease:
        placed = self.here.scheduler.place(wish, 0.0)  # type: ignore[arg-type]
        assert isinstance(placed, Lease)
        return placed

    @property
    def queue(self) -> Queue:
        return self.here.queue

    def found(self) -> list[tuple[str, str]]:
        return mismatches(self.here.sites, self.here.queue)


def test_books_that_add_up_pass_while_requests_come_and_go() -> None:
    scene = Scene()
    assert scene.found() == []
    scene.here.scheduler.release(scene.bound[0], 1.0)
    assert scene.found() == []
    scene.here.scheduler.scan_queue("m", 1.0)
    scene.here.scheduler.release(scene.bound[1], 2.0)
    assert scene.found() == []
    scene.here.scheduler.scan_queue("m", 2.0)
    assert scene.found() == []


def _lose_a_request(scene: Scene) -> None:
    scene.load.in_flight -= 1


def _lose_tokens(scene: Scene) -> None:
    scene.load.context_tokens -= 1


def _count_a_first_token_twice(scene: Scene) -> None:
    scene.load.decoding += 1


def _finish_twice(scene: Scene) -> None:
    scene.load.finish(scene.bound[0], 1.0)
    scene.load.finish(scene.bound[0], 1.0)


def _prefill_what_is_not_there(scene: Scene) -> None:
    scene.load.pending[work(0, 0, 0.0, observable=True)] = None


def _lose_kv_tokens(scene: Scene) -> None:
    scene.ledger.taken_tokens -= 16


def _lose_a_margin(scene: Scene) -> None:
    scene.ledger.margins_squared += 1


def _release_a_reservation_alone(scene: Scene) -> None:
    scene.ledger.release(scene.bound[0])


def _miscount_the_line(scene: Scene) -> None:
    scene.queue.requests += 1


def _misweigh_the_line(scene: Scene) -> None:
    scene.queue.size_bytes -= 1


def _miscount_a_tenant(scene: Scene) -> None:
    line = scene.queue.of_model("m")
    assert line is not None
    line.tenants.waiting += 1


def _lose_a_tenants_request(scene: Scene) -> None:
    scene.queue.tenants.of("m").in_flight -= 1


def _forget_who_waits(scene: Scene) -> None:
    scene.queue.tenants.of("m").waiting_tenants = 0


def _release_for_a_tenant_twice(scene: Scene) -> None:
    lease, tenants = scene.bound[0], scene.queue.tenants.of("m")
    for _ in range(3):
        tenants.released(lease.tenant, lease.demand, 1, 0.0)


@pytest.mark.parametrize(
    ("cook", "found"),
    [
        (_lose_a_request, [("in_flight", "a"), ("decoding", "a")]),
        (_lose_tokens, [("context_tokens", "a")]),
        (_count_a_first_token_twice, [("decoding", "a")]),
        (_finish_twice, [("in_flight", "a"), ("context_tokens", "a"), ("decoding", "a")]),
        (_prefill_what_is_not_there, [("prefilling", "a")]),
        (_lose_kv_tokens, [("kv_tokens", "a")]),
        (_lose_a_margin, [("kv_margins", "a")]),
        (_release_a_reservation_alone, [("in_flight", "a"), ("context_tokens", "a")]),
        (_miscount_the_line, [("queued_requests", "")]),
        (_misweigh_the_line, [("queued_bytes", "")]),
        (_miscount_a_tenant, [("waiting_by_tenant", "")]),
        (_lose_a_tenants_request, [("in_flight_by_tenant", "")]),
        (_forget_who_waits, [("waiting_tenants", "")]),
        (_release_for_a_tenant_twice, [("tenant", "")]),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_books_that_do_not_add_up_are_noticed(cook: Callable[[Scene], None], found: list[tuple[str, str]]) -> None:
    scene = Scene()
    cook(scene)
    assert sorted(set(scene.found())) == sorted(found)


def test_tokens_that_an_idle_engine_keeps_are_noticed() -> None:
    scene = Scene()
    for lease in scene.bound:
        scene.here.scheduler.release(lease, 1.0)
    scene.ledger.taken_tokens += 16
    assert ("kv_tokens_when_idle", "a") in scene.found()


def test_every_engine_is_recounted() -> None:
    here = hall(*[100] * 8, max_requests=0)
    for _ in range(800):
        placed = here.scheduler.place(ask(), 0.0)
        assert isinstance(placed, Lease)
        here.scheduler.first_token(placed, 0.0)
    for engine in here.sites:
        engine.load.in_flight += 1
        engine.load.decoding += 1
    found = mismatches(here.sites, here.queue)
    assert [where for what, where in found if what == "in_flight"] == list("abcdefgh")


def test_a_gateway_under_test_counts_and_logs_what_differs_when_its_metrics_are_collected() -> None:
    gateway = RecountedGateway(parse({"backends": [{"url": "http://127.0.0.1:1"}]}), None)
    gateway.core.queue.requests += 1
    with capture_logs() as logs:
        samples = [sample for family in gateway.core.metrics.collect() for sample in family.samples]
    assert [(each.labels, each.value) for each in samples if each.name == VIOLATIONS] == [
        ({"what": "queued_requests"}, 1)
    ]
    assert logs == [{"event": LOGGED, "log_level": "error", "what": "queued_requests", "backend": ""}]
