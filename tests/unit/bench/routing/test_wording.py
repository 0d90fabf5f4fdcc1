"""Texts have as many tokens as the trace says, and share exactly what their blocks share."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine.config import EngineConfig
from loadtest.engine.server import SimulatedEngine
from loadtest.engine.tokens import tokenise
from tests.bench.routing.trace import BLOCK_TOKENS, Row
from tests.bench.routing.wording import FEWEST_WORDS, Wording, WrongTokens, check, words_of

WORDS = ["".join(letters) for letters in itertools.product("abc", "def", "ghi")]  # one token each, with its space
BLOCKS = st.lists(st.integers(0, 3), max_size=8).map(tuple)


@given(first=BLOCKS, second=BLOCKS, tails=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_prompts_share_tokens_exactly_as_far_as_their_blocks(
    first: tuple[int, ...], second: tuple[int, ...], tails: tuple[int, int]
) -> None:
    wording = Wording(WORDS, "test")
    rows = [Row(0, first, tails[0], 1), Row(0, second, tails[1], 1)]
    tokens = [tokenise(wording.prompt(row, index)).ids() for index, row in enumerate(rows)]
    assert [len(found) for found in tokens] == [row.input_tokens for row in rows]
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*tokens, strict=False)))
    assert shared * BLOCK_TOKENS <= same < (shared + 1) * BLOCK_TOKENS


def test_a_row_asked_again_in_the_same_namespace_has_the_same_text_and_in_another_none_of_it() -> None:
    row = Row(0, (1, 2), 5, 1)
    assert Wording(WORDS, "a").prompt(row, 0) == Wording(WORDS, "a").prompt(row, 0)
    assert Wording(WORDS, "a").prompt(row, 0)[:64] != Wording(WORDS, "b").prompt(row, 0)[:64]
    assert Wording(WORDS, "a").prompt(row, 0)[-20:] != Wording(WORDS, "a").prompt(row, 1)[-20:]


async def test_the_words_are_those_that_the_server_counts_as_one_token_each() -> None:
    async with SimulatedEngine(EngineConfig(model="m")) as engine:
        words = await words_of(engine.url, "m")
        assert len(words) >= FEWEST_WORDS
        assert {len(word) for word in words} == {3}
        await check(engine.url, "m", Wording(words, "x"), [Row(0, (1, 2, 3), 9, 1), Row(0, (), 1, 1)])


async def test_words_of_other_lengths_than_the_server_counts_are_noticed() -> None:
    async with SimulatedEngine(EngineConfig(model="m")) as engine:
        with pytest.raises(WrongTokens, match="a prompt of 16 tokens in the trace has 20 in m"):
            await check(engine.url, "m", Wording(["four", "good"], "x"), [Row(0, (1,), 0, 1)])
