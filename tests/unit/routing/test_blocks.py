from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway._native import prefix_keys
from gateway.core.routing.prompt_blocks import LONGEST_BYTES, seed

CHAIN = seed("m", "")
PIECES = st.lists(st.integers(0, 3000), max_size=6)


def edges_of(*lengths: int) -> tuple[int, ...]:
    return prefix_keys([b"x" * length for length in lengths], CHAIN)[1]


def test_blocks_grow_from_256_bytes_to_4_kibibytes_in_about_a_hundred_steps_for_200_kilobytes() -> None:
    edges = edges_of(200_000)
    assert edges[0] == 256
    assert edges[-1] == 200_000
    assert edges[-2] - edges[-3] == 4096
    assert all(before < after for before, after in pairwise(edges))
    assert len(edges) < 110


def test_a_block_is_never_larger_than_an_eighth_of_what_precedes_it_once_past_2_kibibytes() -> None:
    for before, after in pairwise(edges_of(LONGEST_BYTES)):
        if before >= 2048:
            assert (after - before) <= before / 8


@given(PIECES)
def test_every_piece_ends_with_an_edge_and_the_last_edge_is_the_end(lengths: list[int]) -> None:
    edges = edges_of(*lengths)
    ends = {end for end in accumulate(lengths) if end}
    assert ends <= set(edges)
    counts = prefix_keys([b"x" * length for length in lengths], CHAIN)[2]
    assert [edges[count - 1] if count else 0 for count in counts] == list(accumulate(lengths))
    assert (edges[-1] if edges else 0) == sum(lengths)
    assert list(edges) == sorted(set(edges))


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2), (4096, 16), (4097, 17)])
def test_what_a_full_block_leaves_over_has_a_key_too(length: int, blocks: int) -> None:
    assert len(prefix_keys([b"x" * length], CHAIN)[0]) == blocks


def test_text_beyond_2_mebibytes_has_no_key() -> None:
    longest = b"x" * LONGEST_BYTES
    for more in ([longest + b"y" * 10_000], [longest, b"y" * 10], [b"x" * 100, longest[100:] + b"y", b"z"]):
        keys, edges, _ = prefix_keys(more, CHAIN)
        assert edges[-1] == LONGEST_BYTES
        assert len(keys) == len(edges)
    assert prefix_keys([longest + b"y" * 10_000], CHAIN) == prefix_keys([longest], CHAIN)


@given(prompt=st.integers(1, 30_000), change_at=st.integers(0, 30_000), more=st.integers(0, 5_000))
def test_two_texts_share_exactly_the_keys_of_the_blocks_before_their_first_difference(
    prompt: int, change_at: int, more: int
) -> None:
    first = b"a" * prompt
    other = bytearray(b"a" * (prompt + more))
    if change_at < len(other):
        other[change_at] = ord("b")
    (left, left_edges, _), (right, right_edges, _) = prefix_keys([first], CHAIN), prefix_keys([bytes(other)], CHAIN)
    common = min(prompt, change_at)
    shared = len([edge for edge, same in zip(left_edges, right_edges, strict=False) if edge == same and edge <= common])
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


@given(common=PIECES, left=PIECES, right=PIECES)
def test_two_conversations_share_exactly_the_keys_of_their_common_pieces(
    common: list[int], left: list[int], right: list[int]
) -> None:
    start = [b"c" * length for length in common]
    one, other = ([*start, *(name * length for length in more)] for name, more in ((b"l", left), (b"r", right)))
    both, _, _ = prefix_keys(start, CHAIN)
    (ones, _, _), (others, _, _) = prefix_keys(one, CHAIN), prefix_keys(other, CHAIN)
    assert ones[: len(both)] == others[: len(both)] == both
    assert not set(ones[len(both) :]) & set(others[len(both) :])


def test_where_a_message_ends_makes_a_difference() -> None:
    whole, cut = prefix_keys([b"x" * 100], CHAIN)[0], prefix_keys([b"x" * 60, b"x" * 40], CHAIN)[0]
    assert not set(whole) & set(cut)


def test_another_seed_gives_other_keys_throughout() -> None:
    prompt = [bytes(range(256)) * 40]
    assert not set(prefix_keys(prompt, seed("m", ""))[0]) & set(prefix_keys(prompt, seed("m", "salt"))[0])


@given(st.lists(st.text(max_size=4), min_size=1, max_size=3), st.lists(st.text(max_size=4), min_size=1, max_size=3))
def test_seeds_of_different_parts_differ_however_the_parts_are_cut(one: list[str], other: list[str]) -> None:
    assert (seed(*one) == seed(*other)) == (one == other)
