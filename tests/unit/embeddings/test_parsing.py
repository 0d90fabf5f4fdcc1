"""Long answers are parsed only if they hold no more values than was asked for."""

import pytest

from gateway.core.errors import WrongAnswer
from gateway.features.embeddings.wire import parse_answer

MIB = 1048576


def test_a_short_answer_may_hold_anything() -> None:
    assert parse_answer(b"[{},{}]", {b"{": 0}) == [{}, {}]
    with pytest.raises(WrongAnswer, match="not valid JSON"):
        parse_answer(b"{", {})


def test_a_long_answer_of_long_strings_is_parsed() -> None:
    assert parse_answer(b'["%b"]' % (b"A" * MIB), {b"{": 0, b"[": 1, b",": 0}) == ["A" * MIB]


@pytest.mark.parametrize("value", [b"{},", b"[],", b"1,", b'"",'])
def test_a_long_answer_of_many_values_is_refused_before_it_is_parsed(value: bytes) -> None:
    body = b"[" + value * (MIB // len(value)) + b"1]"
    with pytest.raises(WrongAnswer, match="more than requested"):
        parse_answer(body, {b"{": 100, b"[": 100, b",": 100})
