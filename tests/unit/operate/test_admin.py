import asyncio
from typing import Any

import orjson
import pytest

from gateway.app import Gateway
from gateway.config.file import parse
from gateway.core.backends.facts import Facts, KvEventSource, ModelCard, Telemetry
from gateway.core.backends.health import ProbeResult
from gateway.core.errors import EngineDead, GatewayError, InvalidRequest, ModelNotFound, NoBackend, RouteNotFound
from gateway.core.request import Demand
from gateway.core.scheduling.scheduler import Lease
from gateway.features.exact.index import packed, token_keys, token_seed
from tests.unit.front.wires import Sent
from tests.unit.insights.traffic import report_of

TEXT = "x" * 4096
CHAT = {"model": "m", "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hi"}]}
SHORT = Demand("m", sequences=1, prompt_tokens=10, output_tokens=10)


class Scene:
    """A gateway that is put together and not started; backends a and b are up. b may run two engines."""

    def __init__(self, policy: str = "prefix", engines: int = 1, max_in_flight: int = 4) -> None:
        backends = [
            {"url": f"http://10.0.0.{number}:1", "name": "ab"[number], "max_in_flight": max_in_flight}
            for number in range(2)
        ]
        self.now = 1000.0
        config = parse({"backends": backends, "routing": {"policy": policy}})
        self.gateway = Gateway(config, None, clock=lambda: self.now)
        self.a, self.b = self.gateway.core.fleet.backends
        for backend, count in ((self.a, 1), (self.b, engines)):
            cards = (ModelCard("m"), ModelCard("embeds"))
            facts = Facts(version="0.33.0", models=cards, engines=count, kv_cache_tokens=100_000, kv_event_sources=())
            self.gateway.core.fleet.learned(backend, facts)
            self.gateway.core.fleet.probed(backend, ProbeResult.OK)
            self.gateway.core.fleet.probed(backend, ProbeResult.OK)

    def route(self, document: Any = CHAT, path: str = "") -> dict[str, Any]:
        body = document if isinstance(document, bytes) else orjson.dumps(document)
        return asyncio.run(self.gateway.operators.overview.route(body, path))

    def read(self, document: Any) -> Demand:
        """What the gateway makes of a chat request that a client sends."""
        incoming = Sent(b"/v1/chat/completions", orjson.dumps(document)).incoming()
        assert incoming.route is not None
        return self.gateway.core.reader.read(incoming, incoming.route, "id", lambda: None).demand

    def place(self, ask: Demand = SHORT) -> Lease:
        placed = self.gateway.core.scheduler.place(ask, self.now)
        assert isinstance(placed, Lease)
        return placed

    def gauge(self, name: str, *labels: str) -> float:
        [found] = [live for live in self.gateway.core.metrics if live.name == name]
        values = {tuple(sample.labels.values()): sample.value for sample in found.family().samples}
        return float(values[labels])


def test_a_dry_run_has_the_cost_of_each_engine() -> None:
    scene = Scene(engines=2)
    answer = scene.route()
    assert (answer["model"], answer["policy"], answer["queued_requests"], answer["waits"]) == ("m", "prefix", 0, False)
    assert answer["prefix_blocks"] > 10
    assert answer["prompt_tokens"] == pytest.approx(len(TEXT) / 4, rel=0.05)
    assert sorted((each["backend"], each["rank"]) for each in answer["backends"]) in (
        [("a", None), ("b", 0), ("b", 1)],
    )
    assert [each["cost"] for each in answer["backends"]] == sorted(each["cost"] for each in answer["backends"])
    for each in answer["backends"]:
        assert (each["open"], each["in_flight"], each["hit_tokens"]) == (True, 0, 0)
        assert sum(each["cost_parts_ms"].values()) == pytest.approx(each["cost"], abs=0.001)
    first = answer["backends"][0]
    assert answer["chosen"] == (first["backend"] if first["rank"] is None else f"{first['backend']}#{first['rank']}")


def test_a_dry_run_sees_the_hit_and_changes_nothing() -> None:
    scene = Scene()
    before, cache_state = scene.route(), scene.gateway.core.cache_state
    assert scene.route() == before
    assert cache_state.index.used_bytes(0) + cache_state.index.used_bytes(1) == 0
    cache_state.hit_predictor.placed(scene.read(CHAT), scene.gateway.core.fleet.engines()[1])
    assert (
        report_of(scene.gateway.features["insights"].report, scene.now)["samples"]["kept"] == 1
    )  # that one was no dry run
    answer = scene.route()
    assert [(each["backend"], each["hit_tokens"] > 1000) for each in answer["backends"]] == [("b", True), ("a", False)]
    assert answer["chosen"] == "b"
    assert scene.route() == answer


def test_a_dry_run_of_token_ids_sees_the_engines_own_blocks() -> None:
    scene, ids = Scene(), list(range(100, 1000))
    keys = token_keys(packed(ids), 16, token_seed())
    caches = scene.gateway.features["exact"].mode.build().caches
    for engine, blocks in enumerate((20, 40)):
        caches.changed(engine, keys[:blocks], (), 16 * blocks)
        caches.state(engine, True, True)
    answer = scene.route({"model": "m", "prompt": ids})
    assert (answer["prompt_tokens"], answer["chosen"]) == (900, "b")
    assert [each["hit_tokens"] for each in answer["backends"]] == [640, 320]


def test_the_other_policy_chooses_among_what_is_open() -> None:
    scene = Scene(max_in_flight=1)
    assert scene.route()["other_policies"] == {"least_loaded": "a"}
    held = scene.place()
    free = "b" if held.engine.name == "a" else "a"
    assert scene.route()["other_policies"] == {"least_loaded": free}
    scene.place()
    answer = scene.route()
    assert answer["other_policies"] == {"least_loaded": None}
    assert answer["waits"]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_a_policy_that_does_not_wait_chooses_the_first_open_engine(policy: str) -> None:
    scene = Scene(policy, max_in_flight=1)
    if policy == "round_robin":
        scene.gateway.core.scheduler.release(scene.place(), scene.now)
    held = scene.place().engine.name
    if policy == "round_robin":
        scene.gateway.core.scheduler.release(scene.place(), scene.now)  # the turn is with the one that is taken
    answer = scene.route()
    assert answer["policy"] == policy
    assert (answer["chosen"], answer["waits"]) == ("a" if held == "b" else "b", False)
    assert all(each["cost_parts_ms"] == {} for each in answer["backends"])


def test_a_dry_run_shows_that_the_request_would_wait_for_the_best() -> None:
    scene = Scene(max_in_flight=1)
    short = CHAT | {"max_tokens": 1}
    held = scene.place(scene.read(short))
    scene.gateway.core.scheduler.first_token(held, scene.now)
    answer = scene.route(short)
    assert (answer["chosen"], answer["backends"][0]["open"], answer["waits"]) == (held.engine.name, False, True)


@pytest.mark.parametrize(
    ("document", "path", "hashes"),
    [
        ({"model": "m", "prompt": TEXT}, "", True),
        ({"model": "m", "input": TEXT}, "/v1/responses", True),
        (CHAT | {"max_tokens": 5}, "/v1/messages", True),
        ({"model": "embeds", "input": [TEXT, TEXT]}, "/v1/embeddings", False),
        ({"model": "embeds", "query": TEXT, "documents": [TEXT]}, "/v1/rerank", False),
    ],
    ids=["completions", "responses", "messages", "embeddings", "rerank"],
)
def test_every_endpoint_that_is_routed_by_its_body_can_be_tried(document: Any, path: str, hashes: bool) -> None:
    answer = Scene().route(document, path)
    assert len(answer["backends"]) == 2
    assert (answer["prefix_blocks"] > 0) == hashes


@pytest.mark.parametrize(
    ("document", "path", "error"),
    [
        (b"{", "", InvalidRequest),
        (b"{", "/v1/chat/completions", InvalidRequest),
        (b"[]", "", InvalidRequest),
        (b"", "", InvalidRequest),
        (CHAT | {"model": "missing"}, "", ModelNotFound),
        ({"messages": []}, "", InvalidRequest),  # two models, and none is named
        (CHAT | {"n": -1}, "", InvalidRequest),
        (CHAT, "/v1/nothing", RouteNotFound),
        (CHAT, "/tokenize", InvalidRequest),
    ],
)
def test_what_a_request_would_be_refused_for_a_dry_run_is_refused_for(
    document: Any, path: str, error: type[GatewayError]
) -> None:
    with pytest.raises(error):
        Scene().route(document, path)


def test_a_dry_run_without_a_backend_fails() -> None:
    scene = Scene()
    for backend in (scene.a, scene.b):
        for _ in range(3):
            scene.gateway.core.fleet.probed(backend, ProbeResult.REFUSED)
    with pytest.raises(NoBackend):
        scene.route()


def test_the_backends_are_shown_with_what_is_known_and_running() -> None:
    scene = Scene(engines=2)
    held = scene.place()
    shown = {each["name"]: each for each in scene.gateway.operators.overview.backends()}
    assert set(shown) == {"a", "b"}
    assert (shown["a"]["engines"], shown["b"]["engines"]) == (1, 2)
    for each in shown.values():
        assert each["version"] == "0.33.0"
        assert each["url"] == next(b.config.url for b in (scene.a, scene.b) if b.name == each["name"])
        assert each["models"] == ["m", "embeds"]
        assert (each["state"], each["limit"], each["kv_cache_tokens"]) == ("up", 4, 100_000)
        assert (each["prefix_trust"], each["relative_cost"]) == (1.0, 1.0)
        assert (each["tokenizers"], each["kv_events"]) == ({}, [])
        assert "publishes no KV events" in each["kv_events_problem"]
        assert each["in_flight"] == (held.engine.name == each["name"])
        assert each["kv_tokens_limit"] == 100_000
    assert shown[held.engine.name]["kv_tokens_reserved"] == 16 + 16 + 32  # of a chat template
    assert orjson.dumps(scene.gateway.operators.overview.backends())


def test_gauges_follow_what_runs() -> None:
    scene = Scene()
    held = scene.place()
    name, other = held.engine.name, "a" if held.engine.name == "b" else "b"
    assert scene.gauge("gateway_backend_in_flight", name) == 1
    assert scene.gauge("gateway_backend_in_flight", other) == 0
    assert scene.gauge("gateway_backend_kv_tokens_reserved", name) == 16 + 16 + 32  # of a chat template
    assert scene.gauge("gateway_backend_in_flight_limit", other) == 4
    assert scene.gauge("gateway_backend_kv_tokens_limit", other) == 100_000
    scene.gateway.core.scheduler.release(held, scene.now)
    assert scene.gauge("gateway_backend_in_flight", name) == 0
    assert scene.gauge("gateway_backend_kv_tokens_reserved", name) == 0
    assert scene.gauge("gateway_backend_up", "a") == 1
    assert scene.gauge("gateway_backend_relative_cost", "a") == 1
    scene.gateway.core.fleet.probed(scene.a, ProbeResult.REFUSED)
    scene.gateway.core.fleet.probed(scene.a, ProbeResult.REFUSED)
    scene.gateway.core.fleet.probed(scene.a, ProbeResult.REFUSED)
    assert scene.gauge("gateway_backend_up", "a") == 0
    assert scene.gauge("gateway_backend_unreachable", "a", "refused") == 1
    states = {state: scene.gauge("gateway_backend_state", "a", state) for state in ("up", "down", "draining")}
    assert states == {"up": 0, "down": 1, "draining": 0}
    assert scene.gauge("gateway_queued_requests", "m") == 0
    scene.gateway.core.fleet.learned(scene.b, Facts())
    scene.gateway.core.fleet.expect({"not listed yet"})
    scene.gateway.core.scheduler.place(Demand("not listed yet"), scene.now)
    assert scene.gauge("gateway_queued_requests", "unknown") == 1
    assert scene.gauge("gateway_tokenizer_prompts_total", "encoded") == 0


def test_ejections_and_what_engines_report_are_shown() -> None:
    scene = Scene()
    scene.gateway.core.fleet.measured(scene.a, Telemetry(0.0, running=3, waiting=2, preemptions=0.0, kv_usage=0.5))
    shown = [scene.gauge(f"gateway_backend_reported_{name}", "a") for name in ("running", "waiting", "kv_usage")]
    assert shown == [3, 2, 0.5]
    assert scene.gauge("gateway_backend_ejections_total", "a") == 0
    scene.gateway.core.fleet.failed(scene.a, EngineDead("The engine is dead."), "someone")
    assert scene.gauge("gateway_backend_ejections_total", "a") == 1
    assert scene.gauge("gateway_backend_state", "a", "ejected") == 1


def test_the_trust_in_a_backend_is_that_in_its_least_trusted_engine() -> None:
    scene = Scene(engines=2)
    engine = scene.b.engines[1].index
    for _ in range(5):
        scene.gateway.core.cache_state.hit_accuracy.observed(engine, 1000, 100)
    share = scene.gateway.core.cache_state.hit_accuracy.share(engine)
    assert share < 0.5
    assert scene.gauge("gateway_backend_prefix_trust", "b") == share
    assert scene.gauge("gateway_backend_prefix_trust", "a") == 1.0
    shown = {each["name"]: each["prefix_trust"] for each in scene.gateway.operators.overview.backends()}
    assert shown == {"a": 1.0, "b": share}


def test_a_backend_that_is_down_is_shown_with_the_reason_and_since_when() -> None:
    scene = Scene()
    assert "publishes no KV events" in scene.gateway.operators.overview.backend(scene.a)["kv_events_problem"]
    for _ in range(3):
        scene.gateway.core.fleet.probed(scene.a, ProbeResult.REFUSED, "connection refused")
    scene.now += 7
    shown = scene.gateway.operators.overview.backend(scene.a)
    assert (shown["state"], shown["state_reason"], shown["state_seconds"]) == ("down", "connection refused", 7.0)
    assert shown["kv_events_problem"] is None  # being down is the problem


async def test_streams_of_kv_events_are_shown_with_their_backend() -> None:
    scene = Scene()
    source = KvEventSource(0, "zmq", "tcp://10.0.0.0:1", replay_endpoint=None, topic="")
    scene.a.learn(Facts(models=(ModelCard("m"),), kv_event_sources=(source,)))
    scene.gateway.features["exact"].mode.facts_changed()
    async with scene.gateway.features["exact"].mode.running():
        async with asyncio.timeout(5):
            while not scene.gateway.features["exact"].mode.streams():  # the reader's thread takes it up
                await asyncio.sleep(0.01)
        shown = {each["name"]: each for each in scene.gateway.operators.overview.backends()}
        assert [stream["state"] for stream in shown["a"]["kv_events"]] == ["connecting"]
        assert shown["a"]["kv_events_problem"] is None
        assert shown["b"]["kv_events"] == []
        for gauge in ("followed", "blocks", "gaps_total"):
            assert scene.gauge(f"gateway_kv_events_{gauge}", "a", "0") == 0
