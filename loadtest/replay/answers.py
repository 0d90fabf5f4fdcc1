"""What an answer's blocks are: an engine caches them, and a later request whose prompt holds them shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.replay.trace import Row


@dataclass(slots=True)
class Turn:
    """What a trace shows of one request's answer, and of the answer before it.

    `answer_keys` are those of the blocks that its answer completes. Its prompt holds an earlier answer after the first
    `turn` blocks, up to the end of block `turn_end`; both are 0 if it holds none.
    """

    answer_keys: tuple[int, ...] = ()
    turn: int = 0
    turn_end: int = 0


def turns_of(rows: Sequence[Row], block_tokens: int) -> list[Turn]:
    """For each row, what later and earlier rows show of its conversation.

    A row continues an earlier one if its prompt begins with all full blocks of the earlier prompt and is at least as
    long as that prompt and its answer. A prompt that ends inside an opening that many share is nobody's earlier turn.
    The first continuation tells; one that branches off later may differ from the answer.
    """
    turns = [Turn() for _ in rows]
    ending: dict[int, int] = {}  # last full block -> the latest row whose prompt ends with it
    shared = _shared(rows)
    for number, row in enumerate(rows):
        parent = _parent(row, rows, ending)
        if parent is not None:
            before = rows[parent]
            # The last token is never computed, so it is not cached.
            done = (before.prompt_tokens + before.output_tokens - 1) // block_tokens
            answer = row.keys[len(before.keys) : done]
            if answer and turns[parent].answer_keys in ((), answer):
                turns[parent].answer_keys = answer
                turns[number].turn, turns[number].turn_end = len(before.keys), done
        if row.keys and row.keys[-1] not in shared:
            ending[row.keys[-1]] = number
    return turns


def _parent(row: Row, rows: Sequence[Row], ending: dict[int, int]) -> int | None:
    for key in reversed(row.keys):
        parent = ending.get(key)
        if parent is not None and rows[parent].prompt_tokens + rows[parent].output_tokens <= row.prompt_tokens:
            return parent
    return None


def _shared(rows: Sequence[Row]) -> set[int]:
    """Blocks that more than three different blocks follow: the end of an opening such as a system prompt."""
    follower: dict[int, int] = {}
    branching: dict[int, int] = {}
    for row in rows:
        for key, after in zip(row.keys, row.keys[1:], strict=False):
            known = follower.setdefault(key, after)
            if known != after:
                branching[key] = branching.get(key, 0) + 1
    return {key for key, count in branching.items() if count > 2}
