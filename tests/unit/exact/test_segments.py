from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from gateway.features.exact.tokenizer import Segments, cut_marks


class Letters:
    """Encodes a text as its letters' code points; knows what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[bytes]:
        self.asked += texts
        return [self.ids(text) for text in texts]

    def ids(self, text: str) -> bytes:
        return array("I", map(ord, text)).tobytes()


@given(st.lists(st.sampled_from(["<a>", "<b>", "x", "<", "", "žž"])).map("".join), st.integers(0, 2000))
def test_the_pieces_add_up_to_the_text_however_small_the_memory(text: str, capacity_bytes: int) -> None:
    letters = Letters()
    segments = Segments(letters, ("<a>", "<b>"), capacity_bytes)
    assert [segments.tokens(text) for _ in range(3)] == [letters.ids(text)] * 3
    assert segments.used_bytes <= capacity_bytes


def test_each_piece_begins_with_a_mark_and_is_encoded_once() -> None:
    letters = Letters()
    segments = Segments(letters, ("<a>",), 10000)
    segments.tokens("system<a>one<a>two<a>one")
    assert letters.asked == ["system", "<a>one", "<a>two"]
    segments.tokens("system<a>one<a>two<a>one<a>three")
    assert letters.asked[3:] == ["<a>three"]


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    letters = Letters()
    segments = Segments(letters, ("<a>",), 1000)
    for text in ("<a>1", "<a>2", "<a>3", "<a>1", "<a>4", "<a>1", "<a>2"):
        segments.tokens(text)
    assert letters.asked == ["<a>1", "<a>2", "<a>3", "<a>4", "<a>2"]


def test_without_marks_a_text_is_one_piece() -> None:
    letters = Letters()
    Segments(letters, (), 1000).tokens("<a>1<a>2")
    assert letters.asked == ["<a>1<a>2"]


def token(content: str, **how: bool) -> AddedToken:
    return AddedToken(content, **{"normalized": False, **how})


@pytest.mark.parametrize(
    ("tokens", "marks"),
    [
        ([token("<a>"), token("<b>"), token("<c>")], ("<a>", "<b>")),
        ([token("<a>", lstrip=True), token("<b>")], ("<b>",)),
        ([token("<a>", single_word=True), token("<b>")], ("<b>",)),
        ([token("<a>", normalized=True), token("<b>")], ("<b>",)),
        ([token("<a>"), token("<a><b>")], ()),
        ([token("<a>"), token("x<")], ()),
        ([token("<a>"), token(">x")], ("<a>",)),
        ([token("aa")], ()),
        ([token("")], ()),
    ],
)
def test_a_text_is_cut_only_before_tokens_that_nothing_can_hide(
    tokens: list[AddedToken], marks: tuple[str, ...]
) -> None:
    assert cut_marks(tokens, ["...<a>...", "<b> aa"]) == marks
