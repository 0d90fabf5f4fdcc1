"""Token ids to prefix blocks."""

import pytest

from gateway.features.exact.index import packed, token_keys, token_seed

SEED = token_seed()
PROMPT = list(range(100, 140))


def keys(token_ids: list[int], chain: int = SEED) -> tuple[int, ...]:
    return token_keys(packed(token_ids), 16, chain)


def test_only_full_blocks_have_keys() -> None:
    assert len(keys(PROMPT)) == 2
    assert keys(PROMPT[:15]) == ()


def test_a_longer_prompt_begins_with_the_keys_of_a_shorter_one() -> None:
    assert keys([*PROMPT, *range(40)])[:2] == keys(PROMPT)


def test_a_changed_token_changes_its_block_and_all_that_follow() -> None:
    changed = [PROMPT[0] + 1, *PROMPT[1:]]
    assert not set(keys(changed)) & set(keys(PROMPT))
    assert keys([*PROMPT[:16], 7, *PROMPT[17:]])[0] == keys(PROMPT)[0]


def test_blocks_that_come_later_are_chained_to_the_one_before() -> None:
    first, second = keys(PROMPT)
    assert keys(PROMPT[16:], first) == (second,)


def test_prompts_of_another_adapter_or_salt_share_nothing() -> None:
    seeds = {token_seed(), token_seed("a"), token_seed(salt="a"), token_seed("a", "a"), token_seed("aa")}
    assert len(seeds) == 5
    assert len({keys(PROMPT, seed)[0] for seed in seeds}) == 5


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        packed([2**32])
