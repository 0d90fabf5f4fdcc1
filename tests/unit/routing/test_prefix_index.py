"""The record of who holds what, against a model that keeps whole prompts and searches them one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway._native import prefix_keys
from gateway.core.routing.cache_view import PrefixIndex

MOST_BACKENDS = 5
CAPACITY = 1500
LEAST_BYTES = 64
SIZES = (128, 40, 300, 64, 200, 10, 500, 128, 90)  # of the blocks of a prompt, the first first
PATHS = st.lists(st.integers(0, 1), min_size=0, max_size=len(SIZES))
EDGES = tuple(sum(SIZES[: place + 1]) for place in range(len(SIZES)))


def keys_of(path: list[int]) -> tuple[int, ...]:
    """Chained keys: equal exactly for equal paths, as those of real prompts are."""
    keys, chain = [], 1
    for step in path:
        chain = chain * 2 + step
        keys.append(chain)
    return tuple(keys)


class NaiveRecord:
    """One backend's blocks: least recently used first; the last block of a prompt counts as used before its first.

    An answer is a block too, named after its prompt.
    """

    def __init__(self) -> None:
        self.capacity, self.most = CAPACITY, 1 << 30
        self.blocks: dict[int | str, int] = {}

    @property
    def used(self) -> int:
        return sum(self.blocks.values())

    def use(self, names: list[int | str], sizes: list[int]) -> None:
        grows = not set(names) <= set(self.blocks)
        for name, size in zip(names, sizes, strict=True):
            self.blocks[name] = self.blocks.pop(name, max(LEAST_BYTES, size))
        if grows:
            self.limit(self.capacity)

    def limit(self, size: int) -> None:
        while self.blocks and (self.used > size or len(self.blocks) > self.most):
            del self.blocks[next(iter(self.blocks))]

    def depth(self, keys: tuple[int, ...]) -> int:
        return next((depth for depth, key in enumerate(keys) if key not in self.blocks), len(keys))


class PrefixIndexMachine(RuleBasedStateMachine):
    """Prompts, answers, lost caches, changes of size and new backends, in any order."""

    @initialize(max_blocks=st.sampled_from([0, 7, 40, 1 << 20]))
    def begin(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.index = PrefixIndex([CAPACITY] * 2, max_blocks)
        self.naive: list[NaiveRecord] = []
        self.seen: list[tuple[int, ...]] = [()]
        self._grow_to(2)

    def _grow_to(self, count: int) -> None:
        while len(self.naive) < count:
            self.naive.append(NaiveRecord())
        for record in self.naive:
            record.most = self.max_blocks // count
            record.limit(record.capacity if len(record.blocks) > record.most else 1 << 40)

    def _backend(self, number: int) -> int:
        return number % len(self.naive)

    @rule(backend=st.integers(0, MOST_BACKENDS), path=PATHS)
    def record(self, backend: int, path: list[int]) -> None:
        backend, keys = self._backend(backend), keys_of(path)
        self.index.record(backend, keys, EDGES[: len(keys)])
        self.naive[backend].use([*reversed(keys)], [*reversed(SIZES[: len(keys)])])
        self.seen = [*self.seen[-5:], keys]

    @rule(backend=st.integers(0, MOST_BACKENDS), path=PATHS.filter(bool), size=st.integers(0, 400))
    def answer(self, backend: int, path: list[int], size: int) -> None:
        backend, prompt_key = self._backend(backend), keys_of(path)[-1]
        self.index.record_answer(backend, prompt_key, size)
        if prompt_key in self.naive[backend].blocks:
            self.naive[backend].use([f"answer to {prompt_key}"], [size])

    @precondition(lambda self: self.seen[-1])
    @rule(backend=st.integers(0, MOST_BACKENDS), size=st.integers(0, 400))
    def answer_the_last_prompt(self, backend: int, size: int) -> None:
        prompt_key = self.seen[-1][-1]
        backend = self._backend(backend)
        self.index.record_answer(backend, prompt_key, size)
        if prompt_key in self.naive[backend].blocks:
            self.naive[backend].use([f"answer to {prompt_key}"], [size])

    @precondition(lambda self: self.seen[-1])
    @rule(backend=st.integers(0, MOST_BACKENDS))
    def supersede(self, backend: int) -> None:
        prompt_key, backend = self.seen[-1][-1], self._backend(backend)
        self.index.supersede_answer(backend, prompt_key)
        self.naive[backend].blocks.pop(f"answer to {prompt_key}", None)

    @rule(backend=st.integers(0, MOST_BACKENDS))
    def wipe(self, backend: int) -> None:
        backend = self._backend(backend)
        self.index.wipe(backend)
        self.naive[backend].blocks.clear()

    @rule(backend=st.integers(0, MOST_BACKENDS), held=st.integers(0, 2000))
    def shrink(self, backend: int, held: int) -> None:
        backend = self._backend(backend)
        self.index.shrink(backend, held)
        self.naive[backend].limit(held)

    @rule(backend=st.integers(0, MOST_BACKENDS), capacity=st.integers(0, 3000))
    def resize(self, backend: int, capacity: int) -> None:
        self.index.resize(self._backend(backend), capacity)
        self.index.trim()
        naive = self.naive[self._backend(backend)]
        naive.capacity = capacity
        naive.limit(capacity)

    @precondition(lambda self: len(self.naive) < MOST_BACKENDS)
    @rule(more=st.integers(0, 1))
    def a_backend_comes(self, more: int) -> None:
        before = len(self.naive)
        count = min(MOST_BACKENDS, before + 1 + more)
        self.index.resize(count - 1, CAPACITY)
        self.index.trim()
        self._grow_to(count)
        for between in self.naive[before : count - 1]:
            between.capacity = 0  # its size is not known yet

    @rule(max_blocks=st.sampled_from([0, 5, 30, 1 << 20]))
    def follow(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.index.apply(max_blocks)
        self.index.trim()
        self._grow_to(len(self.naive))

    @rule(path=PATHS)
    def look_up(self, path: list[int]) -> None:
        keys = keys_of(path)
        assert self.index.depths(keys) == [record.depth(keys) for record in self.naive]

    @invariant()
    def recent_prompts_have_the_depths_and_answers_of_the_model(self) -> None:
        for keys in self.seen:
            assert self.index.depths(keys) == [record.depth(keys) for record in self.naive]
            if keys:
                held = [f"answer to {keys[-1]}" in record.blocks for record in self.naive]
                assert self.index.answered(keys[-1]) == sum(1 << backend for backend, has in enumerate(held) if has)

    @invariant()
    def no_record_is_larger_than_its_capacity(self) -> None:
        for backend, naive in enumerate(self.naive):
            assert self.index.used_bytes(backend) == naive.used <= naive.capacity
            assert self.index.blocks(backend) == len(naive.blocks)

    @invariant()
    def all_records_together_stay_within_the_budget(self) -> None:
        assert sum(self.index.blocks(backend) for backend in range(len(self.naive))) <= self.max_blocks

    @invariant()
    def what_is_held_has_no_holes(self) -> None:
        for naive in self.naive:
            held = {key for key in naive.blocks if isinstance(key, int)}
            assert all(key // 2 in held for key in held if key > 3)

    @invariant()
    def the_index_holds_no_key_that_nobody_holds(self) -> None:
        held = {key for naive in self.naive for key in naive.blocks}
        assert repr(self.index).startswith(f"<PrefixIndex {len(held)} keys;")


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(held=st.lists(st.integers(0, 200), min_size=1, max_size=12), blocks=st.integers(1, 200))
def test_bisection_finds_every_backends_depth_in_a_long_chain(held: list[int], blocks: int) -> None:
    chain, edges = tuple(range(1, 201)), tuple(range(128, 201 * 128, 128))
    index = PrefixIndex([1 << 40] * len(held))
    for backend, count in enumerate(held):
        index.record(backend, chain[:count], edges[:count])
    assert index.depths(chain[:blocks]) == [min(count, blocks) for count in held]


def test_a_prompt_that_is_larger_than_the_cache_leaves_its_beginning() -> None:
    index = PrefixIndex([1000])
    keys, edges, _ = prefix_keys([b"x" * 10_000], 1)
    index.record(0, keys, edges)
    assert index.depths(keys) == [3]
    assert index.used_bytes(0) == edges[2] == 768


def test_a_bound_that_sinks_is_reached_step_by_step() -> None:
    index, keys = PrefixIndex([1 << 30] * 2, 6000), tuple(range(1, 3001))
    edges = tuple(range(128, 3001 * 128, 128))
    for backend in (0, 1):
        index.record(backend, keys, edges)
    index.apply(2000)
    assert index.depths(keys) == [3000, 3000]
    index.record(0, (5000, 5001), (128, 256))
    assert [index.blocks(backend) for backend in (0, 1)] == [3000 - 256, 3000]  # a prompt pays for no more than that
    index.trim(500)
    assert sum(index.blocks(backend) for backend in (0, 1)) == 6000 - 256 - 500
    for _ in range(10):
        index.trim(500)
    assert [index.blocks(backend) for backend in (0, 1)] == [1000, 1000]
    assert index.depths(keys) == [998, 1000]


def test_no_keys_have_no_depth() -> None:
    index = PrefixIndex([1000, 1000])
    index.record(0, (), ())
    assert index.depths(()) == [0, 0]


def test_tiny_messages_count_with_64_bytes_each() -> None:
    index = PrefixIndex([64 * 5])
    keys, edges, _ = prefix_keys([b"hi"] * 10, 1)
    index.record(0, keys, edges)
    assert (index.blocks(0), index.used_bytes(0)) == (5, 320)


def test_an_answer_is_held_only_where_its_prompt_is() -> None:
    index = PrefixIndex([1000, 1000])
    index.record(1, (5, 6), (128, 256))
    for backend in (0, 1):
        index.record_answer(backend, 6, 100)
    assert index.answered(6) == 0b10
    assert index.used_bytes(1) == 356
    index.supersede_answer(1, 6)
    assert (index.answered(6), index.used_bytes(1)) == (0, 256)


@pytest.mark.parametrize("backends", [1, 64, 200])
def test_any_number_of_backends_can_be_distinguished(backends: int) -> None:
    index = PrefixIndex([10_000] * backends)
    index.record(backends - 1, (1, 2), (128, 256))
    assert index.depths((1, 2, 3)) == [0] * (backends - 1) + [2]
