from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.insights.families import Family, build, find_families
from gateway.features.insights.report import (
    Difference,
    common_prefix,
    compare,
    kind_of_words,
    kind_within,
    part_of,
    token_at,
)
from gateway.features.insights.samples import Sample
from tests.unit.insights.traffic import Prose, chat, read, tools

PROSE = Prose(Random(3))
SHARED = PROSE.text(3000)

TOKENS = [
    ("timestamp", "2026-03-14T09:26:53Z"),
    ("timestamp", "2026-03-14 09:26:53.123456+00:00"),
    ("timestamp", "2026-03-14"),
    ("timestamp", "14/03/2026"),
    ("timestamp", "Saturday, March 14, 2026 at 9:26 AM"),
    ("timestamp", "Sat, 14 Mar 2026 09:26:53 GMT"),
    ("timestamp", "09:26"),
    ("timestamp", "1773480413"),
    ("timestamp", "1773480413123"),
    ("uuid", "123e4567-e89b-42d3-a456-426614174000"),
    ("email", "ada.l@example.org"),
    ("id", "9f86d081884c7d65"),
    ("id", "req_8fK2mZpQ4x"),
    ("number", "42"),
    ("number", "1,204.50"),
]


def first_difference(texts: list[str]) -> Difference | None:
    """Of the first two, in a family of all."""
    samples = [Sample(each.encode(), "m", "", "", (), (), 0.0, 1, len(each), len(each) // 4) for each in texts]
    corpus = build(samples, lambda: None)
    (family,) = find_families(corpus, np.zeros(len(samples), np.int64), lambda: None)
    assert isinstance(family, Family)
    return compare(corpus, family, 0, 1)


@given(st.binary(max_size=300), st.binary(max_size=50), st.binary(max_size=50))
def test_the_common_prefix_is_found_byte_for_byte(shared: bytes, one: bytes, other: bytes) -> None:
    one, other = shared + one, shared + other
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@pytest.mark.parametrize(
    ("variants", "kind", "differing"),
    [
        (["at 09:15:00,", "at 09:16:10,", "at 10:02:00,", "at 11:11:11,"], "timestamp",
         ("09:15:00", "09:16:10")),
        (["order 998,", "order 1001,", "order 7,", "order 85,"], "number", ("998", "1001")),
        (["Dear Ada Byron,", "Dear Clara Schumann,", "Dear Emmy,", "Dear Lise Meitner,"], "name",
         ("Ada Byron", "Clara Schumann")),
        (["in loud tone,", "in lush tone,", "in a soft tone,", "in any tone,"], "words", ("loud", "lush")),
        (["go,", "go and see people we know,", "go on,", "go elsewhere,"], "extra text",
         ("", " and see people we know")),
    ],
)  # fmt: skip
def test_what_differs_is_found_from_its_first_to_its_last_byte(
    variants: list[str], kind: str, differing: tuple[str, str]
) -> None:
    texts = [f"We begin {variant}\n{SHARED}" for variant in variants]
    found = first_difference(texts)
    assert found is not None
    assert found.kind == kind
    shown = tuple(text[found.start : end] for text, end in zip(texts, found.ends, strict=False))
    assert shown == differing


def test_numbers_of_documents_in_another_order_are_an_order() -> None:
    pages = [f"[{number}] {PROSE.text(700)}" for number in range(5)]
    random = Random(2)
    texts = ["Read:\n" + "\n".join(random.sample(pages, 5)) for _ in range(6)]
    found = first_difference(texts)
    assert found is not None
    assert found.kind == "text order"


def test_a_prompt_that_begins_with_another_has_no_difference() -> None:
    texts = [f"{SHARED}", f"{SHARED} and more", *(f"At 1{number}:00 {SHARED}" for number in range(5))]
    samples = [Sample(each.encode(), "m", "", "", (), (), 0.0, 1, len(each), len(each) // 4) for each in texts]
    corpus = build(samples, lambda: None)
    (family,) = find_families(corpus, np.zeros(len(samples), np.int64), lambda: None)
    assert compare(corpus, family, 0, 1) is None


def test_a_position_is_given_in_its_part() -> None:
    document = chat("Be good.", "Hi.", "Yes?", "Do it.", tools=tools(PROSE, 2), documents=[{"text": "d"}])
    text = b"".join(read(document).pieces)
    for mark, name in (
        (b'{"type":"function"', "tools"), (b'{"text":"d"}', "documents"), (b"Be good", "messages[0] (system)"),
        (b"Hi.", "messages[1] (user)"), (b"Yes?", "messages[2] (assistant)"), (b"Do it", "messages[3] (user)"),
    ):  # fmt: skip
        assert part_of(text, text.index(mark)) == (name, 0)
        assert part_of(text, text.index(mark) + 2) == (name, 2)


def test_a_system_text_beside_the_turns_is_a_part() -> None:
    text = b"".join(read({"system": "Now: 12", "messages": [{"role": "user", "content": "x"}]}).pieces)
    assert part_of(text, text.index(b"12")) == ("system", 5)


def test_a_plain_prompt_is_one_part_and_a_made_up_role_is_not_shown() -> None:
    assert part_of(b"some prompt", 5) == ("prompt", 5)
    text = b"".join(read({"messages": [{"role": "my secret role", "content": "abc"}]}).pieces)
    assert part_of(text, text.index(b"abc")) == ("messages[0] (other)", 0)


@pytest.mark.parametrize(("kind", "token"), TOKENS, ids=[token for _, token in TOKENS])
def test_a_token_is_known_wherever_in_it_one_looks(kind: str, token: str) -> None:
    before, after = b"the value is (", b") and then more"
    text = before + token.encode() + after
    end = len(before) + len(token)
    for position in range(len(before), end + 1):
        found = token_at(text, position)
        assert found is not None
        if kind != "timestamp" or len(token) < 13:
            assert found == (kind, len(before), end)
        assert found[0] == kind
        assert len(before) <= found[1] < found[2] <= end


@pytest.mark.parametrize("text", ["the cat sat", "You are helpful.", "deadbeef cafe", "maybe in march we go"])
def test_plain_words_are_no_token(text: str) -> None:
    for position in range(len(text)):
        assert token_at(text.encode(), position) is None


def test_the_place_just_before_a_token_is_not_in_it() -> None:
    assert token_at(b"at 42", 2) is None
    assert token_at(b"at 42", 3) == ("number", 3, 5)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Ada", "name"),
        ("Ada Lovelace", "name"),
        ("ada", "words"),
        ("The cat sat on the mat", "words"),
        ("", "extra text"),
        (", ", "extra text"),
    ],
)
def test_words_may_be_a_name_or_nothing(text: str, kind: str) -> None:
    assert kind_of_words(text.encode()) == kind


def test_the_first_telling_token_within_a_text_is_found() -> None:
    assert kind_within(b"run 7 began at 2026-03-14 09:26") == "timestamp"
    assert kind_within(b"nothing but 7 words") is None


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_can_be_looked_at(text: bytes, position: int) -> None:
    found = token_at(text, min(position, len(text)))
    assert found is None or text[found[1] : found[2]]
