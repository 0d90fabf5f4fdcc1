"""Token ids and extra keys of a sequence's blocks."""

from loadtest.engine.choice import Prose
from loadtest.engine.kv_cache import BlockContent
from loadtest.engine.tokens import from_ids

PROSE = Prose(3)
OUTPUT_IDS = from_ids([]).ids() + [int.from_bytes(PROSE.packed(i, i + 1), "little") for i in range(8)]


def content(lora: str | None = None, salt: str | None = None) -> BlockContent:
    return BlockContent(
        from_ids([1, 2, 3, 4, 5]), PROSE.packed, lora_name=lora, lora_id=1 if lora else None, cache_salt=salt
    )


def test_token_ids_run_from_the_prompt_into_the_output() -> None:
    assert content().token_ids(0, 4) == [1, 2, 3, 4]
    assert content().token_ids(4, 8) == [5, *OUTPUT_IDS[:3]]
    assert content().token_ids(8, 12) == OUTPUT_IDS[3:7]


def test_plain_blocks_have_no_extra_keys() -> None:
    assert content().extra_keys(0, 2) == [None, None]


def test_the_salt_is_in_the_first_block_and_the_adapter_in_each() -> None:
    assert content(salt="s").extra_keys(0, 2) == [("s",), None]
    assert content(salt="s").extra_keys(1, 2) == [None, None]
    assert content("adapter", "s").extra_keys(0, 2) == [("adapter", "s"), ("adapter",)]
    assert content("adapter", "s").extra_keys(3, 1) == [("adapter",)]
