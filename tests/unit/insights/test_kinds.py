import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.insights.kinds import Kind, kind_of_words, kind_within, token_at

TOKENS = [
    (Kind.TIMESTAMP, "2026-03-14T09:26:53Z"),
    (Kind.TIMESTAMP, "2026-03-14 09:26:53.123456+00:00"),
    (Kind.TIMESTAMP, "2026-03-14"),
    (Kind.TIMESTAMP, "14/03/2026"),
    (Kind.TIMESTAMP, "Saturday, March 14, 2026 at 9:26 AM"),
    (Kind.TIMESTAMP, "Sat, 14 Mar 2026 09:26:53 GMT"),
    (Kind.TIMESTAMP, "09:26"),
    (Kind.TIMESTAMP, "1773480413"),
    (Kind.TIMESTAMP, "1773480413123"),
    (Kind.UUID, "123e4567-e89b-42d3-a456-426614174000"),
    (Kind.EMAIL, "ada.l@example.org"),
    (Kind.ID, "9f86d081884c7d65"),
    (Kind.ID, "req_8fK2mZpQ4x"),
    (Kind.NUMBER, "42"),
    (Kind.NUMBER, "1,204.50"),
]


@pytest.mark.parametrize(("kind", "token"), TOKENS, ids=[token for _, token in TOKENS])
def test_a_token_is_known_wherever_in_it_one_looks(kind: Kind, token: str) -> None:
    before, after = b"the value is (", b") and then more"
    text = before + token.encode() + after
    end = len(before) + len(token)
    for position in range(len(before), end + 1):
        found = token_at(text, position)
        assert found is not None
        if kind is not Kind.TIMESTAMP or len(token) < 13:
            assert found == (kind, len(before), end)
        assert found[0] is kind
        assert len(before) <= found[1] < found[2] <= end


@pytest.mark.parametrize("text", ["the cat sat", "You are helpful.", "deadbeef cafe", "maybe in march we go"])
def test_plain_words_are_no_token(text: str) -> None:
    for position in range(len(text)):
        assert token_at(text.encode(), position) is None


def test_the_place_just_before_a_token_is_not_in_it() -> None:
    assert token_at(b"at 42", 2) is None
    assert token_at(b"at 42", 3) == (Kind.NUMBER, 3, 5)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Ada", Kind.NAME),
        ("Ada Lovelace", Kind.NAME),
        ("ada", Kind.WORDS),
        ("The cat sat on the mat", Kind.WORDS),
        ("", Kind.EXTRA_TEXT),
        (", ", Kind.EXTRA_TEXT),
    ],
)
def test_words_may_be_a_name_or_nothing(text: str, kind: Kind) -> None:
    assert kind_of_words(text.encode()) is kind


def test_the_first_telling_token_within_a_text_is_found() -> None:
    assert kind_within(b"run 7 began at 2026-03-14 09:26") is Kind.TIMESTAMP
    assert kind_within(b"nothing but 7 words") is None


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_can_be_looked_at(text: bytes, position: int) -> None:
    found = token_at(text, min(position, len(text)))
    assert found is None or text[found[1] : found[2]]
