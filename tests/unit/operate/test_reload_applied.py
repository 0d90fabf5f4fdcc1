"""A gateway that follows another configuration holds the same settings as one that started with it."""

import asyncio
import io
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import Gateway
from gateway.config import Config, Section
from gateway.config.file import parse
from gateway.features.operate.reload import NEEDS_RESTART, applicable, differences
from gateway.features.table import FEATURES
from tests.unit.holdings import Holdings

# Values of every key: the first is the default.
VALUES: dict[str, list[Any]] = {
    "config.watch": [False, True],
    "server.trusted_proxies": [[], ["10.0.0.0/8", "::1"]],
    "server.cors_origins": [[], ["https://chat.example.com"], ["*"]],
    "server.max_connections": [16384, 7],
    "server.max_body_bytes": [8388608, 1000],
    "server.max_upload_bytes": [536870912, 1000],
    "server.max_buffered_upload_bytes": [27262976, 1000],
    "server.memory_budget_bytes": [1073741824, 1000],
    "server.max_json_depth": [64, 8],
    "server.max_json_containers": [None, 100],
    "server.max_json_strings": [None, 100],
    "server.max_json_values": [None, 100],
    "server.allow_media_urls": [False, True],
    "server.max_sequences": [1024, 8],
    "server.header_timeout_seconds": [10.0, 1.0],
    "server.body_timeout_seconds": [300.0, 1.0],
    "server.body_grace_seconds": [5.0, 1.0],
    "server.body_min_bytes_per_second": [1024.0, 1.0],
    "server.keep_alive_seconds": [75.0, 1.0],
    "server.write_stall_seconds": [60.0, 1.0],
    "server.drain_delay_seconds": [5.0, 0.0],
    "server.drain_timeout_seconds": [600.0, 0.0],
    "server.response_headers": [True, False],
    "server.access_log": [True, False],
    "server.access_log_fields": [[], ["address", "user_agent"], ["class", "response_bytes"]],
    "server.access_log_prefixes": [False, True],
    "server.admin": [{}, {"allowed_hosts": ["gateway.svc"]}, {"token": "secret", "open_paths": []}],
    "server.metrics": [None],
    "discovery.file": [None],
    "discovery.dns": [()],
    "discovery.kubernetes": [()],
    "discovery.max_backends": [7],
    "discovery.backend": [{}, {"api_key": "x"}],
    "routing.policy": ["prefix", "least_loaded", "round_robin"],
    "routing.decode_weight": [1.0, 5.0],
    "routing.prefill_window_seconds": [None, 2.0],
    "routing.seconds_per_prefill_token": [28e-6, 1e-4],
    "routing.aging": [0.05, 0.0, 1.0],
    "routing.index_capacity_factor": [1.0, 0.5, 3.0],
    "routing.index_memory_bytes": [536870912, 1000000],
    "routing.scan": [32, 1],
    "routing.starvation_seconds": [30.0, 1.0],
    "admission.kv_headroom": [1.0, 0.5],
    "admission.max_queued_requests": [4096, 0],
    "admission.max_queued_bytes": [268435456, 1000],
    "admission.max_wait_seconds": [60.0, 1.0],
    "admission.hold_without_backend": [True, False],
    "admission.comment_seconds": [15.0, 0.0, 2.5],
    "admission.tenant_header": ["", "x-tenant"],
    "admission.adaptive": [True, False],
    "admission.itl_objective_seconds": [None, 0.05],
    "embeddings.coalesce": [True, False],
    "embeddings.max_batch_items": [64, 2],
    "embeddings.max_batch_tokens": [8192, 100],
    "embeddings.max_delay_seconds": [0.005, 0.0],
    "batches.max_file_bytes": [209715200, 1000],
    "batches.max_bytes_per_key": [10737418240, 1000],
    "batches.max_lines": [50000, 10],
    "batches.max_embedding_inputs": [50000, 10],
    "batches.max_enqueued_lines_per_key": [1000000, 10],
    "batches.lines_in_flight": [1024, 1],
    "batches.idle_only": [True, False],
    "batches.expire_after_seconds": [2592000.0, 3600.0],
    "health.probe_interval_seconds": [2.0, 1.0],
    "health.probe_timeout_seconds": [2.0, 1.0],
    "health.fall": [3, 1],
    "health.rise": [2, 1],
    "health.eject_failures": [5, 1],
    "health.eject_base_seconds": [5.0, 1.0],
    "health.eject_max_seconds": [60.0, 1.0],
    "health.max_ejected": [0.5, 0.0],
    "health.slow_start_seconds": [30.0, 0.0],
    "health.refresh_seconds": [30.0, 1.0],
    "upstream.connect_timeout_seconds": [2.0, 1.0],
    "upstream.first_byte_timeout_seconds": [None, 1.0],
    "upstream.idle_stream_timeout_seconds": [300.0, 1.0],
    "realtime.idle_timeout_seconds": [300.0, 1.0],
    "realtime.max_session_seconds": [3600.0, 1.0],
    "upstream.background_timeout_seconds": [3600.0, 1.0],
    "upstream.keep_alive_seconds": [3.0, 1.0],
    "upstream.max_connection_age_seconds": [300.0, 1.0],
    "upstream.retry_budget_fraction": [0.1, 0.5],
    "upstream.retry_budget_min": [10, 0, 60],
    "auth.keys": [
        [],
        [{"name": "a", "key": "sk-a", "requests_per_minute": 5}, {"name": "b", "key": "sk-b", "weight": 2}],
        [{"name": "a", "key": "sk-c", "requests_per_minute": 9, "max_concurrent_requests": 2}],
        [{"name": "a", "key": "sk-c", "expires_at": "2027-01-31T00:00:00Z", "models": ["m", "gpt-*"]}],
        [{"name": "a", "key": "sk-c", "tokens_per_day": 5, "tokens_per_month": 7}],
    ],
    "auth.keys_file": [None],
    "auth.cache_salt_secret": ["", "secret"],
    "models.aliases": [{}, {"gpt": "m"}, {"gpt": {"m": 95, "n": 5}}],
    "models.m": [
        {},
        {"embeddings": {"coalesce": False}},
        {"tokenizer": "folder"},
        {"fallback": ["n", "o"]},
        {"lora": {"base": "n", "path": "/adapters/m"}},
    ],
    "prefix_report.enabled": [True, False],
    "prefix_report.show_text": [False, True],
    "log.level": ["info", "debug"],
    "log.format": ["auto", "json", "console"],
    "state.path": [None, "state"],
    "tracing.endpoint": ["", "http://127.0.0.1:4318"],
    "tracing.protocol": ["http", "grpc"],
    "tracing.sample_ratio": [0.01, 1.0],
    "tracing.export_interval_seconds": [5, 0.5],
    "tracing.service_name": ["vllm-batching-gateway", "gateway-a"],
}
BACKENDS = [
    [{"url": "http://127.0.0.1:1"}, {"url": "http://127.0.0.1:2"}],
    [
        {"url": "http://127.0.0.1:1", "max_in_flight": 7, "relative_cost": 4, "api_key": "x", "sleep": {}},
        {"url": "http://127.0.0.1:2"},
    ],
    [{"url": "http://127.0.0.1:1"}, {"url": "http://127.0.0.1:2", "kv_cache_tokens": 1000, "kv_events": "off"}],
]
# Counts of events, labels of tenants seen so far, sources that are being read, what the fleet told, and clocks.
IGNORED = frozenset(
    {
        "changes",
        "_changes",
        "_labels",
        "_following",
        "_terms",
        "_load",
        "_wanted",
        "_offset_seconds",
        "_looked_seconds",
        "_history",
        "happened",
    }
)


def config_of(values: dict[str, Any], backends: Any = ()) -> Config:
    document: dict[str, Any] = {"backends": backends or BACKENDS[0]}
    for path, value in values.items():
        section, _, key = path.partition(".")
        document.setdefault(section, {})[key] = value
    return parse(document)


# One that a reload switches off is still there, and one that it switches on is the last: here all are from the start.
BUILT = [replace(each, is_on=lambda _: True) if each.name in ("tracing", "discovery") else each for each in FEATURES]


def gateway_of(config: Config) -> Gateway:
    with patch("secrets.token_bytes", lambda size: bytes(size)):
        gateway = Gateway(config, io.BytesIO(), clock=lambda: 1.0, random=Random(1), features=BUILT)
    gateway.features["exact"].mode.build()  # which otherwise is there once it was needed
    return gateway


def held(gateway: Gateway) -> dict[str, Any]:
    return Holdings(IGNORED).add(gateway, "gateway").found


def check_follow(old: Config, new: Config) -> None:
    """Compare a gateway that follows with one that starts."""

    async def main() -> None:
        followed, started = gateway_of(old), gateway_of(new)
        followed.reloads.config = applicable(old, new)
        followed.apply(followed.reloads.config)
        one, two = held(followed), held(started)
        assert {
            path: (one.get(path), two.get(path)) for path in one.keys() | two if one.get(path) != two.get(path)
        } == {}

    asyncio.run(main())


CONFIGS = st.builds(
    config_of,
    st.fixed_dictionaries({}, optional={path: st.sampled_from(values) for path, values in VALUES.items()}),
    st.sampled_from(BACKENDS),
)


@given(old=CONFIGS, new=CONFIGS)
@settings(max_examples=60, deadline=None)
def test_following_is_like_starting(old: Config, new: Config) -> None:
    check_follow(old, new)


@pytest.mark.parametrize("path", VALUES)
def test_each_key_alone_is_followed_and_changes_what_is_held(path: str) -> None:
    for value in VALUES[path][1:]:
        old, new = config_of({}), config_of({path: value})
        assert all(each.applies for each in differences(old, new))
        check_follow(old, new)
        check_follow(new, old)


def test_every_key_is_tried() -> None:
    tried = {"backends", *NEEDS_RESTART, *VALUES}
    for name, section in Config.model_fields.items():
        kind = section.annotation
        keys = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {}
        missing = {f"{name}.{key}" for key, field in keys.items() if not field.exclude} - tried
        assert missing == set()


def test_a_salt_secret_that_is_not_configured_stays_the_same() -> None:
    async def main() -> None:
        gateway = Gateway(config_of({}), None)
        first = gateway.core.reader._salt_secret
        gateway.apply(config_of({"auth.cache_salt_secret": "x"}))
        assert gateway.core.reader._salt_secret == b"x"
        gateway.apply(config_of({"routing.aging": 1.0}))
        assert gateway.core.reader._salt_secret == first

    asyncio.run(main())


def test_many_backends_are_followed_in_steps() -> None:
    """Before, 5,000 backends of a configuration were applied in one step."""
    many = [{"url": f"http://10.0.0.{number}:1"} for number in range(1, 101)]

    async def main() -> None:
        gateway = Gateway(config_of({}), None)
        grows, shrinks = (len([*gateway.apply_in_steps(config_of({}, of))]) for of in (many, many[:1]))
        assert (grows, shrinks) == (3, 3)
        assert [backend.config.url for backend in gateway.core.fleet.backends] == ["http://10.0.0.1:1"]

    asyncio.run(main())
