from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.features.exact import events as module
from gateway.features.exact.events import Cleared, Ledger, Removed, Stored
from gateway.features.exact.index import packed, token_keys, token_seed
from tests.unit.exact.publisher import Cache, digest

SIZE = 4


def keys_of(tokens: Sequence[int], lora: str | None = None, salt: str | None = None, size: int = SIZE) -> list[int]:
    return list(token_keys(packed(tokens), size, token_seed(lora, salt)))


def store(hashes: list[int | bytes], tokens: Sequence[int], parent: int | None = None, **more: Any) -> Stored:
    return Stored(**{
        "block_hashes": hashes, "parent_block_hash": parent, "token_ids": list(tokens), "block_size": SIZE,
        "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention", **more,
    })  # fmt: skip


def remove(*hashes: int | bytes, medium: str | None = "GPU", group: int | None = 0) -> Removed:
    return Removed(list(hashes), medium, group)


def held(ledger: Ledger, before: frozenset[int] = frozenset()) -> frozenset[int]:
    """What a reader of the changes thinks is held."""
    _, added, removed = ledger.take()
    assert not set(added) & set(removed)
    return before - frozenset(removed) | frozenset(added)


def event_of(document: dict[str, Any]) -> Stored | Removed | Cleared:
    kinds = {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}
    kind = kinds[document["type"]]
    known = {name: document[name] for name in kind.__struct_fields__ if name in document}
    return kind(**known)


def test_a_prompts_blocks_get_the_keys_of_its_tokens() -> None:
    ledger = Ledger()
    ledger.update(store([11, 12], range(8)))
    ledger.update(store([13], range(8, 12), 12))
    assert held(ledger) == set(keys_of(range(12)))
    assert (ledger.resident_blocks, ledger.resident_tokens, ledger.block_tokens) == (3, 12, SIZE)


def test_a_removed_block_is_taken_off_and_its_successors_stay() -> None:
    ledger = Ledger()
    ledger.update(store([11, 12, 13], range(12)))
    known = held(ledger)
    ledger.update(remove(12))
    assert held(ledger, known) == set(keys_of(range(12))) - {keys_of(range(12))[1]}
    ledger.update(remove(99, b"unknown"))
    assert ledger.resident_blocks == 2


def test_a_block_is_gone_with_its_last_copy() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.update(store([11], range(4)))
    known = held(ledger)
    assert ledger.resident_blocks == 1
    for _ in range(2):
        ledger.update(remove(11))
        known = held(ledger, known)
        assert known == set(keys_of(range(4)))
    ledger.update(remove(11))
    assert held(ledger, known) == set()
    assert ledger.resident_blocks == 0


def test_blocks_that_are_reported_again_as_reused_are_no_copies() -> None:
    ledger = Ledger()
    ledger.update(store([11, 12, 13], range(12)))
    ledger.update(store([11, 12], range(8)))
    ledger.update(remove(12))
    assert held(ledger) == {keys_of(range(12))[0], keys_of(range(12))[2]}
    ledger.update(store([11, 12, 13], range(12)))  # 12 was computed again, and so was 13 that follows it
    ledger.update(remove(13))
    assert ledger.resident_blocks == 3


def test_fullness_is_the_share_of_the_cache_that_known_blocks_take() -> None:
    ledger = Ledger()
    ledger.update(store([11, 12], range(8)))
    ledger.update(store([12], range(4, 8), 11))
    ledger.update(store([20], range(4), 19))
    assert ledger.fullness == 0.0
    ledger.capacity_tokens = 6 * SIZE
    assert ledger.fullness == 0.5


def test_an_account_beyond_the_cache_stops_counting_copies() -> None:
    ledger = Ledger(capacity_tokens=10 * SIZE)
    for _ in range(20):  # whatever they are, they are no copies
        ledger.update(store([11], range(4)))
    assert held(ledger) == set(keys_of(range(4)))
    ledger.update(remove(11))
    assert ledger.resident_blocks == 0


def test_an_account_far_beyond_the_cache_is_dropped() -> None:
    ledger = Ledger(capacity_tokens=2 * SIZE)
    for number in range(13):
        ledger.update(store([number], range(number, number + 4)))
    cleared, _, removed = ledger.take()
    assert not cleared  # by the engine
    assert set(removed) >= set(keys_of(range(4)))
    assert (ledger.resident_blocks, ledger.overflows) == (0, 1)


def test_a_view_that_is_dropped_is_no_news_of_the_engine() -> None:
    ledger = Ledger()
    ledger.update(store([11, 12], range(8)))
    known = held(ledger)
    ledger.drop()
    assert ledger.resident_blocks == 0
    assert ledger.take() == (False, [], sorted(known, key=keys_of(range(8)).index))


def test_two_hashes_may_have_one_key() -> None:
    ledger = Ledger()
    ledger.update(store([11], range(4)))
    ledger.update(store([b"another"], range(4)))
    known = held(ledger)
    ledger.update(remove(11))
    assert held(ledger, known) == known
    ledger.update(remove(b"another"))
    assert held(ledger, known) == set()


def test_blocks_of_an_unknown_parent_are_orphans_until_their_prefix_is_known() -> None:
    ledger = Ledger()
    ledger.update(store([12, 13], range(4, 12), 11))
    assert held(ledger) == set()
    assert (ledger.orphans, ledger.resident_blocks) == (2, 2)
    ledger.update(store([14], range(12, 16), 13))  # an orphan's child
    assert ledger.orphans == 3
    ledger.update(store([11, 12], range(8)))
    assert held(ledger) == set(keys_of(range(8)))
    assert (ledger.orphans, ledger.resident_blocks) == (2, 4)
    ledger.update(remove(13, 14))
    assert (ledger.orphans, ledger.resident_blocks) == (0, 2)


def test_a_block_stored_and_removed_between_two_takes_is_removed() -> None:
    ledger = Ledger()
    ledger.update(store([11], range(4)))
    ledger.update(remove(11))
    assert ledger.take() == (False, [], keys_of(range(4)))


def test_a_reset_lists_every_removed_key() -> None:
    ledger = Ledger()
    ledger.update(store([11, 12], range(8)))
    known = held(ledger)
    ledger.update(Cleared())
    ledger.update(store([11], range(4)))
    cleared, added, removed = ledger.take()
    assert cleared
    assert known - set(removed) | set(added) == set(keys_of(range(4)))
    assert ledger.resident_blocks == 1
    assert ledger.pending == 0


def test_an_adapter_and_a_salt_begin_another_chain() -> None:
    ledger = Ledger()
    ledger.update(store([1, 2], range(8), lora_name="ad", extra_keys=[["ad", "pepper"], ["ad"]]))
    ledger.update(store([3], range(8, 12), 2, lora_name="ad", extra_keys=[["ad"]]))
    ledger.update(store([4], range(4), extra_keys=[["pepper"]]))
    ledger.update(store([5], range(4), lora_name="same", extra_keys=[["same", "same"]]))
    wanted = keys_of(range(12), "ad", "pepper") + keys_of(range(4), None, "pepper") + keys_of(range(4), "same", "same")
    assert held(ledger) == set(wanted)


def test_media_and_embeddings_change_the_chain_from_their_block_on() -> None:
    ledger = Ledger()
    ledger.update(store([1, 2, 3], range(12), extra_keys=[None, [["cat.png", 2]], [["cat.png", -2]]]))
    ledger.update(store([4, 5], range(4, 12), 1, extra_keys=[[["dog.png", 2]], None]))
    ledger.update(store([6], range(4, 8), 1, extra_keys=[[b"digest"]]))
    plain = keys_of(range(12))
    known = held(ledger)
    assert len(known) == 6
    assert known & set(plain) == {plain[0]}
    ledger.update(store([7], range(12, 16), 3))
    again = Ledger()
    again.update(store([1, 2], range(8), extra_keys=[None, [["cat.png", 2]]]))
    again.update(store([3, 7], range(8, 16), 2, extra_keys=[[["cat.png", -2]], None]))
    assert held(again) <= held(ledger, known)


@pytest.mark.parametrize(
    "event",
    [
        store([1], range(4), medium="CPU"),
        store([1], range(4), medium="STORAGE"),
        store([1], range(4), kv_cache_spec_kind="sliding_window"),
        store([1], range(4), kv_cache_spec_kind="mamba"),
        store([1], range(4), group_idx=1),
        store([1], range(8)),
        store([1], [], block_size=0),
        store([1], range(2), block_size=2),
        store([1], [1, 2, 3, -4]),
        store([1], [1, 2, 3, 1 << 40]),
        store([1, 2], range(8), extra_keys=[["salt"]]),
    ],
)
def test_what_proves_no_prefix_in_gpu_memory_is_ignored(event: Stored) -> None:
    ledger = Ledger()
    ledger.update(store([100], range(50, 54)))
    ledger.update(event)
    assert ledger.resident_blocks == 1
    assert ledger.ignored_events == 1


@pytest.mark.parametrize("event", [remove(100, medium="CPU"), remove(100, group=1)])
def test_removals_elsewhere_are_ignored(event: Removed) -> None:
    ledger = Ledger()
    ledger.update(store([100], range(4)))
    ledger.update(event)
    assert (ledger.resident_blocks, ledger.ignored_events) == (1, 1)


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_the_first_group_with_full_attention_speaks_for_all(kind: str | None) -> None:
    ledger = Ledger()
    ledger.update(store([1], range(4), group_idx=0, kv_cache_spec_kind="sliding_window"))
    ledger.update(store([1], range(4), group_idx=2, kv_cache_spec_kind=kind))
    ledger.update(store([1], range(4), group_idx=3, kv_cache_spec_kind=kind))
    ledger.update(remove(1, group=0))
    ledger.update(remove(1, group=3))
    assert held(ledger) == set(keys_of(range(4)))
    ledger.update(remove(1, group=2))
    assert ledger.resident_blocks == 0


def test_an_engine_that_names_no_group_and_no_medium_is_understood() -> None:
    ledger = Ledger()
    ledger.update(store([1], range(4), group_idx=None, kv_cache_spec_kind=None, medium=None))
    assert ledger.resident_blocks == 1
    ledger.update(remove(1, group=None, medium=None))
    assert ledger.resident_blocks == 0


def test_larger_blocks_than_those_seen_are_the_engines() -> None:
    ledger = Ledger()
    ledger.update(store([1], range(2), block_size=2))
    ledger.update(store([2], range(4)))
    assert (ledger.block_tokens, ledger.resident_blocks) == (4, 1)


def test_another_process_may_have_other_blocks_and_groups() -> None:
    ledger = Ledger()
    ledger.update(store([1], range(4)))
    ledger.forget()
    ledger.update(store([1], range(2), block_size=2, group_idx=1))
    assert ledger.resident_blocks == 1
    assert held(ledger) == set(keys_of(range(2), size=2))


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@settings(max_examples=200)
@given(st.lists(st.one_of(PROMPTS, st.none()), max_size=30), st.integers(2, 12), st.integers(1, 5))
def test_the_keys_are_those_of_what_an_engine_holds(
    prompts: list[list[int] | None], capacity: int, take_every: int
) -> None:
    cache, ledger, known = Cache(capacity, SIZE), Ledger(), frozenset[int]()
    for number, prompt in enumerate(prompts):
        for document in cache.reset() if prompt is None else cache.serve(prompt):
            ledger.update(event_of(document))
        if number % take_every == 0:
            known = held(ledger, known)
    known = held(ledger, known)
    assert known == {keys_of(prefix)[-1] for prefix in cache.prefixes}
    assert ledger.resident_blocks == len(cache.prefixes)
    assert ledger.orphans == 0


class CopiesMachine(RuleBasedStateMachine):
    """An engine that keeps any number of copies of each block, of which any may go at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.copies = Counter[tuple[int, ...]]()
        self.known = frozenset[int]()

    @rule(prompt=PROMPTS)
    def stores(self, prompt: list[int]) -> None:
        prefixes = [tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]
        first = next((n for n, prefix in enumerate(prefixes) if prefix not in self.copies), len(prefixes))
        first = max(0, min(first, (len(prompt) - 1) // SIZE))  # the last token is always computed
        new = prefixes[first:]
        if new:
            parent = digest(prefixes[first - 1]) if first else None
            self.ledger.update(
                store([digest(prefix) for prefix in new], prompt[first * SIZE : len(prefixes) * SIZE], parent)
            )
            self.copies.update(new)

    @rule(data=st.data())
    def reports(self, data: st.DataObject) -> None:
        if held := sorted(prefix for prefix in self.copies if self._leads_to(prefix) and len(prefix) > SIZE):
            prompt = data.draw(st.sampled_from(held))
            hashes: list[int | bytes] = [digest(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]
            self.ledger.update(store(hashes, prompt))

    def _leads_to(self, prefix: tuple[int, ...]) -> bool:
        return all(prefix[:end] in self.copies for end in range(SIZE, len(prefix) + 1, SIZE))

    @rule(data=st.data())
    def evicts(self, data: st.DataObject) -> None:
        if self.copies:
            prefix = data.draw(st.sampled_from(sorted(self.copies)))
            self.ledger.update(remove(digest(prefix)))
            self.copies[prefix] -= 1
            self.copies += Counter()

    @rule()
    def is_read(self) -> None:
        self.known = held(self.ledger, self.known)
        assert self.known == {keys_of(prefix)[-1] for prefix in self.copies}

    @invariant()
    def counts_each_block_once(self) -> None:
        assert self.ledger.resident_blocks == len(self.copies)


TestCopies = CopiesMachine.TestCase


@pytest.mark.parametrize("capacity_tokens", [None, 10**15])
def test_what_is_kept_of_an_engine_is_bounded_whatever_size_it_tells(
    capacity_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BLOCKS", 1000)
    ledger, most = Ledger(capacity_tokens), 0
    for number in range(300):
        first = number * 10
        ledger.update(store(list(range(first, first + 10)), range(first * SIZE, (first + 10) * SIZE)))
        most = max(most, ledger.resident_blocks)
    assert most == 1000
    assert ledger.overflows == 2


def test_copies_are_counted_of_so_many_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COPIED_BLOCKS", 100)
    ledger = Ledger()
    for _ in range(2):
        for number in range(500):
            ledger.update(store([number], range(number * SIZE, (number + 1) * SIZE)))
    assert len(ledger._more_copies) <= 101
    assert ledger.resident_blocks == 500


def test_dropping_a_large_view_makes_no_large_table_of_its_keys() -> None:
    """It would be grown at once, which holds the interpreter: 2 million keys took 640 ms."""
    ledger = Ledger()
    ledger.update(store(list(range(5000)), range(5000 * SIZE)))
    known = held(ledger)
    ledger.drop()
    assert ledger._changes == {}
    assert held(ledger, known) == frozenset()
