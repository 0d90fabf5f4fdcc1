from dataclasses import replace

import pytest

from gateway.core.feedback import Learning
from gateway.core.request import Demand, Usage
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.estimates import Estimates

OLD, NEW = (1, 2, 3), (7, 8)
OLD_EDGES, NEW_EDGES = (128, 256, 384), (4000, 8000)
ASK = Demand("m", keys=NEW, edges=NEW_EDGES, prompt_size=8000, learnable_bytes=8000)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex([1 << 30, 1 << 30])
    for backend in (0, 1):
        index.record(backend, OLD, OLD_EDGES)
    index.record(0, NEW, NEW_EDGES)
    return index


def answered(index: PrefixIndex, predicted: int, cached: int | None) -> Estimates:
    """Twice, because once may be chance."""
    estimates = Estimates()
    learning = Learning(estimates, index, HitAccuracy())
    for _ in range(2):
        learning.answered(ASK, 0, predicted, Usage(2000, 30, cached))
    return estimates


def test_usage_feeds_the_estimates(index: PrefixIndex) -> None:
    estimates = answered(index, 0, None)
    assert estimates.expected_output_tokens("m", None) == 30
    assert estimates.bytes_per_token("m") == 4.0


@pytest.mark.parametrize("cached", [0, 255])
def test_a_large_hit_that_did_not_happen_wipes_the_backends_record_but_keeps_this_prompt(
    index: PrefixIndex, cached: int
) -> None:
    answered(index, 1024, cached)
    assert index.depths(OLD) == [0, 3]
    assert index.depths(NEW) == [2, 0]


def test_one_that_did_not_happen_between_those_that_did_is_taken_for_an_early_eviction(index: PrefixIndex) -> None:
    learning = Learning(Estimates(), index, HitAccuracy())
    for cached in (0, 1024, 0, 1024, 0):
        learning.answered(ASK, 0, 1024, Usage(2000, 30, cached))
    assert index.depths(OLD) == [3, 3]
    learning.answered(ASK, 0, 1024, Usage(2000, 30, 0))
    assert index.depths(OLD) == [0, 3]


@pytest.mark.parametrize(
    ("predicted", "cached"),
    [(1024, 256), (1024, 1024), (1023, 0), (5000, None)],
    ids=["a quarter is there", "all is there", "too small a hit to judge", "the backend does not say"],
)
def test_otherwise_the_record_stays(index: PrefixIndex, predicted: int, cached: int | None) -> None:
    answered(index, predicted, cached)
    assert index.depths(OLD) == [3, 3]


# What is remembered of a conversation.


class Scene:
    """One engine that was sent the prompt."""

    def __init__(self) -> None:
        self.estimates, self.index, self.hit_accuracy = Estimates(), PrefixIndex([1 << 30]), HitAccuracy()
        self.learning = Learning(self.estimates, self.index, self.hit_accuracy)
        self.index.record(0, NEW, NEW_EDGES)

    def answered(self, usage: Usage, predicted: int = 0, **fields: object) -> None:
        self.learning.answered(replace(ASK, **fields), 0, predicted, usage)  # type: ignore[arg-type]

    def measured_tokens(self) -> int:
        return self.estimates.measure("other", NEW, NEW_EDGES, 8000, 0, 0).prompt_tokens


def test_a_prompts_tokens_are_remembered_and_its_answer_recorded() -> None:
    scene = Scene()
    scene.answered(Usage(1000, 100))
    assert scene.measured_tokens() == 1000
    assert scene.index.answered(NEW[-1]) == 1
    assert scene.index.used_bytes(0) == 8000 + 800


@pytest.mark.parametrize(("output", "held"), [(0, 0), (1, 0), (2, 1)])
def test_of_one_token_nothing_is_in_the_cache(output: int, held: int) -> None:
    scene = Scene()
    scene.answered(Usage(1000, output))
    assert scene.index.answered(NEW[-1]) == held


@pytest.mark.parametrize(("sequences", "length"), [(3, 100), (2, 150), (0, 300)])
def test_several_sequences_teach_the_length_of_an_answer_only(sequences: int, length: int) -> None:
    scene = Scene()
    scene.answered(Usage(100_000, 300, 0), 5000, sequences=sequences)
    assert scene.estimates.expected_output_tokens("m", None) == length
    assert scene.estimates.bytes_per_token("m") == 4.0  # the tokens may be those of many prompts
    assert scene.measured_tokens() == 2000
    assert (scene.index.answered(NEW[-1]), scene.hit_accuracy.share(0), scene.index.depths(NEW)) == (0, 1.0, [2])


def test_of_an_answer_that_was_continued_the_whole_is_learned() -> None:
    scene = Scene()
    scene.answered(Usage(1080, 20), prompt_size=8640, learnable_bytes=0, generated_tokens=80)
    assert scene.estimates.expected_output_tokens("m", None) == 100
    assert scene.index.used_bytes(0) == 8000 + 800, "80 tokens of the prompt are the beginning of the answer"


def test_a_prompt_that_is_longer_than_its_blocks_is_not_known_by_them() -> None:
    scene = Scene()
    scene.answered(Usage(1000, 100), prompt_size=9000)
    assert scene.measured_tokens() == 2000


@pytest.mark.parametrize("learnable", [0, 8000])
def test_usage_that_counts_no_prompt_teaches_nothing_of_it(learnable: int) -> None:
    scene = Scene()
    scene.answered(Usage(0, 100), learnable_bytes=learnable)
    assert scene.measured_tokens() == 2000
    assert scene.index.answered(NEW[-1]) == 0


def test_where_bytes_say_nothing_an_answer_is_as_large_as_the_prompts_tokens() -> None:
    scene = Scene()
    scene.answered(Usage(2000, 100), learnable_bytes=0)
    assert scene.estimates.bytes_per_token("m") == 4.0
    assert scene.index.used_bytes(0) == 8000 + 400


def test_predictions_are_compared_as_they_were_before_they_were_discounted() -> None:
    scene = Scene()
    for _ in range(20):
        scene.answered(Usage(1000, 5, 300), int(1000 * scene.hit_accuracy.share(0)))
    assert scene.hit_accuracy.share(0) == pytest.approx(0.3, abs=0.02)
    for _ in range(20):
        scene.answered(Usage(1000, 5, 1000), int(1000 * scene.hit_accuracy.share(0)))
    assert scene.hit_accuracy.share(0) == 1.0


def test_a_request_without_blocks_teaches_lengths_only() -> None:
    scene = Scene()
    scene.answered(Usage(1000, 300, 0), 5000, keys=(), edges=())
    assert scene.estimates.expected_output_tokens("m", None) == 300
    assert scene.index.depths(NEW) == [2]
