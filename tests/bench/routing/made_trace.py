"""A trace made to order, for when none is given: chats that grow turn by turn, and tools with long shared prompts.

The shape, not the figures, is that of published traces: one system prompt in front of every chat, a follow-up turn
that repeats all that was said before it, tool calls that share thousands of tokens and answer briefly, all here at one
thirty-second of the length.
"""

import random
from collections.abc import Iterator
from itertools import count, islice
from operator import attrgetter

from tests.bench.routing.trace import BLOCK_TOKENS, Row

_MOST_BLOCKS = 120
_FOLLOW_UP = 0.45
_CLASSES = ("chat", "chat", "chat", "tool", "tool")
_TOOL_PREFIX_BLOCKS = (12, 5, 24)
_SESSIONS_PER_SECOND = 2.0


def made_trace(rows: int, seed: int) -> list[Row]:
    """So many rows, the same for the same seed, in order of time."""
    rng = random.Random(f"trace-{seed}")
    ids = count(1_000_000)
    tools = [tuple(range(1000 * tool + 1, 1000 * tool + 1 + size)) for tool, size in enumerate(_TOOL_PREFIX_BLOCKS, 1)]
    made: list[Row] = []
    at = 0.0
    while len(made) < 2 * rows:  # later turns of the last chats thin out: that half is cut off
        at += rng.expovariate(_SESSIONS_PER_SECOND)
        if rng.choice(_CLASSES) == "chat":
            made += _chat(at, ids, rng)
        else:
            made.append(_tool_call(at, rng.choice(tools), ids, rng))
    return sorted(made, key=attrgetter("at"))[:rows]


def _chat(at: float, ids: Iterator[int], rng: random.Random) -> list[Row]:
    """The turns of one conversation, each with the one before it as its beginning."""
    turns: list[Row] = []
    said: tuple[int, ...] = (0,)
    while True:
        said += tuple(islice(ids, min(_MOST_BLOCKS, 1 + int(rng.lognormvariate(2.3, 0.9)))))
        if len(said) > _MOST_BLOCKS and turns:
            return turns
        said = said[:_MOST_BLOCKS]
        turns.append(Row(at, said, rng.randrange(1, BLOCK_TOKENS), 1 + min(63, int(rng.lognormvariate(2.9, 0.6)))))
        if rng.uniform(0, 1) > _FOLLOW_UP:
            return turns
        at += rng.lognormvariate(3.0, 0.8)


def _tool_call(at: float, prefix: tuple[int, ...], ids: Iterator[int], rng: random.Random) -> Row:
    own = tuple(islice(ids, rng.randrange(0, 4)))
    return Row(at, prefix + own, rng.randrange(1, BLOCK_TOKENS), 1 + min(15, int(rng.expovariate(0.4))))
