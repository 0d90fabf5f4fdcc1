"""The block pool: references, LRU order, the prefix index."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadtest.engine.kv_cache import BlockPool, SequenceState


def test_released_blocks_are_reused_tail_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == [*reversed(blocks)]


def test_a_freed_prefix_is_found_until_its_blocks_are_reused() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks, [11, 12, 13])
    pool.release(blocks)
    assert pool.find([11, 12, 13, 14], 9) == blocks
    pool.allocate(2)  # the block never used, and the tail
    assert pool.find([11, 12, 13], 9) == blocks[:2]


def test_a_find_stops_at_the_first_gap_and_at_the_limit() -> None:
    pool = BlockPool(4)
    pool.register(pool.allocate(2), [1, 3])
    assert pool.find([1, 2, 3], 9) == [0]
    assert pool.find([1, 3], 1) == [0]


def test_the_first_block_keeps_a_key() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register([first], [7])
    pool.register([second], [7])
    assert pool.find([7], 1) == [first]
    assert pool.num_cached == 1


def test_a_copy_takes_over_when_the_first_block_is_reused() -> None:
    pool = BlockPool(3)
    first, second, _third = blocks = pool.allocate(3)
    pool.register([first, second], [7, 7])
    assert pool.cached_keys() == {7: 2}
    pool.release([first])
    assert pool.allocate(1) == [first]
    assert pool.find([7], 1) == [second]
    pool.release([second])
    assert pool.allocate(1) == [second]
    assert (pool.find([7], 1), pool.num_cached) == ([], 0)
    pool.release(blocks)


def test_a_copy_is_forgotten_before_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register([first, second], [7, 7])
    pool.release([second])
    assert pool.allocate(1) == [second]
    assert (pool.find([7], 1), pool.cached_keys()) == ([first], {7: 1})


def test_blocks_that_hold_nothing_to_find_are_reused_before_all_others() -> None:
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(3)
    pool.register(old, [1, 2])
    pool.register(new[:1], [3])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(5) == [new[2], new[1], old[1], old[0], new[0]]


class Heard:
    """An observer that writes down what it is reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_stored(self, sequence: SequenceState, first_block: int, parent_key: int | None, keys: Sequence[int]) -> None:
        raise AssertionError("the pool does not know whose blocks are stored")

    def on_removed(self, key: int) -> None:
        self.lines.append(f"removed {key}")

    def on_cleared(self) -> None:
        self.lines.append("cleared")


def test_an_observer_hears_of_each_copy_that_is_reused_and_of_a_reset_that_happens() -> None:
    heard = Heard()
    pool = BlockPool(3, heard)
    blocks = pool.allocate(3)
    pool.register(blocks[:2], [7, 7])
    assert not pool.reset_cache()
    pool.release(blocks)
    assert heard.lines == []
    pool.release(pool.allocate(3))
    assert heard.lines == ["removed 7", "removed 7"]
    assert pool.reset_cache()
    assert heard.lines[2:] == ["cleared"]


def test_blocks_in_use_cannot_be_reset() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.register(blocks, [5])
    assert not pool.reset_cache()
    pool.release(blocks)
    assert pool.reset_cache()
    assert pool.find([5], 1) == []


def test_more_than_the_free_blocks_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        BlockPool(2).allocate(3)


class PoolMachine(RuleBasedStateMachine):
    """Random sequences take prefixes and blocks and give them back; a naive count is kept beside."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[list[int]] = []

    @rule(family=st.integers(0, 2), length=st.integers(1, 6))
    def take(self, family: int, length: int) -> None:
        keys = [family * 100 + depth for depth in range(length)]
        hit = self.pool.find(keys, length - 1)
        needed = length - len(hit)
        if needed + self.pool.num_free_among(hit) > self.pool.num_free:
            return
        self.pool.take_cached(hit)
        blocks = hit + self.pool.allocate(needed)
        self.pool.register(blocks[len(hit) :], keys[len(hit) :])
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(number))

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_used == len({block for blocks in self.held for block in blocks})
        assert self.pool.num_used + self.pool.num_free == 12

    @invariant()
    def held_prefixes_are_whole(self) -> None:
        for blocks in self.held:
            assert len(set(blocks)) == len(blocks)

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.num_free == 12
        assert self.pool.reset_cache()


TestPoolMachine = PoolMachine.TestCase
