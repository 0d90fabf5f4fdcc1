import asyncio
from typing import Any

import pytest

from gateway.core.observe.metrics import Metrics
from gateway.core.scheduling.scheduler import Lease
from gateway.features.operate.admin import QueueView
from tests.unit.batches.offline_hall import a_line, offline_hall
from tests.unit.scheduling.builders import ask


class Scene:
    """One backend with one slot, taken by tenant `a`."""

    def __init__(self) -> None:
        self.here = offline_hall(1, max_requests=1000, max_bytes=100_000)
        self.view = QueueView(
            self.here.queue, self.here.offline.counts, lambda: ["m", "o"], names=["key"], clock=self.here.clock
        )
        self.held = self.here.scheduler.place(ask(tenant="a"), 0.0)

    @property
    def charged(self) -> float:
        assert isinstance(self.held, Lease)
        return self.held.charged_tokens

    def join(self, *tenants: str, batch: bool = False, weight: float = 1.0) -> None:
        for tenant in tenants:
            self.here.scheduler.place(ask(tenant=tenant, batch=batch, weight=weight), self.here.now)

    def gauge(self, name: str = "gateway_queued_requests_by_tenant") -> dict[tuple[str, ...], float]:
        metrics = Metrics()
        self.view.add_gauges(metrics)
        [found] = [live for live in metrics if live.name == name]
        return {tuple(sample.labels.values()): sample.value for sample in found.family().samples}

    def model(self, name: str = "m") -> dict[str, Any]:
        [found] = [model for model in asyncio.run(self.view.document())["models"] if model["model"] == name]
        return dict(found)


def test_waiting_requests_are_counted_by_tenant_and_class() -> None:
    scene = Scene()
    assert scene.gauge() == {}
    scene.join("a", "a", "b")
    scene.join("a", "", batch=True)
    assert scene.gauge() == {
        ("m", "a", "interactive"): 2, ("m", "b", "interactive"): 1, ("m", "a", "batch"): 1, ("m", "", "batch"): 1,
    }  # fmt: skip


def test_the_names_of_tenants_in_metrics_are_bounded_and_those_of_keys_are_among_them() -> None:
    scene = Scene()
    scene.join(*(f"t{number}" for number in range(150)), "key")
    counts = scene.gauge()
    assert len(counts) == 101
    assert counts["m", "other", "interactive"] == 151 - 100
    assert counts["m", "key", "interactive"] == 1
    assert scene.gauge() == counts


def test_the_queue_is_shown_live() -> None:
    scene = Scene()
    scene.join("a", "a")
    scene.join("b", weight=2.0)
    scene.here.now = 4.0
    scene.join("b", batch=True)
    model = scene.model()
    assert (model["waiting"], model["in_flight"], model["line_seconds"]) == (4, 1, 4.0)
    assert [tenant["tenant"] for tenant in model["tenants"]] == ["a", "b"]
    first, second = model["tenants"]
    assert (first["in_flight"], first["weight"], first["served_tokens"]) == (1, 1.0, scene.charged)
    assert [(one["class"], one["waiting"], one["oldest_wait_seconds"]) for one in first["classes"]] == [
        ("interactive", 2, 4.0)
    ]
    assert first["classes"][0]["tokens_ahead"] == scene.charged
    assert first["classes"][0]["expected_wait_seconds"] is None
    assert [(one["class"], one["waiting"], one["oldest_wait_seconds"]) for one in second["classes"]] == [
        ("interactive", 1, 4.0), ("batch", 1, 0.0),
    ]  # fmt: skip
    assert asyncio.run(scene.view.document())["waiting"] == 4


def test_a_model_without_waiting_requests_is_shown_empty() -> None:
    model = Scene().model("o")
    assert (model["waiting"], model["drain_requests_per_second"], model["tenants"]) == (0, None, [])


def test_the_rate_and_the_wait_are_shown_once_they_are_known() -> None:
    scene = Scene()
    scene.join(*["a"] * 40)
    held = scene.held
    for _ in range(20):
        scene.here.now += 1.0
        assert isinstance(held, Lease)
        scene.here.scheduler.release(held, scene.here.now)
        [(_, granted)] = scene.here.scheduler.scan_queue("m", scene.here.now)
        assert isinstance(granted, Lease)
        held = granted
    model = scene.model()
    assert model["drain_requests_per_second"] == pytest.approx(1.0, rel=0.1)
    assert model["tenants"][0]["classes"][0]["expected_wait_seconds"] == pytest.approx(21, rel=0.05)


def test_requests_held_for_models_that_no_backend_listed_are_counted_together() -> None:
    scene = Scene()
    for model in ("made up", "another"):
        scene.here.serving[model] = []
        scene.here.scheduler.place(ask(model=model, tenant="a"), 0.0)
    assert scene.gauge() == {("unknown", "a", "interactive"): 2}


def test_others_run_while_a_long_queue_is_read() -> None:
    scene, turns = Scene(), 0
    scene.join(*(f"t{number}" for number in range(150)))

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(count())
        document = await scene.view.document()
        assert len(document["models"][0]["tenants"]) == 100
        task.cancel()

    asyncio.run(main())
    assert turns >= 100


def test_offline_lines_are_shown_apart_from_the_queue() -> None:
    scene = Scene()
    for _ in range(3):
        scene.here.place(ask(batch=True, offline=a_line()))
    assert scene.model()["offline"] == {"waiting": 3, "in_flight": 0}
    assert isinstance(scene.held, Lease)
    scene.here.scheduler.release(scene.held, 1.0)
    [(_, lease)] = scene.here.offline.bind(1.0)
    assert scene.model()["offline"] == {"waiting": 2, "in_flight": 1}
    assert asyncio.run(scene.view.document())["waiting"] == 0
    assert scene.gauge("gateway_offline_lines") == {("m", "waiting"): 2, ("m", "running"): 1}
    assert isinstance(lease, Lease)
    scene.here.scheduler.release(lease, 2.0)
    assert scene.model()["offline"] == {"waiting": 2, "in_flight": 0}
