"""Tenants take turns by tokens and weight; no piece is lost, and none is taken twice."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.embeddings.batching import FairQueue
from gateway.features.embeddings.waiter import Piece


def piece(tokens: int = 8, tenant: str = "", items: int = 1, weight: float = 1.0, alone: bool = False) -> Piece:
    return Piece(cast(Any, None), 0, items, tokens, 4 * tokens, 0.0, tenant, weight, alone)


def queue(*pieces: Piece) -> FairQueue:
    made = FairQueue()
    for number, each in enumerate(pieces):
        each.joined_seconds = float(number)
        made.join(each)
    return made


def test_pieces_that_look_the_same_are_two() -> None:
    one, other = piece(), piece()
    assert one != other
    assert len({one, other}) == 2


def test_one_tenants_pieces_come_in_order() -> None:
    pieces = [piece() for _ in range(5)]
    assert queue(*pieces).take(3, 100) == pieces[:3]


def test_a_batch_keeps_to_both_budgets_but_is_never_empty() -> None:
    assert len(queue(piece(8), piece(8), piece(8)).take(10, 17)) == 2
    assert len(queue(piece(8, items=3), piece(8, items=3)).take(5, 100)) == 1
    assert len(queue(piece(500), piece(8)).take(10, 17)) == 1


def test_tenants_share_a_batch_by_tokens_and_not_by_requests() -> None:
    small, large = [piece(8, "small") for _ in range(200)], [piece(64, "large") for _ in range(200)]
    taken = queue(*large, *small).take(1000, 1024)
    by_tenant = {name: sum(each.tokens for each in taken if each.tenant == name) for name in ("small", "large")}
    assert abs(by_tenant["small"] - by_tenant["large"]) <= 64


def test_a_weight_counts() -> None:
    heavy = [piece(8, "heavy", weight=3.0) for _ in range(400)]
    light = [piece(8, "light", weight=1.0) for _ in range(400)]
    taken = queue(*light, *heavy).take(1000, 2048)
    assert sum(each.tenant == "heavy" for each in taken) / len(taken) > 0.7


def test_a_tiny_weight_delays_no_other_work() -> None:
    taken = queue(*(piece(4000, tenant, weight=1e-9) for tenant in "ab")).take(10, 10_000)
    assert len(taken) == 2


def test_a_large_piece_delays_its_tenant_by_its_tokens() -> None:
    large = [piece(800, "large"), piece(8, "large")]
    small = [piece(8, "small") for _ in range(200)]
    taken = queue(*large, *small).take(1000, 10_000)
    assert taken[0] is large[0]
    assert taken.index(large[1]) == 101


def test_a_tenant_whose_pieces_come_one_by_one_is_not_ahead_of_others() -> None:
    waiting = queue(*(piece(8, "many") for _ in range(200)), piece(400, "one"))
    tokens = {"many": 0, "one": 0}
    for _ in range(100):
        [taken] = waiting.take(1, 1)
        tokens[taken.tenant] += taken.tokens
        if taken.tenant == "one":
            waiting.join(piece(400, "one"))
    assert abs(tokens["many"] - tokens["one"]) <= 400


def test_a_tenant_that_comes_later_is_owed_nothing_for_the_time_before() -> None:
    waiting = queue(*(piece(8, "early") for _ in range(100)))
    waiting.take(40, 10_000)
    for _ in range(100):
        waiting.join(piece(8, "late"))
    taken = waiting.take(40, 10_000)
    assert sum(each.tenant == "late" for each in taken) == 20


TURNS = st.tuples(st.integers(1, 900), st.sampled_from("abcde"))
WEIGHTS = dict(zip("abcde", (1.0, 0.25, 3.0, 1 / 64, 0.5), strict=True))


@given(st.lists(TURNS, max_size=30))
def test_pieces_come_by_the_tokens_that_their_tenants_were_given_before(made: list[tuple[int, str]]) -> None:
    pieces = [piece(tokens, name, weight=WEIGHTS[name]) for tokens, name in made]
    waiting, given_before = queue(*pieces), dict.fromkeys("abcde", 0.0)
    order = list(dict.fromkeys(name for _, name in made))
    left = {name: [each for each in pieces if each.tenant == name] for name in order}
    while len(waiting):
        expected = min((name for name in order if left[name]), key=lambda name: (given_before[name], order.index(name)))
        [taken] = waiting.take(1, 1)
        assert taken is left[expected].pop(0)
        given_before[expected] += taken.tokens / taken.weight


def test_tenants_that_left_are_forgotten() -> None:
    waiting = queue(piece(8, "stays"), piece(8, "stays"))
    for number in range(3000):
        passing = piece(8, f"t{number}")
        waiting.join(passing)
        assert waiting.leave(passing)
    assert len(waiting._tenants) <= 1024
    waiting.take(10, 100)
    assert len(waiting._tenants) == 0


def test_a_changed_weight_counts_from_then_on() -> None:
    waiting = queue(piece(8, "b"), piece(8, "a", weight=1.0))
    [first] = waiting.take(1, 1)
    assert first.tenant == "b"
    for _ in range(400):
        waiting.join(piece(8, "b", weight=3.0))
        waiting.join(piece(8, "a", weight=1.0))
    taken = waiting.take(200, 10_000)
    assert sum(each.tenant == "b" for each in taken) / len(taken) > 0.7


def test_what_must_be_alone_is() -> None:
    shared, alone, other = piece(), piece(alone=True), piece()
    waiting = queue(shared, alone, other)
    assert [waiting.take(10, 100) for _ in range(3)] == [[shared], [alone], [other]]


def test_a_piece_that_left_is_not_taken_and_leaves_once() -> None:
    pieces = [piece() for _ in range(3)]
    waiting = queue(*pieces)
    assert waiting.leave(pieces[0])
    assert not waiting.leave(pieces[0])
    assert waiting.oldest_seconds == 1.0
    assert waiting.take(10, 100) == pieces[1:]
    assert not waiting.leave(pieces[1])


SOME = st.tuples(st.integers(1, 900), st.integers(1, 70), st.sampled_from("abc"), st.booleans())


@given(st.lists(SOME), st.lists(st.integers(0, 30)), st.integers(1, 64), st.integers(1, 1000))
def test_every_piece_is_taken_or_leaves_exactly_once(
    made: list[tuple[int, int, str, bool]], leavers: list[int], max_items: int, max_tokens: int
) -> None:
    pieces = [piece(tokens, tenant, items, alone=alone) for tokens, items, tenant, alone in made]
    waiting = queue(*pieces)
    left = [pieces[number] for number in leavers if number < len(pieces) and waiting.leave(pieces[number])]
    taken: list[Piece] = []
    while len(waiting):
        batch = waiting.take(max_items, max_tokens)
        assert batch
        assert len(batch) == 1 or sum(each.items for each in batch) <= max_items
        assert len(batch) == 1 or sum(each.tokens for each in batch) <= max_tokens
        assert len(batch) == 1 or not any(each.alone for each in batch)
        taken += batch
    assert (waiting.items, waiting.tokens, len(waiting)) == (0, 0, 0)
    assert sorted(map(id, taken + left)) == sorted(map(id, pieces))
    for tenant in "abc":
        mine = [each for each in pieces if each.tenant == tenant and each not in left]
        assert [each for each in taken if each.tenant == tenant] == mine
