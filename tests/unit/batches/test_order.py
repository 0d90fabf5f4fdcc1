"""The order of a batch's lines: complete, depth first, and worth nearly all prompt tokens that any order could save."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.batches.order import PrefixOrder
from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Limits, Scheduler
from loadtest.engine.step_time import PRESETS, Preset

BLOCK_TOKENS = 16
OUTPUT_TOKENS = 60
AT_ONCE = 32  # sequences on each engine
KV_BLOCKS = 6000
ENGINES = 4

Prompt = tuple[int, ...]  # the keys of its blocks


def keys(random: Random, count: int) -> Prompt:
    return tuple(random.getrandbits(64) for _ in range(count))


def system_prompts(random: Random) -> list[Prompt]:
    """Tasks that each have a long system prompt."""
    prompts = [keys(random, 120) for _ in range(160)]
    return [random.choice(prompts) + keys(random, random.randrange(5, 30)) for _ in range(3000)]


def few_shots(random: Random) -> list[Prompt]:
    """One instruction, then the examples of a category, then some of a sort in it."""
    instruction = keys(random, 30)
    categories = [instruction + keys(random, 60) for _ in range(40)]
    sorts = [category + keys(random, 40) for category in categories for _ in range(10)]
    return [random.choice(sorts) + keys(random, random.randrange(4, 20)) for _ in range(3000)]


def documents(random: Random) -> list[Prompt]:
    """Some questions about each of many documents."""
    instruction = keys(random, 10)
    papers = [instruction + keys(random, random.randrange(60, 250)) for _ in range(400)]
    lines = [paper + keys(random, random.randrange(2, 6)) for paper in papers for _ in range(random.randrange(3, 10))]
    random.shuffle(lines)
    return lines


FILES: dict[str, Callable[[Random], list[Prompt]]] = {
    "system prompts": system_prompts,
    "few shots": few_shots,
    "documents": documents,
}


def best_possible(lines: list[Prompt]) -> int:
    """Tokens that are computed before in an endless cache of one engine."""
    known: set[int] = set()
    for line in lines:
        known.update(line)
    return BLOCK_TOKENS * (sum(map(len, lines)) - len(known))


def saved_tokens(lines: list[Prompt], engines: list[list[int]]) -> int:
    """Tokens that engines have in their caches, each of which runs some of the lines, in this order."""
    return sum(_run(lines, own) for own in engines)


def _run(lines: list[Prompt], own: list[int]) -> int:
    """One engine, which takes the next line as soon as a sequence ends."""
    limits = Limits(max_num_seqs=AT_ONCE, block_size=BLOCK_TOKENS, num_blocks=KV_BLOCKS)
    scheduler, left, now, in_flight = Scheduler(limits, PRESETS[Preset.H100_8B]), deque(own), 0.0, 0
    while left or in_flight:
        while left and in_flight < AT_ONCE:
            line = left.popleft()
            path = lines[line]
            scheduler.add(
                SequenceState(line, BLOCK_TOKENS * len(path) + 5, OUTPUT_TOKENS + line % 30, prompt_keys=path)
            )
            in_flight += 1
        step = scheduler.schedule(now)
        if step is None:
            break
        now += step.duration_seconds
        in_flight -= len(scheduler.commit(step, now).finished)
    return scheduler.counters.prompt_tokens_cached


def arranged(lines: list[Prompt], engines: int = ENGINES) -> PrefixOrder:
    order = PrefixOrder()
    for number, path in enumerate(lines):
        order.add(path, BLOCK_TOKENS * len(path) + 5, OUTPUT_TOKENS + number % 30)
    for _ in order.arrange(engines):
        pass
    return order


def ranges(order: PrefixOrder) -> list[list[int]]:
    """The lines of each engine."""
    return [[*order._order[own.start : own.end]] for own in order._ranges]


@pytest.mark.parametrize("name", FILES)
def test_it_saves_nearly_what_the_best_order_could_and_more_than_the_order_of_arrival(name: str) -> None:
    lines = FILES[name](Random(name))
    best = best_possible(lines)
    as_they_came = saved_tokens(lines, [[*range(engine, len(lines), ENGINES)] for engine in range(ENGINES)]) / best
    in_order = saved_tokens(lines, ranges(arranged(lines))) / best
    assert in_order >= 0.95
    assert in_order > as_they_came + 0.1


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=40)


def chained(path: list[int]) -> Prompt:
    """Keys as they are made of a prompt: each depends on all before it."""
    return tuple(hash(tuple(path[: end + 1])) % (1 << 64) for end in range(len(path)))


@given(PATHS, st.integers(1, 5))
def test_every_line_comes_once_in_turn(paths: list[list[int]], engines: int) -> None:
    assert sorted(arranged([chained(path) for path in paths], engines).in_turn()) == list(range(len(paths)))


@given(PATHS)
def test_lines_with_a_common_prefix_are_together(paths: list[list[int]]) -> None:
    order = list(arranged([chained(path) for path in paths], 1).in_turn())
    for depth in range(1, 6):
        prefixes = [tuple(paths[line][:depth]) for line in order if len(paths[line]) >= depth]
        changes = sum(one != other for one, other in pairwise(prefixes))
        assert changes == max(0, len(set(prefixes)) - 1)


def test_ranges_are_cut_between_large_subtrees() -> None:
    random = Random(3)
    roots = [keys(random, 50) for _ in range(40)]
    lines = [root + keys(random, 2) for root in roots for _ in range(25)]
    shares = [{lines[line][0] for line in own} for own in ranges(arranged(lines))]
    assert len(shares) == ENGINES
    assert sum(map(len, shares)) == len(set().union(*shares))


def test_groups_with_most_output_for_their_prompt_come_first() -> None:
    order = PrefixOrder()
    for group, output_tokens in enumerate((10, 1000, 100)):
        for line in range(3):
            order.add((group + 1, 100 * group + line), 500, output_tokens)
    for _ in order.arrange(1):
        pass
    assert [line // 3 for line in order.in_turn()] == [1, 1, 1, 2, 2, 2, 0, 0, 0]


def test_many_lines_are_arranged_in_short_steps() -> None:
    random = Random(5)
    order = PrefixOrder()
    roots = [keys(random, 20) for _ in range(500)]
    for _ in range(50_000):
        order.add(random.choice(roots) + keys(random, 2), 3000, 200)
    assert sum(1 for _ in order.arrange(8)) > 50_000 // 2048 * 2
    assert len([*order.in_turn()]) == 50_000
