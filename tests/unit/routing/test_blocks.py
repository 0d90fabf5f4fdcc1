from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.blocks import EDGES, bytes_of, prefix_keys, seed

CHAIN = seed("m", "")


def test_edges_grow_from_256_bytes_to_2_mebibytes_in_about_a_hundred_and_fifty_steps_for_200_kilobytes() -> None:
    assert EDGES[0] == 256
    assert EDGES[-1] == 2 * 1024 * 1024
    assert all(before < after for before, after in pairwise(EDGES))
    assert len([edge for edge in EDGES if edge <= 200_000]) < 150


def test_a_block_is_never_larger_than_a_quarter_of_what_precedes_it_once_past_the_first_2_kilobytes() -> None:
    for before, after in pairwise(EDGES):
        if before >= 2048:
            assert (after - before) <= before / 4


def test_only_full_blocks_have_a_key() -> None:
    assert prefix_keys(b"x" * 255, CHAIN) == ()
    assert len(prefix_keys(b"x" * 256, CHAIN)) == 1
    assert len(prefix_keys(b"x" * 511, CHAIN)) == 1
    assert len(prefix_keys(b"x" * 512, CHAIN)) == 2


def test_text_beyond_the_last_edge_has_no_key() -> None:
    longest = b"x" * EDGES[-1]
    assert prefix_keys(longest, CHAIN) == prefix_keys(longest + b"y" * 10_000, CHAIN)


@given(
    prompt=st.integers(0, 30_000),
    change_at=st.integers(0, 30_000),
    more=st.integers(0, 5_000),
)
def test_two_prompts_share_exactly_the_keys_of_the_blocks_before_their_first_difference(
    prompt: int, change_at: int, more: int
) -> None:
    first = b"a" * prompt
    other = bytearray(b"a" * (prompt + more))
    if change_at < len(other):
        other[change_at] = ord("b")
    left, right = prefix_keys(first, CHAIN), prefix_keys(bytes(other), CHAIN)
    common = min(prompt, change_at)
    shared = len([edge for edge in EDGES if edge <= common])
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


def test_another_seed_gives_other_keys_throughout() -> None:
    prompt = bytes(range(256)) * 40
    assert not set(prefix_keys(prompt, seed("m", ""))) & set(prefix_keys(prompt, seed("m", "salt")))


@given(st.lists(st.text(max_size=4), min_size=1, max_size=3), st.lists(st.text(max_size=4), min_size=1, max_size=3))
def test_seeds_of_different_parts_differ_however_the_parts_are_cut(one: list[str], other: list[str]) -> None:
    assert (seed(*one) == seed(*other)) == (one == other)


def test_bytes_of_is_the_text_that_the_blocks_cover() -> None:
    assert bytes_of(0) == 0
    assert bytes_of(1) == 256
    assert [bytes_of(count) for count in range(1, len(EDGES) + 1)] == list(EDGES)
