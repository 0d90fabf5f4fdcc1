"""When a batch is due, and what is in it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.embeddings.batching import BatchKey, BatchReason, BatchRules, PendingBatch, SentBatch
from gateway.embeddings.fair_queue import Piece
from tests.unit.embeddings.test_sizes import sizes
from tests.unit.scheduling.virtual_time import run

CALM = BatchRules(items=8, tokens=100, max_delay_seconds=0.005, slots=2)
COSTLY = replace(CALM, slots=8, overhead_seconds=0.02)
CROWDED = replace(CALM, crowded=True)
KEY = BatchKey("m", b"{", are_ids=False, isolation="", batch=False)


def piece(tokens: int = 2, items: int = 1, at: float = 100.0, **options: bool) -> Piece[Any]:
    return Piece(None, 0, items, tokens, 8, at, **options)


def pending(*pieces: Piece[Any], in_flight: int = 0, now: float = 100.0, bulk: bool = False) -> PendingBatch:
    """Batches in flight, then these pieces waiting."""
    made = PendingBatch(KEY._replace(bulk=bulk), sizes(64), lambda _: None)
    for _ in range(in_flight):
        made.join(piece(at=now - 10))
        assert made.take(now - 10, CALM)
    for each in pieces:
        made.join(each)
    return made


def items_of(batch: SentBatch) -> list[int]:
    return [each.items for each in batch.pieces]


def test_nothing_is_due_where_nothing_waits() -> None:
    empty = pending()
    assert empty.is_idle
    assert empty.due(100, CALM) is None
    assert empty.next_look_seconds(100, 0.005) is None


def test_idle_means_at_once_whatever_was_learned() -> None:
    assert pending(piece()).due(100, replace(CROWDED, overhead_seconds=9.0)) is BatchReason.IDLE


def test_a_slot_that_is_free_is_used() -> None:
    assert pending(piece(), in_flight=1).due(100, CALM) is BatchReason.SLOT


def test_without_a_free_slot_it_gathers_until_one_is_free_or_the_delay_is_over() -> None:
    waiting = pending(in_flight=1)
    waiting.join(piece(at=90.0))
    first = waiting.take(90.0, CALM)
    waiting.join(piece())
    assert waiting.due(100, CALM) is None
    assert waiting.next_look_seconds(100, 0.005) == pytest.approx(0.005)
    assert waiting.due(100.005, CALM) is BatchReason.DELAY
    waiting.ended(first)
    assert waiting.due(100, CALM) is BatchReason.SLOT


def test_a_full_budget_is_sent_at_once() -> None:
    assert pending(piece(items=8), in_flight=5).due(100, CALM) is BatchReason.FULL
    assert pending(piece(tokens=100), in_flight=5).due(100, CALM) is BatchReason.FULL


def test_while_others_wait_for_a_place_it_gathers_on() -> None:
    waiting = pending(piece(), in_flight=1)
    assert waiting.due(101, CROWDED) is None
    assert waiting.next_look_seconds(101, 0.005) == 0.005
    assert pending(piece(items=8), in_flight=1).due(101, CROWDED) is BatchReason.FULL


def test_a_free_slot_is_held_while_more_is_saved_than_the_delay_costs() -> None:
    rare = pending(piece(), in_flight=1)
    assert rare.due(100, COSTLY) is BatchReason.SLOT  # 10 a second x 20 ms: less than the one that waits
    often = pending(*(piece() for _ in range(3)), in_flight=1)
    for number in range(20):
        batch = often.take(99.9 + number / 1000, COSTLY)
        assert batch.pieces or number
        often.ended(batch)
        often.join(piece(at=99.9 + number / 1000))
    assert often.due(99.92, COSTLY) is None
    assert often.due(99.92 + CALM.max_delay_seconds, COSTLY) is BatchReason.DELAY


def test_holding_that_saves_nothing_is_given_up() -> None:
    """Two clients that each ask again when answered come at a high rate, and yet never together."""
    now, held = 100.0, 0
    two = pending(piece(), in_flight=1, now=now)
    for _ in range(100):
        now += 0.0005
        two.join(piece(at=now))
        if two.due(now, COSTLY) is None:
            held += 1
            now += CALM.max_delay_seconds
        two.ended(two.take(now, BatchRules(99, 9999, 0.005)))
    assert held < 20


def test_what_is_taken_is_in_flight_until_it_ended() -> None:
    waiting = pending(piece(), piece())
    batch = waiting.take(100, CALM)
    assert items_of(batch) == [1, 1]
    assert (waiting.in_flight, waiting.is_idle) == (1, False)
    waiting.ended(batch)
    assert waiting.is_idle


def test_long_lists_leave_a_quarter_of_the_slots() -> None:
    rules, sent = replace(CALM, items=64, tokens=8192), []
    made = pending(*(piece(32, 16, alone=True) for _ in range(9)), bulk=True)
    while made.has_slots():
        sent.append(made.take(100.0, rules))
    assert [batch.items for batch in sent] == [16, 16, 16]
    short = PendingBatch(KEY, made.sizes, lambda _: None)
    short.join(piece())
    assert short.has_slots()
    made.ended(sent[0])
    assert made.has_slots()


def test_a_list_as_long_as_all_slots_goes_when_no_other_is_there() -> None:
    rules = replace(CALM, items=64, tokens=8192)
    made = pending(*(piece(128, 64, alone=True) for _ in range(2)), bulk=True)
    assert made.has_slots()
    first = made.take(100.0, rules)
    assert not made.has_slots()
    made.ended(first)
    assert made.has_slots()
    assert made.sizes.bulk.items == 0


def test_it_looks_once_for_all_that_come_in_a_turn_of_the_loop() -> None:
    async def main() -> None:
        looks: list[PendingBatch] = []
        made = PendingBatch(KEY, sizes(64), looks.append)
        made.look_soon()
        made.look_soon()
        assert not made.is_idle
        await asyncio.sleep(0)
        assert looks == [made]
        made.looked()
        assert made.is_idle
        made.look_in(1.0)
        await asyncio.sleep(2.0)
        assert looks == [made, made]
        made.looked()
        made.look_in(1.0)
        made.looked()
        await asyncio.sleep(2.0)
        assert looks == [made, made]

    run(main())
