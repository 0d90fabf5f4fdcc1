"""Placement decisions, recorded in front of the dispatcher while somebody watches."""

import asyncio
import math
from typing import Any

import pytest

from gateway.core.errors import NoBackend
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind, UpstreamResult
from gateway.core.routing.policy import LeastLoadedPolicy, Options
from gateway.core.scheduling.scheduler import Lease, SchedulerSettings
from gateway.core.scheduling.wait_queue import Ticket
from gateway.features.page.decisions import ENGINES_PER_SECOND, MOST_DECISIONS, Decision, Decisions
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.page.builders import House

ANSWER = UpstreamResult(200, None, 1.0)


class Inner:
    """Answers at once, and notes for which requests."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def dispatch(self, request: InferenceRequest, reply: Any, record: Record) -> UpstreamResult:
        self.sent.append(record.request_id)
        return ANSWER


class Scene:
    """Decisions over a fleet of so many engines."""

    def __init__(self, engines: int = 2) -> None:
        self.house, self.inner = House(engines), Inner()
        self.now = 0.0
        self.decisions = Decisions(self.inner, self.house.gateway.core.lease_broker.explain, lambda: self.now)

    def send(self, request_id: str, **ask: Any) -> UpstreamResult:
        demand = Demand(**({"model": "m", "prompt_tokens": 100, "streams": True} | ask))
        request = InferenceRequest("chat", Kind.GENERATE, b"POST", b"/x", demand, request_id)
        return asyncio.run(self.sent(request, Record(request_id, "chat", 0.0)))

    async def sent(self, request: InferenceRequest, record: Record) -> UpstreamResult:
        return await self.decisions.dispatch(request, reply_on(FakeWire()), record)

    def engines(self, request_id: str) -> Any:
        found = self.decisions.of(request_id)
        assert found is not None
        return found["engines"]


def test_a_request_is_sent_on_and_what_each_engine_would_cost_is_kept() -> None:
    scene = Scene()
    assert scene.send("r") is ANSWER
    found = scene.decisions.of("r")
    assert found is not None
    assert (found["model"], found["prompt_tokens"], found["in_seconds"]) == ("m", 100, True)
    assert sorted(each["backend"] for each in found["engines"]) == ["gpu-0", "gpu-1"]
    assert all(each["open"] and each["cost"] > 0 for each in found["engines"])
    assert found["bound"] is None
    scene.decisions.forget()
    assert scene.decisions.of("r") is None


@pytest.mark.parametrize(("ask", "why"), [({"model": "none"}, "unknown model"), ({"sequences": 0}, "takes no slot")])
def test_requests_without_a_decision_are_sent_on(ask: dict[str, Any], why: str) -> None:
    scene = Scene()
    assert scene.send("r", **ask) is ANSWER, why
    assert (scene.decisions.of("r") or {}).get("engines") is None


def test_only_so_many_engines_are_priced_a_second() -> None:
    scene = Scene(64)
    for number in range(50):
        scene.send(f"r{number}")
    assert sum(bool(scene.engines(f"r{number}")) for number in range(50)) == ENGINES_PER_SECOND // 64
    scene.now = 1.0
    scene.send("later")
    assert scene.engines("later")
    assert len(scene.inner.sent) == 51


def test_the_last_ones_are_kept() -> None:
    scene = Scene(1)
    for number in range(MOST_DECISIONS + 10):
        scene.now += 1.0
        scene.send(f"r{number}")
    assert len(scene.decisions) == MOST_DECISIONS
    assert scene.decisions.of("r9") is None


def test_what_the_backends_refuse_reaches_the_client() -> None:
    scene = Scene()

    async def refuse(request: InferenceRequest, reply: Any, record: Record) -> UpstreamResult:
        raise NoBackend("No backend is up.")

    scene.inner.dispatch = refuse  # type: ignore[method-assign]
    with pytest.raises(NoBackend):
        scene.send("r")


def test_the_choice_is_kept_as_the_scheduler_made_it() -> None:
    scene, now = Scene(), 1000.0
    gateway = scene.house.gateway
    gateway.core.scheduler.apply(SchedulerSettings(), LeastLoadedPolicy())
    gateway.core.scheduler.watch(scene.decisions.bound)
    scene.house.place(8)  # all slots are taken
    demand = Demand("m", prompt_tokens=100, streams=True)
    request = InferenceRequest("chat", Kind.GENERATE, b"POST", b"/x", demand, "r")
    asyncio.run(scene.sent(request, Record("r", "chat", 0.0)))
    ticket = gateway.core.scheduler.place(demand, now)
    assert isinstance(ticket, Ticket)
    assert (scene.decisions.of("r") or {})["bound"] is None
    released = next(iter(gateway.core.fleet.engines()[1].load.pending))
    assert isinstance(released, Lease)
    gateway.core.scheduler.release(released, now)
    scene.now = 0.25
    [(granted, _)] = gateway.core.scheduler.scan_queue("m", now)
    assert granted is ticket
    bound = (scene.decisions.of("r") or {})["bound"]
    assert bound["after_ms"] == 250.0
    assert [(each["backend"], each["chosen"]) for each in bound["engines"]] == [("gpu-1", True), ("gpu-0", False)]


def test_an_engine_that_is_kept_for_a_starving_request_has_no_cost() -> None:
    scene = Scene(1)
    demand, [engine] = Demand("m"), scene.house.gateway.core.fleet.engines()
    decision = Decision("r", demand, 0.0)
    decision.bind(Options([engine], [math.inf]), engine, 1.0)
    document = decision.bound_document()
    assert document is not None
    assert document["engines"][0]["cost"] is None


def test_a_request_id_that_comes_twice_has_its_last_decision() -> None:
    scene = Scene(1)
    scene.send("r")
    scene.send("r", prompt_tokens=7)
    assert (scene.decisions.of("r") or {})["prompt_tokens"] == 7
    assert len(scene.decisions) == 1
