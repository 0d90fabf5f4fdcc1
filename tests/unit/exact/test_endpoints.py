from dataclasses import replace
from random import Random

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, KvEventSource
from gateway.core.backends.settings import BackendConfig
from gateway.features.exact.endpoints import Address, ReadingPlan, Source, plan

ZMQ = KvEventSource(0, "zmq", "tcp://*:5557", replay_endpoint="tcp://*:5657", topic="kv")


def backend(*sources: KvEventSource, url: str = "http://10.0.0.11:8000", **settings: object) -> Backend:
    config = BackendConfig.model_validate({"url": url, **settings})
    made = Backend(0, config, health=HealthConfig(), random=Random(1))
    made.learn(Facts(kv_event_sources=sources, kv_cache_tokens=1000, engines=max(1, len(sources))))
    return made


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://:::5557", "tcp://169.254.169.254:5557"],
)
@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://10.0.0.11:8000", "10.0.0.11"),
        ("http://[fd00::1]:8000", "[fd00::1]"),
        ("https://gpu.example", "gpu.example"),
    ],
)
def test_only_the_backends_own_host_is_connected_to(endpoint: str, url: str, host: str) -> None:
    [source] = plan(backend(replace(ZMQ, endpoint=endpoint, replay_endpoint=endpoint), url=url)).sources
    assert (source.endpoint, source.replay) == (f"tcp://{host}:5557", f"tcp://{host}:5557")


def test_each_rank_has_its_own_ports_and_its_share_of_the_cache() -> None:
    second = KvEventSource(1, "zmq", "tcp://*:5558", replay_endpoint=None, topic="kv")
    assert plan(backend(ZMQ, second)).sources == (
        Source(0, "tcp://10.0.0.11:5557", "tcp://10.0.0.11:5657", topic="kv"),
        Source(1, "tcp://10.0.0.11:5558", None, topic="kv"),
    )
    assert plan(backend(ZMQ, second)).sources[0].capacity_tokens == 500


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (replace(ZMQ, publisher="null"), "unsupported publisher null; only zmq is supported"),
        (replace(ZMQ, publisher=None), "unsupported publisher null; only zmq is supported"),
        (replace(ZMQ, endpoint=None), "/kv_event_sources does not contain the endpoint"),
        (replace(ZMQ, endpoint="ipc:///tmp/kv"), "ipc:///tmp/kv is not a network endpoint (tcp://host:port)"),
        (replace(ZMQ, endpoint="inproc://kv"), "inproc://kv is not a network endpoint (tcp://host:port)"),
        (replace(ZMQ, endpoint="tcp://*"), "tcp://* has no valid port"),
        (replace(ZMQ, endpoint="tcp://*:0"), "tcp://*:0 has no valid port"),
        (replace(ZMQ, endpoint="tcp://*:70000"), "tcp://*:70000 has no valid port"),
        (replace(ZMQ, endpoint="5557"), "5557 is not a network endpoint (tcp://host:port)"),
    ],
)
def test_why_a_publisher_cannot_be_read_is_said(source: KvEventSource, why: str) -> None:
    assert plan(backend(source)) == ReadingPlan((), why)


def test_a_replay_endpoint_that_cannot_be_reached_is_done_without() -> None:
    found = plan(backend(replace(ZMQ, replay_endpoint="ipc:///tmp/replay")))
    assert found.sources[0].replay is None
    assert found.problem == "ipc:///tmp/replay is not a network endpoint (tcp://host:port)"


def test_readable_ranks_are_read_though_others_are_not() -> None:
    found = plan(backend(ZMQ, KvEventSource(1, "zmq", "ipc:///x", replay_endpoint=None, topic="")))
    assert [source.rank for source in found.sources] == [0]
    assert found.problem == "ipc:///x is not a network endpoint (tcp://host:port)"


def test_why_nothing_is_read_is_said() -> None:
    old = backend()
    old.learn(Facts(kv_event_sources=None))
    assert plan(old) == ReadingPlan((), "the backend has no /kv_event_sources")
    assert plan(backend()) == ReadingPlan((), "the backend publishes no KV events (vLLM: --kv-events-config)")
    assert plan(backend(ZMQ, kv_events="off")) == ReadingPlan((), "kv_events is off")


def test_configured_endpoints_go_before_reported_ones() -> None:
    settings = {"endpoint": "tcp://*:7000", "replay": "tcp://relay.example:7100", "topic": "mine"}
    two_ranks = backend(ZMQ, replace(ZMQ, rank=1), kv_events=settings)
    assert plan(two_ranks).sources == (
        Source(0, "tcp://10.0.0.11:7000", "tcp://relay.example:7100", topic="mine"),
        Source(1, "tcp://10.0.0.11:7001", "tcp://relay.example:7101", topic="mine"),
    )
    assert plan(two_ranks).sources[0].capacity_tokens == 500


def test_where_publishers_connect_the_gateway_listens() -> None:
    settings = {"endpoint": "tcp://*:7000", "replay": "tcp://*:7100", "bind": True}
    [source] = plan(backend(ZMQ, kv_events=settings)).sources
    assert source == Source(0, "tcp://*:7000", "tcp://10.0.0.11:7100", topic=None, bind=True)


def test_an_address_is_shown_as_it_is_written() -> None:
    for written in ("tcp://*:1", "tcp://host:65535", "tcp://[::1]:5557"):
        assert str(Address.of(written)) == written


def test_a_rank_that_is_listed_twice_is_read_once() -> None:
    found = plan(backend(ZMQ, replace(ZMQ, endpoint="tcp://*:9999")))
    assert [source.endpoint for source in found.sources] == [plan(backend(ZMQ)).sources[0].endpoint]
    assert found.problem == "duplicate rank 0 in /kv_event_sources"
