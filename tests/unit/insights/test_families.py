from random import Random

import numpy as np
import pytest

from gateway.features.insights.families import LEAST_SAMPLES, Corpus, Family, Ints, build, core_flags, find_families
from gateway.features.insights.samples import Sample
from tests.unit.insights.traffic import Prose

PROSE = Prose(Random(5))
SHARED = PROSE.text(2000)


def corpus_of(texts: list[str]) -> Corpus:
    samples = [
        Sample(text.encode(), "m", "", "", (), (), float(place), 1, len(text), len(text) // 4)
        for place, text in enumerate(texts)
    ]
    return build(samples, lambda: None)


def families(texts: list[str], hits: Ints | None = None) -> list[Family]:
    corpus = corpus_of(texts)
    return find_families(corpus, corpus.matched() if hits is None else hits, lambda: None)


def test_text_behind_a_difference_makes_a_family() -> None:
    texts = [f"Always the same.\nNo {number}.\n{SHARED}{PROSE.text(300)}" for number in range(6)]
    (family,) = families(texts)
    assert corpus_of(texts).start[family.first_row].tolist() == [len("Always the same.\n")] * 6
    assert family.members.tolist() == list(range(6))
    assert family.branches.max() == 5
    assert family.saving_bytes[0] == 0
    assert abs(family.saving_bytes[1:].mean() - len(SHARED)) < 80


@pytest.mark.parametrize("count", [1, LEAST_SAMPLES - 1])
def test_too_few_prompts_are_no_family(count: int) -> None:
    assert families([f"No {number}.\n{SHARED}" for number in range(count)]) == []


def test_prompts_that_differ_behind_what_they_share_are_no_family() -> None:
    assert families([SHARED + PROSE.text(500) for _ in range(20)]) == []


def test_two_variants_are_no_family_however_often_they_come() -> None:
    assert families([f"No {number % 2}.\n{SHARED}{PROSE.text(200)}" for number in range(30)]) == []


def test_little_shared_text_is_no_family() -> None:
    short = PROSE.text(300)
    assert families([f"No {number}.\n{short}{PROSE.text(300)}" for number in range(20)]) == []


def test_shared_text_far_behind_much_of_its_own_is_no_family() -> None:
    assert families([f"{PROSE.text(12_000)}\n{SHARED}" for _ in range(8)]) == []


def test_what_was_found_in_a_cache_is_no_loss() -> None:
    texts = [f"No {number}.\n{SHARED}" for number in range(8)]
    whole = np.array([len(text) for text in texts])
    assert families(texts, whole) == []
    (family,) = families(texts, np.where(np.arange(8) % 2, whole, 0))
    assert family.saving_bytes.tolist()[1::2] == [0, 0, 0, 0]


def test_families_at_one_place_are_separated_by_what_they_share() -> None:
    other = PROSE.text(1500)
    texts = [f"No {number}.\n{(SHARED, other)[number % 2]}" for number in range(12)]
    found = families(texts)
    assert sorted(family.members.tolist() for family in found) == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


def test_order_within_the_shared_text_does_not_matter() -> None:
    parts, random = [PROSE.text(400) for _ in range(6)], Random(3)
    (family,) = families(["\n".join(random.sample(parts, 6)) for _ in range(20)])
    assert abs(np.median(family.core_bytes) - 6 * 400) < 250


def test_what_follows_the_core_and_was_seen_before_is_a_loss_too() -> None:
    history = PROSE.text(3000)
    texts = [f"At {number}.\n{SHARED}\n{history[: 600 * number]}" for number in range(1, 6)]
    texts += [f"At {number}.\n{SHARED}\n{PROSE.text(100)}" for number in range(10, 20)]
    (family,) = families(texts)
    for number in (1, 2, 3, 4):
        assert abs(family.saving_bytes[number] - len(SHARED) - 600 * number) < 200


def test_short_pieces_belong_to_the_core_if_what_is_before_them_does() -> None:
    corpus = corpus_of(["a long piece of text,b,another long piece,c"])
    rows = np.arange(1, 5)
    core = corpus.content[[1]]
    assert core_flags(corpus, core, rows, np.zeros(4, np.int64)).tolist() == [True, True, False, False]


def test_others_are_let_in_often() -> None:
    calls = []
    texts = [f"No {number}.\n{SHARED}" for number in range(50)]
    corpus = build(corpus_of(texts).samples, lambda: calls.append(1))
    find_families(corpus, corpus.matched(), lambda: calls.append(1))
    assert len(calls) > 100
