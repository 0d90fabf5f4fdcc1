from random import Random

import pytest

from gateway.backends.backend import Backend, EngineRank, Facts
from gateway.config import BackendConfig, HealthConfig
from gateway.routing.engine_load import Candidate
from tests.unit.scheduling.builders import Site


def candidates() -> list[Candidate]:
    """Every kind of them; that they are is the type checker's to say."""
    backend = Backend(5, BackendConfig(url="http://h:1", name="b", speed=2.0), HealthConfig(), Random(1))
    backend.learn(Facts(block_size_tokens=32, kv_cache_tokens=6400, max_num_seqs=10, engines=2, prefix_caching=False))
    return [backend, EngineRank(backend, 1, 9), Site("b", 3)]


@pytest.mark.parametrize("candidate", candidates(), ids=lambda candidate: type(candidate).__name__)
def test_everything_that_placement_asks_of_an_engine_is_there(candidate: Candidate) -> None:
    wanted = {name for name in vars(Candidate) if not name.startswith("_")}
    assert wanted == {
        "name", "index", "rank", "speed", "cap", "kv_cache_tokens", "block_tokens", "caches_prefixes", "limit",
    }  # fmt: skip
    assert all(hasattr(candidate, name) for name in wanted)
    assert candidate.name == "b"
    assert 1 <= candidate.limit(0.0) <= candidate.cap
