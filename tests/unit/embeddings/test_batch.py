"""When a batch is due."""

from gateway.embeddings.batching import BatchReason, Budget, Gathering, Surroundings
from gateway.embeddings.members import Part

BUDGET = Budget(items=8, tokens=100, max_delay_seconds=0.005)
CALM = Surroundings(slots=2)


def part(tokens: int = 2, items: int = 1) -> Part:
    return Part(None, 0, items, tokens, 8)


def gathering(*parts: Part, under_way: int = 0, now: float = 100.0) -> Gathering:
    """Batches under way, then these parts waiting."""
    made = Gathering()
    for _ in range(under_way):
        made.join(part(), now - 10)
        assert made.take(now - 10, BUDGET, 0.0)
    for each in parts:
        made.join(each, now)
    return made


def test_nothing_is_due_where_nothing_waits() -> None:
    empty = gathering()
    assert empty.quiet
    assert empty.due(100, BUDGET, CALM) is None
    assert empty.look_again_seconds(100, BUDGET) is None


def test_idle_means_at_once_whatever_was_learned() -> None:
    assert gathering(part()).due(100, BUDGET, Surroundings(2, overhead_seconds=9.0, crowded=True)) is BatchReason.IDLE


def test_a_slot_that_is_free_is_used() -> None:
    assert gathering(part(), under_way=1).due(100, BUDGET, CALM) is BatchReason.SLOT


def test_without_a_free_slot_it_gathers_until_one_is_free_or_the_delay_is_over() -> None:
    waiting = gathering(part(), under_way=2)
    assert waiting.due(100, BUDGET, CALM) is None
    assert waiting.look_again_seconds(100, BUDGET) == 100.005
    assert waiting.due(100.005, BUDGET, CALM) is BatchReason.DELAY
    waiting.ended()
    assert waiting.due(100, BUDGET, CALM) is BatchReason.SLOT


def test_a_full_budget_is_sent_at_once() -> None:
    assert gathering(part(items=8), under_way=5).due(100, BUDGET, CALM) is BatchReason.FULL
    assert gathering(part(tokens=100), under_way=5).due(100, BUDGET, CALM) is BatchReason.FULL


def test_while_others_wait_for_a_place_it_gathers_on() -> None:
    waiting = gathering(part(), under_way=1)
    assert waiting.due(101, BUDGET, Surroundings(2, crowded=True)) is None
    assert waiting.look_again_seconds(101, BUDGET) == 101.005
    assert gathering(part(items=8), under_way=1).due(101, BUDGET, Surroundings(2, crowded=True)) is BatchReason.FULL


def test_a_free_slot_is_held_while_more_is_saved_than_the_delay_costs() -> None:
    costly = Surroundings(8, overhead_seconds=0.02)
    rare = gathering(part(), under_way=1)
    assert rare.due(100, BUDGET, costly) is BatchReason.SLOT  # 10 a second x 20 ms: less than the one that waits
    often = gathering(*(part() for _ in range(3)), under_way=1)
    for number in range(20):
        assert len(often.take(99.9 + number / 1000, BUDGET, 0.02)) or number
        often.ended()
        often.join(part(), 99.9 + number / 1000)
    assert often.due(99.92, BUDGET, costly) is None
    assert often.due(99.92 + BUDGET.max_delay_seconds, BUDGET, costly) is BatchReason.DELAY


def test_holding_that_brings_nobody_is_given_up() -> None:
    """Two clients that each ask again when answered come at a high rate, and yet never together."""
    costly, now, held = Surroundings(8, overhead_seconds=0.02), 100.0, 0
    two = gathering(part(), under_way=1, now=now)
    for _ in range(100):
        now += 0.0005
        two.join(part(), now)
        if two.due(now, BUDGET, costly) is None:
            held += 1
            now += BUDGET.max_delay_seconds
        two.take(now, Budget(99, 9999, 0.005), 0.0)
        two.ended()
    assert held < 20


def test_what_is_taken_is_under_way_until_it_ended() -> None:
    waiting = gathering(part(), part())
    assert len(waiting.take(100, BUDGET, 0.0)) == 2
    assert (waiting.in_flight, waiting.quiet) == (1, False)
    waiting.ended()
    assert waiting.quiet
