"""When a batch is due, and what is in it."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from gateway.config import EmbeddingsConfig
from gateway.features.embeddings.batching import BatchKey, BatchReason, ModelSizes, PendingBatch, SentBatch
from gateway.features.embeddings.waiter import Piece
from tests.unit.scheduling.virtual_time import run

KEY = BatchKey("m", b"{")
DELAY = 0.005


@dataclass
class Sizes:
    """What is known of the model: `slots` batches keep it busy."""

    limit: int = 8
    slots: int = 2
    overhead_seconds: float = 0.0

    def bounds(self, config: EmbeddingsConfig, *, offline: bool) -> tuple[int, int]:
        assert not offline
        return config.max_batch_items, config.max_batch_tokens


COSTLY = Sizes(slots=8, overhead_seconds=0.02)


def piece(tokens: int = 2, items: int = 1, at: float = 100.0, **options: bool) -> Piece:
    return Piece(cast(Any, None), 0, items, tokens, 8, at, **options)


def pending(*pieces: Piece, in_flight: int = 0, now: float = 100.0, sizes: Sizes | None = None) -> PendingBatch:
    """Batches in flight, then these pieces waiting."""
    config = EmbeddingsConfig(max_batch_items=64, max_batch_tokens=100, max_delay_seconds=DELAY)
    known = cast(ModelSizes, sizes or Sizes())
    made = PendingBatch(KEY, kind=cast(Any, None), sizes=known, config=config, look=lambda _: None)
    for _ in range(in_flight):
        made.join(piece(at=now - 10))
        assert made.take(now - 10)
    for each in pieces:
        made.join(each)
    return made


def items_of(batch: SentBatch) -> list[int]:
    return [each.items for each in batch.pieces]


def test_nothing_is_due_where_nothing_waits() -> None:
    empty = pending()
    assert empty.is_idle
    assert empty.next_items == 0
    assert empty.due(100, crowded=False) is None


def test_idle_means_at_once_whatever_was_learned() -> None:
    assert pending(piece(), sizes=Sizes(overhead_seconds=9.0)).due(100, crowded=True) is BatchReason.IDLE


def test_a_slot_that_is_free_is_used() -> None:
    assert pending(piece(), in_flight=1).due(100, crowded=False) is BatchReason.SLOT


def test_without_a_free_slot_it_gathers_until_one_is_free_or_the_delay_is_over() -> None:
    waiting = pending(in_flight=1)
    waiting.join(piece(at=90.0))
    waiting.take(90.0)
    waiting.join(piece())
    assert waiting.due(100, crowded=False) is None
    assert waiting.due(100 + DELAY, crowded=False) is BatchReason.DELAY
    waiting.ended()
    assert waiting.due(100, crowded=False) is BatchReason.SLOT


def test_a_full_budget_is_sent_at_once() -> None:
    assert pending(piece(items=8), in_flight=5).due(100, crowded=False) is BatchReason.FULL
    assert pending(piece(tokens=100), in_flight=5).due(100, crowded=False) is BatchReason.FULL


def test_a_piece_that_shares_its_batch_with_no_other_is_sent_at_once() -> None:
    assert pending(piece(alone=True), in_flight=5).due(100, crowded=True) is BatchReason.FULL


def test_while_others_wait_for_a_place_it_gathers_on() -> None:
    waiting = pending(piece(), in_flight=1)
    assert waiting.due(101, crowded=True) is None
    assert pending(piece(items=8), in_flight=1).due(101, crowded=True) is BatchReason.FULL


def test_a_free_slot_is_held_while_more_is_saved_than_the_delay_costs() -> None:
    rare = pending(piece(), in_flight=1, sizes=COSTLY)
    assert rare.due(100, crowded=False) is BatchReason.SLOT  # 10 a second x 20 ms: less than the one that waits
    often = pending(*(piece() for _ in range(3)), in_flight=1, sizes=COSTLY)
    for number in range(20):
        batch = often.take(99.9 + number / 1000)
        assert batch.pieces or number
        often.ended()
        often.join(piece(at=99.9 + number / 1000))
    assert often.due(99.92, crowded=False) is None
    assert often.due(99.92 + DELAY, crowded=False) is BatchReason.DELAY


def test_holding_that_saves_nothing_is_given_up() -> None:
    """Two clients that each ask again when answered come at a high rate, and yet never together."""
    now, held, sizes = 100.0, 0, Sizes(slots=8, overhead_seconds=0.02)
    two = pending(piece(), in_flight=1, now=now, sizes=sizes)
    for _ in range(100):
        now += 0.0005
        two.join(piece(at=now))
        sizes.overhead_seconds = 0.02
        if two.due(now, crowded=False) is None:
            held += 1
            now += DELAY
        sizes.overhead_seconds = 0.0
        two.take(now)
        two.ended()
    assert held < 20


def test_what_is_taken_is_in_flight_until_it_ended() -> None:
    waiting = pending(piece(), piece())
    batch = waiting.take(100)
    assert items_of(batch) == [1, 1]
    assert (waiting.in_flight, waiting.is_idle) == (1, False)
    waiting.ended()
    assert waiting.is_idle


def test_no_more_is_taken_than_slots_are_left() -> None:
    waiting = pending(*(piece(items=2) for _ in range(5)))
    assert items_of(waiting.take(100, 5)) == [2, 2]
    assert items_of(waiting.take(100)) == [2, 2, 2]


def test_it_looks_once_for_all_that_come_in_a_turn_of_the_loop() -> None:
    async def main() -> None:
        looks: list[PendingBatch] = []
        config = EmbeddingsConfig(max_delay_seconds=0.1)
        made = PendingBatch(
            KEY, kind=cast(Any, None), sizes=cast(ModelSizes, Sizes()), config=config, look=looks.append
        )
        made.look_soon()
        made.look_soon()
        assert not made.is_idle
        await asyncio.sleep(0)
        assert looks == [made]
        made.looked()
        assert made.is_idle
        made.look_later(100.0)
        await asyncio.sleep(1.0)
        assert looks == [made], "nothing waits"
        made.join(piece(at=100.0))
        made.look_later(100.0)
        await asyncio.sleep(1.0)
        assert looks == [made, made]
        made.looked()
        made.look_later(100.0)
        made.looked()
        await asyncio.sleep(1.0)
        assert looks == [made, made]

    run(main())


@pytest.mark.parametrize(("now", "seconds"), [(100.0, 0.005), (100.003, 0.002), (100.0048, 0.005), (105.0, 0.005)])
def test_it_looks_again_when_the_delay_is_over_and_from_then_on_every_so_often(now: float, seconds: float) -> None:
    async def main() -> None:
        loop, looks = asyncio.get_running_loop(), list[float]()
        made = pending(piece())
        made.look = lambda _: looks.append(loop.time())
        began = loop.time()
        made.look_later(now)
        await asyncio.sleep(1.0)
        assert looks == [pytest.approx(began + seconds)]

    run(main())
