import pytest

from gateway.request import Ask, Usage
from gateway.routing.estimate import Estimates
from gateway.routing.learning import Learning
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.trust import Trust

OLD, NEW = (1, 2, 3), (7, 8)
OLD_EDGES, NEW_EDGES = (128, 256, 384), (4000, 8000)
ASK = Ask("m", keys=NEW, edges=NEW_EDGES, prompt_size=8000, learnable_bytes=8000)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex([1 << 30, 1 << 30])
    for backend in (0, 1):
        index.record(backend, OLD, OLD_EDGES)
    index.record(0, NEW, NEW_EDGES)
    return index


def answered(index: PrefixIndex, predicted: int, cached: int | None) -> Estimates:
    estimates = Estimates()
    Learning(estimates, index, Trust()).answered(ASK, 0, predicted, Usage(2000, 30, cached))
    return estimates


def test_usage_feeds_the_estimates(index: PrefixIndex) -> None:
    estimates = answered(index, 0, None)
    assert estimates.output_tokens == 30
    assert estimates.bytes_per_token("m") == 4.0


@pytest.mark.parametrize("cached", [0, 255])
def test_a_large_hit_that_did_not_happen_wipes_the_backends_record_but_keeps_this_prompt(
    index: PrefixIndex, cached: int
) -> None:
    answered(index, 1024, cached)
    assert index.depths(OLD) == [0, 3]
    assert index.depths(NEW) == [2, 0]


@pytest.mark.parametrize(
    ("predicted", "cached"),
    [(1024, 256), (1024, 1024), (1023, 0), (5000, None)],
    ids=["a quarter is there", "all is there", "too small a hit to judge", "the backend does not say"],
)
def test_otherwise_the_record_stays(index: PrefixIndex, predicted: int, cached: int | None) -> None:
    answered(index, predicted, cached)
    assert index.depths(OLD) == [3, 3]
