from random import Random

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend, Origin
from gateway.core.backends.facts import Facts
from gateway.core.backends.settings import BackendConfig


def make(**changes: object) -> Backend:
    config = BackendConfig.model_validate({"url": "http://h:8000", **changes})
    return Backend(0, config, health=HealthConfig(), random=Random(1))


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://10.0.0.11:8000", Origin("10.0.0.11", 8000, False, host_header=b"10.0.0.11:8000")),
        ("https://gpu.example", Origin("gpu.example", 443, True, host_header=b"gpu.example")),
        ("http://[::1]:9", Origin("::1", 9, False, host_header=b"[::1]:9")),
        ("http://vllm_a:80", Origin("vllm_a", 80, False, host_header=b"vllm_a:80")),
    ],
)
def test_an_origin_is_read_from_a_url(url: str, origin: Origin) -> None:
    assert Origin.of(url) == origin


def test_the_configured_cap_and_kv_tokens_win_over_what_is_found() -> None:
    backend = make(max_in_flight=7, kv_cache_tokens=99)
    backend.learn(Facts(max_num_seqs=512, kv_cache_tokens=1000))
    assert (backend.cap, backend.kv_cache_tokens) == (7, 99)


def test_the_cap_is_256_until_something_is_found() -> None:
    backend = make()
    assert (backend.cap, backend.kv_cache_tokens) == (256, None)
    backend.learn(Facts(max_num_seqs=64, kv_cache_tokens=1000))
    assert (backend.cap, backend.kv_cache_tokens) == (64, 1000)


def test_the_limit_grows_from_a_tenth_to_the_cap() -> None:
    backend = make(max_in_flight=100)
    backend.slow_since_seconds = 50.0
    assert [backend.limit(50.0 + seconds) for seconds in (0, 10, 20, 30, 40)] == [10, 40, 70, 100, 100]


def test_the_limit_is_the_lower_of_slow_start_and_the_adaptive_one() -> None:
    backend = make(max_in_flight=100)
    backend.limiter.limit = 60
    assert backend.limit(50.0) == 60
    backend.slow_since_seconds = 50.0
    assert [backend.limit(50.0 + seconds) for seconds in (0, 10, 20, 30)] == [10, 40, 60, 60]
    assert backend.cap == 100


def test_the_limit_is_never_below_one() -> None:
    backend = make(max_in_flight=3)
    backend.slow_since_seconds = 50.0
    assert backend.limit(50.0) == 1
