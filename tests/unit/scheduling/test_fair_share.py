import pytest

from gateway.core.request import Demand
from gateway.core.scheduling.fair_share import FairClock, Share, Tenant, Tenants, expected_tokens
from tests.unit.scheduling.builders import ask

MINUTE = 60.0


def test_the_tenant_served_less_for_its_weight_starts_first() -> None:
    clock, light, heavy = FairClock(), Share(1.0, 0.0), Share(4.0, 0.0)
    clock.serve(light, 100)
    clock.serve(heavy, 200)
    assert (clock.start(light), clock.start(heavy)) == (100, 50)


def test_time_is_the_start_of_what_was_bound_last_and_never_runs_backwards() -> None:
    clock, first, second = FairClock(), Share(1.0, 0.0), Share(1.0, 0.0)
    clock.serve(first, 1000)
    clock.serve(first, 1000)
    assert clock.now == 1000
    clock.serve(second, 10)
    assert clock.now == 1000


def test_an_idle_tenant_has_no_credit_and_keeps_its_debt() -> None:
    clock, busy, idle, indebted = FairClock(), Share(1.0, 0.0), Share(1.0, 0.0), Share(1.0, 900.0)
    clock.serve(busy, 500)
    clock.serve(busy, 500)
    for share in (idle, indebted):
        clock.wake(share)
    assert (idle.end, indebted.end) == (500, 900)


def test_credit_of_a_waiting_tenant_and_debt_of_a_returning_one_are_bounded() -> None:
    clock, share = FairClock(), Share(2.0, 0.0)
    clock.now = 1e9
    assert clock.start(share) == 1e9 - 32768
    share.end = 2e9
    clock.wake(share)
    assert share.end == 1e9 + 32768


class Model:
    """One model's tenants; a request takes a slot and a hundred tokens."""

    def __init__(self) -> None:
        self.tenants = Tenants()

    def bind(self, name: str, now: float, *, batch: bool = False, weight: float = 1.0) -> Tenant:
        request = ask(tenant=name, batch=batch, weight=weight)
        tenant = self.tenants.arrived(request, now)
        self.tenants.bound(tenant, request, 1, 100.0, True)
        return tenant

    def is_over_share(self, name: str, now: float, *, batch: bool = False) -> bool:
        return self.tenants.is_over_share(self.tenants.of(ask(tenant=name)), now, batch=batch)


def test_nothing_is_kept_from_a_single_tenant() -> None:
    here = Model()
    for _ in range(10):
        here.bind("a", 0.0)
    assert not here.is_over_share("a", 0.0)


def test_with_another_about_only_those_with_less_than_their_share_may_have_the_last_slots() -> None:
    here = Model()
    for _ in range(10):
        here.bind("a", 0.0)
    here.bind("b", 1.0)
    here.bind("a", 2.0)
    assert here.is_over_share("a", 2.0)
    assert not here.is_over_share("b", 2.0)


def test_by_weight_more_may_be_a_fair_share() -> None:
    here = Model()
    for now in range(3):
        here.bind("a", now, weight=4.0)
    here.bind("b", 3.0)
    here.tenants.clocks[0].now = 1000.0
    assert not here.is_over_share("a", 3.0)


def test_a_tenant_served_ahead_of_others_does_not_get_the_last_slots_however_few_it_has() -> None:
    here = Model()
    for _ in range(5):
        here.bind("a", 0.0)
    tenant = here.bind("b", 0.0)
    tenant.shares[0].end = here.tenants.clocks[0].now + 1
    assert here.is_over_share("b", 0.0)


def test_one_that_was_not_heard_of_for_a_minute_has_nothing_kept_for_it() -> None:
    here = Model()
    here.bind("b", 0.0)
    for _ in range(10):
        here.bind("a", 1.0)
    assert here.is_over_share("a", 1.0)
    assert here.is_over_share("a", MINUTE - 0.1)
    assert not here.is_over_share("a", MINUTE)


def test_the_last_slots_are_kept_from_batch_while_interactive_requests_come_even_from_one_tenant() -> None:
    here = Model()
    here.bind("a", 0.0, batch=True)
    assert not here.is_over_share("a", 0.0, batch=True)
    here.bind("a", 1.0)
    assert here.is_over_share("a", MINUTE, batch=True)
    assert not here.is_over_share("a", MINUTE)
    assert not here.is_over_share("a", MINUTE + 1.0, batch=True)


def test_what_ended_is_counted_as_reported() -> None:
    here = Model()
    request = ask(tenant="a")
    tenant = here.bind("a", 0.0, weight=2.0)
    here.tenants.released(tenant, request, 1, 50.0)
    assert (tenant.in_flight, here.tenants.in_flight, tenant.served_tokens) == (0, 0, 150.0)
    assert tenant.shares[0].end == 75.0


def test_a_changed_weight_counts_for_what_comes() -> None:
    here = Model()
    here.bind("a", 0.0)
    tenant = here.bind("a", 0.0, weight=4.0)
    assert (tenant.weight, tenant.shares[0].end) == (4.0, 125.0)


def test_idle_tenants_are_forgotten_when_there_are_very_many() -> None:
    tenants = Tenants()
    kept = tenants.arrived(ask(tenant="kept"), 0.0)
    tenants.bound(kept, ask(tenant="kept"), 1, 1.0, True)
    for number in range(5000):
        tenants.arrived(ask(tenant=str(number)), float(number))
    names = {tenant.name for tenant in tenants}
    assert len(names) <= 1024
    assert {"kept", "4999", "4600"} <= names


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (Demand("m", prompt_tokens=500), 500 - 100 + 20),
        (Demand("m", prompt_tokens=500, sequences=3), 500 - 100 + 20),
        (Demand("m", prompt_tokens=100), 1 + 20),
        (Demand("m", size_bytes=4000), 1000 + 20),  # embeddings: their size is all that is known
    ],
)
def test_what_a_request_takes_is_uncached_prompt_and_output(request_: Demand, tokens: float) -> None:
    assert expected_tokens(request_, 100, 20.0) == tokens
