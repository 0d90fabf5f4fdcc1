"""Tenants share engines by tokens and weight, whatever their requests are like."""

from collections.abc import Callable
from random import Random

import pytest

from gateway.core.request import Demand
from tests.unit.scheduling.builders import STARVATION_SECONDS, ask, hall
from tests.unit.scheduling.crowd import STEP_SECONDS, Crowd

Make = Callable[[Random], tuple[Demand, int]]


def wishes(tenant: str, weight: float = 1.0, prompt: int = 500, output: int = 200, *, batch: bool = False) -> Make:
    """Requests of about that size; the lengths of answers are unknown."""

    def make(random: Random) -> tuple[Demand, int]:
        size = max(1, int(prompt * random.uniform(0.5, 1.5)))
        return ask(tenant=tenant, weight=weight, prompt_tokens=size, batch=batch), random.randint(1, 2 * output)

    return make


def shares(crowd: Crowd) -> dict[str, float]:
    total = sum(crowd.served.values())
    return {tenant: tokens / total for tenant, tokens in crowd.served.items()}


@pytest.mark.parametrize("policy", ["prefix", "least_loaded"])
def test_under_saturation_tenants_get_tokens_by_weight_and_not_by_requests(policy: str) -> None:
    crowd = Crowd(hall(8, 8, policy=policy, max_requests=1000, max_bytes=10**6))
    crowds: dict[str, tuple[int, Make]] = {
        "one": (200, wishes("one", 1.0)),
        "two": (20, wishes("two", 2.0, prompt=5000)),
        "four": (20, wishes("four", 4.0, output=800)),
    }
    for _ in range(2500):
        for tenant, (count, make) in crowds.items():
            crowd.keep_waiting(tenant, count, make)
        crowd.step()
    found = shares(crowd)
    assert found["one"] == pytest.approx(1 / 7, rel=0.1)
    assert found["two"] == pytest.approx(2 / 7, rel=0.1)
    assert found["four"] == pytest.approx(4 / 7, rel=0.1)


@pytest.mark.parametrize("policy", ["prefix", "least_loaded"])
def test_beside_a_flood_an_occasional_tenant_hardly_waits(policy: str) -> None:
    crowd = Crowd(hall(16, 16, policy=policy, max_requests=1000, max_bytes=10**6))
    flood, seldom = wishes("flood"), wishes("seldom")
    for step in range(1500):
        crowd.keep_waiting("flood", 300, flood)
        if step % 50 == 0:
            crowd.send(*seldom(crowd.random))
        crowd.step()
    waits = sorted(crowd.waits["seldom"][1:])
    assert len(waits) >= 28
    assert waits[-1] <= 2 * STEP_SECONDS


def test_without_a_tenant_the_same_request_waits_for_the_whole_queue() -> None:
    crowd = Crowd(hall(16, 16, max_requests=1000, max_bytes=10**6))
    for step in range(1000):
        crowd.keep_waiting("flood", 300, wishes("flood"))
        if step % 50 == 0:
            crowd.send(ask(tenant="flood", prompt_tokens=501), 1)
        crowd.step()
    assert max(crowd.waits["flood"]) > 1.0


def test_batch_requests_wait_while_interactive_ones_do_and_then_take_part_so_that_none_starves() -> None:
    crowd = Crowd(hall(8, max_requests=1000, max_bytes=10**6))
    for _ in range(int(2 * STARVATION_SECONDS / STEP_SECONDS)):
        crowd.keep_waiting("night", 20, wishes("night", batch=True))
        crowd.keep_waiting("day", 20, wishes("day"))
        crowd.step()
    taken = crowd.waits["night"]
    assert all(wait > STARVATION_SECONDS for wait in taken[8:])  # the first found the engine empty
    assert len(taken) > 20
    assert shares(crowd)["night"] < 0.4


def test_batch_requests_have_what_interactive_ones_leave() -> None:
    crowd = Crowd(hall(8, max_requests=1000, max_bytes=10**6))
    for step in range(2000):
        crowd.keep_waiting("night", 20, wishes("night", batch=True))
        if step % 10 == 0:
            crowd.send(*wishes("day")(crowd.random))
        crowd.step()
    waits = sorted(crowd.waits["day"])
    assert waits[int(0.9 * len(waits))] <= 6 * STEP_SECONDS  # until one of eight answers ends; the line is 0.5 s long
    assert shares(crowd)["night"] > 0.5
