"""What is known of a model."""

from itertools import count
from random import Random

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.settings import BackendConfig
from gateway.features.embeddings.batching import ModelSizes
from gateway.features.embeddings.inputs import EmbeddingInputs
from gateway.features.embeddings.wire import inputs_of


def sizes(*caps: int, context: int | None = 256) -> ModelSizes:
    backends = []
    for number, cap in enumerate(caps):
        config = BackendConfig(url=f"http://10.0.0.{number}:1", max_in_flight=cap)
        backends.append(Backend(number, config, health=HealthConfig(), random=Random(1)))
        backends[-1].learn(Facts(models=(ModelCard("m", max_model_len=context), ModelCard("other", max_model_len=8))))
        backends[-1].resize_engines(100.0, count().__next__)
    made = ModelSizes()
    made.learn_engines("m", [backend.engines[0] for backend in backends], backends)
    return made


def inputs(given: object) -> EmbeddingInputs:
    found = inputs_of({"model": "m", "input": given}, "m")
    assert found is not None
    return found


def test_slots_and_shares_follow_from_the_engines() -> None:
    made = sizes(64, 32)
    assert (made.replicas, made.cap, made.limit, made.slots) == (2, 32, 32, 8)
    assert made.bulk_share == 72
    for known, items in ((made, 8), (sizes(4), 4), (sizes(1024), 64)):
        assert known.cut([1] * 128, 64, 8192)[0] == range(items)


def test_token_ids_are_counted_and_texts_estimated() -> None:
    made = sizes(64)
    assert made.tokens_of(inputs([[1, 2, 3], [4]])) == [3, 1]
    assert made.tokens_of(inputs(["", "x" * 40])) == [2, 12]


def test_answers_teach_the_tokens_of_texts() -> None:
    made = sizes(64)
    for number in range(300):
        size = 10 * (number % 9)
        made.answered(1 + number % 3, size, 5 * (1 + number % 3) + size // 2, 0.01, are_ids=False)
    [estimated] = made.tokens_of(inputs("x" * 100))
    assert 52 <= estimated <= 58  # 55
    assert made.tokens_of(inputs([1] * 7)) == [7]


def test_answers_teach_what_a_batch_takes_whatever_its_size() -> None:
    made = sizes(64)
    for number in range(600):
        items = 1 + number % 32
        made.answered(items, 0, items, 0.02 + 0.001 * items, are_ids=True)
    assert 0.018 < made.overhead_seconds < 0.022


def test_what_is_near_the_context_may_be_too_long() -> None:
    assert sizes(64).may_be_too_long([3, 230])
    assert not sizes(64).may_be_too_long([3, 100])
    assert not sizes(64, context=None).may_be_too_long([10**6])


def test_no_answer_teaches_more_tokens_than_texts_can_have() -> None:
    sizes = ModelSizes()
    sizes.answered(1, 100, 2**62, 0.01, are_ids=False)
    assert sizes.tokens_of_texts([100])[0] <= 4096 + 4 * 100


def test_batches_are_no_longer_than_answers_that_are_parsed_at_once() -> None:
    sizes = ModelSizes()
    assert sizes.most_items(64) == 64
    assert sizes.most_items(2048) == 97
    for _ in range(100):
        sizes.learn_answer_size(64, 64 * 5500)  # 1,024 numbers in base64
    assert sizes.most_items(2048) == 1525
    sizes.learn_answer_size(2, 2 * 8388608)
    assert sizes.most_items(2048) == 1
