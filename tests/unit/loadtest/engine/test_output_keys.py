"""Keys of an answer's blocks: the same however they are asked for, and no more computed than that."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine.choice import Prose
from loadtest.engine.tokens import OutputKeys, block_keys

BLOCK = 4
PARENT = 99
PROSE = Prose(7)


@given(
    tail=st.integers(0, BLOCK - 1),
    output=st.integers(0, 40),
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6),
)
def test_slices_in_any_order_are_those_of_the_whole_chain(tail: int, output: int, asked: list[tuple[int, int]]) -> None:
    packed_tail = b"abcd" * tail
    keys = OutputKeys(PARENT, packed_tail, PROSE.packed, output_tokens=output, block_size=BLOCK)
    whole = block_keys(packed_tail + PROSE.packed(0, output), BLOCK, PARENT)
    assert len(keys) == len(whole)
    for start, stop in asked:
        assert keys[start:stop] == whole[start:stop]
    assert list(keys) == whole
    assert keys[::-1] == whole[::-1]


def test_no_more_output_is_made_than_the_asked_blocks_need() -> None:
    made: list[tuple[int, int]] = []

    def packed(start: int, stop: int) -> bytes:
        made.append((start, stop))
        return PROSE.packed(start, stop)

    keys = OutputKeys(PARENT, b"abcd" * 3, packed, output_tokens=1_000_000, block_size=BLOCK)
    assert keys[:0] == []
    first, second = keys[0], keys[1]
    assert [first, second] == keys[:2]
    assert made == [(0, 1), (1, 5)]


def test_there_is_no_key_beyond_the_planned_output() -> None:
    keys = OutputKeys(PARENT, b"", PROSE.packed, output_tokens=7, block_size=BLOCK)
    assert keys[-1] == keys[0]
    with pytest.raises(IndexError):
        keys[1]
