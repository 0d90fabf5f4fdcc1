import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import BUILD
from gateway.core.request import Demand, InferenceRequest, Kind


@pytest.mark.skipif(BUILD == "compiled", reason="objects of compiled classes with arguments are not pickled")
def test_what_placement_needs_is_small_enough_to_travel() -> None:
    ask = Demand(
        "m",
        keys=(1, 2, 3),
        edges=(128, 256, 300),
        prompt_size=300,
        sequences=2,
        output_tokens=5,
        streams=True,
        pinned="a",
    )
    assert pickle.loads(pickle.dumps(ask)) == ask


def test_by_default_a_request_is_one_sequence_of_unknown_length_that_may_go_anywhere() -> None:
    ask = Demand("m")
    assert (ask.sequences, ask.divisible, ask.output_tokens, ask.pinned, ask.keys) == (1, False, None, None, ())


def test_by_default_a_request_may_be_sent_again_and_hides_nothing() -> None:
    request = InferenceRequest("chat", Kind.GENERATE, b"POST", b"/v1/chat/completions", Demand("m"), "id-1")
    assert request.repeatable
    assert not request.hides_usage
    assert (request.body, request.upload, request.headers) == (b"", None, b"")


def test_kinds_are_spelled_as_they_are_logged() -> None:
    assert [str(kind) for kind in Kind] == ["generate", "pool", "light", "upload"]


# How many tokens a part of a prompt has.


def asking(**fields: object) -> Demand:
    """Four blocks in two messages; 4000 bytes, of which the last 400 have no block."""
    known = {"edges": (100, 1000, 2000, 3600), "ends": (2, 4), "prompt_size": 4000, "prompt_tokens": 1000}
    return Demand("m", **(known | fields))  # type: ignore[arg-type]


def test_without_an_anchor_tokens_are_in_proportion_to_bytes() -> None:
    assert [asking().tokens_of(blocks) for blocks in range(5)] == [0, 25, 250, 500, 900]


def test_up_to_the_anchor_tokens_are_in_proportion_to_what_an_engine_counted() -> None:
    anchored = asking(anchor_size=2000, anchor_tokens=800)
    assert [anchored.tokens_of(blocks) for blocks in range(5)] == [0, 40, 400, 800, 800 + 200 * 1600 // 2000]


def test_an_anchor_that_is_the_whole_prompt_leaves_nothing_to_guess() -> None:
    anchored = asking(edges=(2000, 4000), ends=(2,), anchor_size=4000, anchor_tokens=1000)
    assert [anchored.tokens_of(blocks) for blocks in range(3)] == [0, 500, 1000]


def test_prompts_that_part_within_a_message_share_half_of_the_next_block() -> None:
    assert [asking().tokens_shared(blocks) for blocks in range(5)] == [0, 137, 250, 700, 900]
    assert [asking(ends=None).tokens_shared(blocks) for blocks in range(5)] == [0, 25, 250, 500, 900]


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    beyond=st.integers(0, 1000),
    ends=st.none() | st.sets(st.integers(1, 12)),
    tokens=st.integers(1, 20_000),
    anchor=st.integers(0, 12),
    anchor_tokens=st.integers(1, 30_000),
)
def test_more_blocks_never_have_fewer_tokens_and_never_more_than_the_prompt(
    sizes: list[int], beyond: int, ends: set[int] | None, tokens: int, anchor: int, anchor_tokens: int
) -> None:
    edges = tuple(sum(sizes[: count + 1]) for count in range(len(sizes)))
    anchor = min(anchor, len(edges))
    ask = Demand(
        "m",
        edges=edges,
        ends=None if ends is None else tuple(sorted(ends)),
        prompt_size=edges[-1] + beyond,
        prompt_tokens=tokens,
        anchor_size=edges[anchor - 1] if anchor else 0,
        anchor_tokens=min(anchor_tokens, tokens) if anchor else 0,
    )
    counted = [ask.tokens_of(blocks) for blocks in range(len(edges) + 1)]
    shared = [ask.tokens_shared(blocks) for blocks in range(len(edges) + 1)]
    assert counted == sorted(counted)
    assert shared == sorted(shared)
    assert all(0 <= sure <= likely <= tokens for sure, likely in zip(counted, shared, strict=True))


@pytest.mark.parametrize("anchor_tokens", [1001, 5000])
def test_more_tokens_before_the_anchor_than_in_the_prompt_are_not_made_up_for_behind_it(anchor_tokens: int) -> None:
    anchored = asking(anchor_size=2000, anchor_tokens=anchor_tokens)
    assert anchored.tokens_of(4) == anchored.tokens_of(3) == anchor_tokens
