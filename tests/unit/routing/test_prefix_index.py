"""The record of who holds what, against a model that keeps whole prompts and searches them one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.routing.blocks import EDGES, bytes_of, prefix_keys
from gateway.routing.prefix_index import PrefixIndex

BACKENDS = 3
FAMILIES = st.lists(st.integers(0, 1), min_size=0, max_size=9)


def keys_of(path: list[int]) -> tuple[int, ...]:
    """Chained keys: equal exactly for equal paths, as those of real prompts are."""
    keys, chain = [], 1
    for step in path:
        chain = chain * 2 + step
        keys.append(chain)
    return tuple(keys)


def sizes_of(count: int) -> list[int]:
    return [EDGES[position] - (EDGES[position - 1] if position else 0) for position in range(count)]


class NaiveRecord:
    """One backend's blocks: least recently used first; the last block of a prompt counts as used before its first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[tuple[int, int]] = []

    @property
    def used(self) -> int:
        return sum(size for _, size in self.blocks)

    def record(self, keys: tuple[int, ...]) -> None:
        pairs = list(zip(keys, sizes_of(len(keys)), strict=True))
        self.blocks = [block for block in self.blocks if block not in pairs] + pairs[::-1]
        self.resize(self.capacity)

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        while self.used > capacity:
            self.blocks.pop(0)

    def depth(self, keys: tuple[int, ...]) -> int:
        held = {key for key, _ in self.blocks}
        for depth, key in enumerate(keys):
            if key not in held:
                return depth
        return len(keys)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Prompts, lost caches and changes of size, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex([1500] * BACKENDS)
        self.naive = [NaiveRecord(1500) for _ in range(BACKENDS)]
        self.seen: list[tuple[int, ...]] = [()]

    @rule(backend=st.integers(0, BACKENDS - 1), path=FAMILIES)
    def record(self, backend: int, path: list[int]) -> None:
        keys = keys_of(path)
        self.index.record(backend, keys)
        self.naive[backend].record(keys)
        self.seen = [*self.seen[-5:], keys]

    @rule(backend=st.integers(0, BACKENDS - 1))
    def wipe(self, backend: int) -> None:
        self.index.wipe(backend)
        self.naive[backend].blocks.clear()

    @rule(backend=st.integers(0, BACKENDS - 1), capacity=st.integers(0, 3000))
    def resize(self, backend: int, capacity: int) -> None:
        self.index.resize(backend, capacity)
        self.naive[backend].resize(capacity)

    @rule(path=FAMILIES)
    def look_up(self, path: list[int]) -> None:
        keys = keys_of(path)
        assert self.index.depths(keys) == [record.depth(keys) for record in self.naive]

    @invariant()
    def recent_prompts_have_the_depths_of_the_model(self) -> None:
        for keys in self.seen:
            assert self.index.depths(keys) == [record.depth(keys) for record in self.naive]

    @invariant()
    def no_record_is_larger_than_its_capacity(self) -> None:
        for backend, naive in enumerate(self.naive):
            assert self.index.used_bytes(backend) == naive.used <= naive.capacity

    @invariant()
    def what_is_held_has_no_holes(self) -> None:
        for naive in self.naive:
            held = {key for key, _ in naive.blocks}
            assert all(key // 2 in held for key in held if key > 3)

    @invariant()
    def the_index_holds_no_key_that_nobody_holds(self) -> None:
        held = {key for naive in self.naive for key, _ in naive.blocks}
        assert repr(self.index).startswith(f"<PrefixIndex {len(held)} keys;")


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    held=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    blocks=st.integers(1, 200),
)
def test_bisection_finds_every_backends_depth_in_a_long_chain(held: list[int], blocks: int) -> None:
    chain = tuple(range(1, 201))
    index = PrefixIndex([1 << 40] * len(held))
    for backend, count in enumerate(held):
        index.record(backend, chain[:count])
    assert index.depths(chain[:blocks]) == [min(count, blocks) for count in held]


def test_a_prompt_that_is_larger_than_the_cache_leaves_its_beginning() -> None:
    index = PrefixIndex([1000])
    keys = prefix_keys(b"x" * 10_000, 1)
    index.record(0, keys)
    assert index.depths(keys) == [2]
    assert index.used_bytes(0) == bytes_of(2) == 512


def test_no_keys_have_no_depth() -> None:
    index = PrefixIndex([1000, 1000])
    index.record(0, ())
    assert index.depths(()) == [0, 0]


@pytest.mark.parametrize("backends", [1, 64, 200])
def test_any_number_of_backends_can_be_told_apart(backends: int) -> None:
    index = PrefixIndex([10_000] * backends)
    index.record(backends - 1, (1, 2))
    assert index.depths((1, 2, 3)) == [0] * (backends - 1) + [2]
