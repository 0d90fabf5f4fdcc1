"""The queue as the dashboard shows it, with the reason why the next requests wait."""

from typing import Any

from gateway.core.backends.health import ProbeResult
from gateway.core.request import Demand
from gateway.features.page.queue_view import QueueRules, offline_view, queue_view, why_closed
from tests.unit.batches.offline_hall import a_line, offline_hall
from tests.unit.page.builders import House
from tests.unit.scheduling.builders import ask, engine, hall

RULES = QueueRules(4096, 1.0, 0.1, starvation_seconds=30.0)


def view(house: House) -> dict[str, Any]:
    gateway = house.gateway
    return queue_view(
        gateway.core.queue, gateway.core.lease_broker.explain, gateway.core.fleet.why_none, RULES, house.now
    )


def test_an_empty_queue_has_no_models() -> None:
    assert view(House()) == {"waiting": 0, "waiting_bytes": 0, "limit": 4096, "models_not_shown": 0, "models": []}


def test_tenants_are_counted_by_class_and_the_next_request_says_what_it_waits_for() -> None:
    house = House(2)
    house.place(8)
    house.now += 1.0
    house.place(3, tenant="a")
    house.place(1, tenant="b", batch=True)
    house.now += 2.0
    shown = view(house)
    assert (shown["waiting"], shown["waiting_bytes"]) == (4, 40)
    [model] = shown["models"]
    flows = [(flow["tenant"], flow["class"], flow["waiting"], flow["oldest_seconds"]) for flow in model["flows"]]
    assert flows == [("a", "interactive", 3, 2.0), ("b", "batch", 1, 2.0)]
    first = model["head"][0]
    assert (first["tenant"], first["waited_seconds"], first["starving"], first["why"]) == ("a", 2.0, False, "")
    assert {each["engine"] for each in first["engines"]} == {"gpu-0", "gpu-1"}
    assert [each["why"] for each in first["engines"]] == ["4 of 4 slots taken"] * 2
    assert len(model["head"]) == 4


def test_the_last_slots_are_kept_for_others_and_that_is_said() -> None:
    house = House(1)
    house.place(1, tenant="b")
    house.place(2, tenant="a")
    house.place(1, tenant="a")  # it would take the last slot
    assert house.gateway.core.fleet.engines()[0].load.in_flight == 3
    house.place(1, tenant="c", batch=True)
    [model] = view(house)["models"]
    whys = {head["tenant"]: head["engines"][0]["why"] for head in model["head"]}
    assert whys == {
        "a": "3 of 4 slots taken, 1 kept for other tenants",
        "c": "3 of 4 slots taken, 1 kept for interactive requests",
    }


def test_requests_of_a_model_without_a_backend_say_why_none_serves_it() -> None:
    house = House(1)
    house.place(4)
    house.place(1)
    for _ in range(5):
        house.gateway.core.fleet.probed(house.gateway.core.fleet.backends[0], ProbeResult.REFUSED, "connection refused")
    [model] = view(house)["models"]
    assert model["head"][0]["why"] == "gpu-0: connection refused"
    assert model["head"][0]["engines"] == []


def test_a_long_queue_of_many_tenants_is_cut_to_the_largest() -> None:
    here = hall(1, max_requests=5000, max_bytes=1_000_000)
    here.scheduler.place(ask(), 0.0)
    for number in range(1000):
        for _ in range(2 if number == 7 else 1):
            here.scheduler.place(ask(tenant=f"t{number}"), 0.0)

    def explain(demand: Demand, avoid: frozenset[str]) -> Any:
        return here.scheduler.explain(demand, 0.0, avoid)

    [model] = queue_view(here.queue, explain, str, RULES, 1.0)["models"]
    assert (model["waiting"], len(model["flows"]), model["flows_not_shown"], len(model["head"])) == (1001, 20, 980, 8)
    assert model["flows"][0]["tenant"] == "t7"


def test_the_reason_of_a_closed_engine_is_that_of_admission() -> None:
    crowded, small, short = engine(0, 2), engine(1, 2), engine(2, 4, kv=100)
    here = hall(2, policy="prefix")
    lease = here.scheduler.place(ask(), 0.0)
    assert lease
    assert why_closed(small, ask(sequences=3), RULES, 0.0) == "3 sequences exceed its cap of 2"
    assert why_closed(here.sites[0], ask(sequences=2), RULES, 0.0) == "1 of 2 slots taken, 2 needed"
    rules = QueueRules(4096, 0.9, 0.0001, starvation_seconds=30.0)
    assert why_closed(here.sites[0], ask(), rules, 0.0) == "prefill ahead 0.00 s, limit 0.0001 s"
    assert why_closed(short, ask(), RULES, 0.0) == "KV cache: 0 of 100 tokens reserved, 100 in the prompt"
    assert why_closed(crowded, ask(), RULES, 0.0) == "no capacity"


def test_offline_lines_are_counted_by_model() -> None:
    here = offline_hall(1)
    assert offline_view(here.offline.counts()) == []
    for _ in range(3):
        here.place(ask(batch=True, offline=a_line()))
    assert len(here.offline.bind(0.0)) == 1
    assert offline_view(here.offline.counts()) == [{"model": "m", "waiting": 2, "in_flight": 1}]
