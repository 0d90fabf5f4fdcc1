"""Prompts and bodies."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads.prompts import NO_GROUP, BodyMaker, Endpoint, Prompt, PromptSource, WorkloadKind, WorkloadSpec

_SHARED = WorkloadSpec(groups=4, prefix_tokens=200, tail_tokens=20, bytes_per_token=5)
_LONGEST_CHANCE_MATCH = 8


def test_the_same_seed_and_index_give_the_same_prompt_in_any_process() -> None:
    assert [PromptSource(_SHARED).prompt(i) for i in range(20)] == [PromptSource(_SHARED).prompt(i) for i in range(20)]


def test_another_seed_gives_other_prompts() -> None:
    other = _SHARED.model_copy(update={"seed": 1})
    assert PromptSource(_SHARED).prompt(3).prefix != PromptSource(other).prompt(3).prefix


def test_a_group_shares_its_whole_prefix_and_nothing_of_the_tail() -> None:
    source = PromptSource(_SHARED)
    by_group: dict[int, list[Prompt]] = {}
    for index in range(60):
        prompt = source.prompt(index)
        by_group.setdefault(prompt.group, []).append(prompt)
    assert set(by_group) == {0, 1, 2, 3}
    for prompts in by_group.values():
        assert len({prompt.prefix for prompt in prompts}) == 1
        assert len({prompt.tail[:_LONGEST_CHANCE_MATCH] for prompt in prompts}) == len(prompts)


def test_groups_unique_prompts_and_warm_ups_differ_from_their_first_bytes() -> None:
    source = PromptSource(_SHARED)
    unique = PromptSource(_SHARED.model_copy(update={"kind": WorkloadKind.UNIQUE}))
    texts = {source.prompt(index).prefix for index in range(60)}
    texts |= {unique.prompt(index).tail for index in range(20)} | {source.warmup(index).tail for index in range(20)}
    assert len(texts) == 4 + 20 + 20
    assert len({text[:_LONGEST_CHANCE_MATCH] for text in texts}) == len(texts)


@given(st.integers(1, 5000), st.integers(50, 500), st.floats(1, 8))
def test_sizes_are_what_was_asked_in_bytes(prefix: int, tail: int, bytes_per_token: float) -> None:
    spec = WorkloadSpec(groups=2, prefix_tokens=prefix, tail_tokens=tail, bytes_per_token=bytes_per_token)
    prompt = PromptSource(spec).prompt(0)
    assert len(prompt.tail) == max(round(tail * bytes_per_token), len("0123456789ab request 0: "))
    assert len(prompt.prefix) == max(round(prefix * bytes_per_token), len("0123456789ab topic 0: "))


def test_a_prompt_longer_than_the_corpus_is_still_as_long_as_asked() -> None:
    spec = WorkloadSpec(kind=WorkloadKind.UNIQUE, tail_tokens=200_000, bytes_per_token=5)
    assert len(PromptSource(spec).prompt(0).tail) == 1_000_000


def test_output_lengths_spread_evenly_around_the_asked_one() -> None:
    source = PromptSource(_SHARED.model_copy(update={"max_tokens": 100, "output_spread": 0.2}))
    lengths = [source.prompt(index).max_tokens for index in range(500)]
    assert min(lengths) >= 80
    assert max(lengths) <= 120
    assert abs(sum(lengths) / 500 - 100) < 3


def test_a_warm_up_belongs_to_no_group() -> None:
    assert PromptSource(_SHARED).warmup(0).group == NO_GROUP


def test_a_chat_body_carries_the_prefix_as_system_message() -> None:
    maker = BodyMaker(Endpoint.CHAT, "m", stream=True, cache_salt="salt")
    body = orjson.loads(maker.body(Prompt(0, prefix="shared", tail="own", max_tokens=9)))
    assert [message["content"] for message in body["messages"]] == ["shared", "own"]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (9, 9, True)
    assert body["cache_salt"] == "salt"


def test_a_completion_body_joins_prefix_and_tail_and_extra_fields_win() -> None:
    maker = BodyMaker(Endpoint.COMPLETIONS, "m", stream=False, ignore_eos=False, extra={"temperature": 1, "top_k": 5})
    body = orjson.loads(maker.body(Prompt(0, prefix="shared", tail="own", max_tokens=9)))
    assert body == {"model": "m", "prompt": "sharedown", "max_tokens": 9, "temperature": 1, "top_k": 5}
