"""Tenants take turns by tokens; nobody is lost, and nobody comes twice."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.embeddings.batching import Lane
from gateway.embeddings.members import Part


def part(tokens: int = 8, tenant: str = "", items: int = 1, **options: object) -> Part:
    return Part(None, 0, items, tokens, 4 * tokens, tenant, **options)  # type: ignore[arg-type]


def lane(*parts: Part) -> Lane:
    made = Lane()
    for number, each in enumerate(parts):
        made.join(each, float(number))
    return made


def test_one_tenants_parts_come_in_order() -> None:
    parts = [part() for _ in range(5)]
    assert lane(*parts).take(3, 100) == parts[:3]


def test_a_batch_keeps_to_both_budgets_but_is_never_empty() -> None:
    assert len(lane(part(8), part(8), part(8)).take(10, 17)) == 2
    assert len(lane(part(8, items=3), part(8, items=3)).take(5, 100)) == 1
    assert len(lane(part(500), part(8)).take(10, 17)) == 1


def test_tenants_share_a_batch_by_tokens_and_not_by_requests() -> None:
    small, large = [part(8, "small") for _ in range(200)], [part(64, "large") for _ in range(200)]
    taken = lane(*large, *small).take(1000, 1024)
    by_tenant = {name: sum(each.tokens for each in taken if each.tenant == name) for name in ("small", "large")}
    assert abs(by_tenant["small"] - by_tenant["large"]) <= 64


def test_a_weight_counts() -> None:
    heavy = [part(8, "heavy", weight=3.0) for _ in range(400)]
    light = [part(8, "light", weight=1.0) for _ in range(400)]
    taken = lane(*light, *heavy).take(1000, 2048)
    assert sum(each.tenant == "heavy" for each in taken) / len(taken) > 0.7


def test_a_tiny_weight_ends_no_loop() -> None:
    taken = lane(*(part(4000, tenant, weight=1e-9) for tenant in "ab")).take(10, 10_000)
    assert len(taken) == 2


class Weight(float):
    """A weight that notes how often a round is counted with it."""

    rounds = 0

    def __rmul__(self, other: float) -> float:
        Weight.rounds += 1
        return other * float(self)


@pytest.mark.parametrize(("tenants", "tokens"), [(2, 250_000), (500, 250_000), (100, 8192)])
def test_rounds_in_which_nobody_can_afford_anything_are_passed_at_once(tenants: int, tokens: int) -> None:
    waiting = lane(*(part(tokens, f"t{n}", weight=Weight(0.02)) for n in range(tenants) for _ in range(2)))
    Weight.rounds = 0
    assert len(waiting.take(1, 1)) == 1
    assert Weight.rounds <= 4 * tenants


def one_by_one(parts: list[Part], batches: int, max_items: int, max_tokens: int) -> list[list[Part]]:
    """What these batches are, when each round is gone through, and credit is counted in fractions."""
    flows: dict[str, list[Part]] = {}
    credit: dict[str, Fraction] = {}
    for each in parts:
        flows.setdefault(each.tenant, []).append(each)
    made: list[list[Part]] = []
    while len(made) < batches and flows:
        taken: list[Part] = []
        while flows:
            tenant = next(iter(flows))
            first = flows[tenant][0]
            full = sum(p.items for p in taken) + first.items > max_items
            if taken and (full or sum(p.tokens for p in taken) + first.tokens > max_tokens or first.alone):
                break
            if first.tokens > credit.get(tenant, 0) and len(flows) > 1:
                credit[tenant] = credit.get(tenant, Fraction(0)) + 32 * Fraction(first.weight)
                if first.tokens > credit[tenant]:
                    flows[tenant] = flows.pop(tenant)
                    continue
            credit[tenant] = max(Fraction(0), credit.get(tenant, Fraction(0)) - first.tokens)
            taken.append(flows[tenant].pop(0))
            if not flows[tenant]:
                del flows[tenant], credit[tenant]
            elif flows[tenant][0].tokens > credit[tenant]:
                flows[tenant] = flows.pop(tenant)
            if first.alone:
                break
        made.append(taken)
    return made


WEIGHTS = dict(zip("abcde", (1.0, 0.25, 3.0, 1 / 64, 0.5), strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 9), st.sampled_from("abcde"), st.booleans()), max_size=30),
    st.integers(1, 64),
    st.integers(1, 3000),
)
def test_the_order_is_that_of_going_round_by_round(
    made: list[tuple[int, int, str, bool]], max_items: int, max_tokens: int
) -> None:
    parts = [part(tokens, name, items, alone=alone, weight=WEIGHTS[name]) for tokens, items, name, alone in made]
    waiting, count = lane(*parts), len(parts)
    taken = [waiting.take(max_items, max_tokens) for _ in range(count)]
    assert [batch for batch in taken if batch] == one_by_one(parts, count, max_items, max_tokens)


def test_what_must_be_alone_is() -> None:
    shared, alone, other = part(), part(alone=True), part()
    waiting = lane(shared, alone, other)
    assert [waiting.take(10, 100) for _ in range(3)] == [[shared], [alone], [other]]


def test_who_has_left_is_not_taken_and_leaves_once() -> None:
    parts = [part() for _ in range(3)]
    waiting = lane(*parts)
    assert waiting.leave(parts[0])
    assert not waiting.leave(parts[0])
    assert waiting.oldest_seconds == 1.0
    assert waiting.take(10, 100) == parts[1:]
    assert not waiting.leave(parts[1])


SOME = st.tuples(st.integers(1, 900), st.integers(1, 70), st.sampled_from("abc"), st.booleans())


@given(st.lists(SOME), st.lists(st.integers(0, 30)), st.integers(1, 64), st.integers(1, 1000))
def test_every_part_is_taken_or_leaves_exactly_once(
    made: list[tuple[int, int, str, bool]], leavers: list[int], max_items: int, max_tokens: int
) -> None:
    parts = [part(tokens, tenant, items, alone=alone) for tokens, items, tenant, alone in made]
    waiting = lane(*parts)
    left = [parts[number] for number in leavers if number < len(parts) and waiting.leave(parts[number])]
    taken: list[Part] = []
    while len(waiting):
        batch = waiting.take(max_items, max_tokens)
        assert batch
        assert len(batch) == 1 or sum(each.items for each in batch) <= max_items
        assert len(batch) == 1 or sum(each.tokens for each in batch) <= max_tokens
        assert len(batch) == 1 or not any(each.alone for each in batch)
        taken += batch
    assert (waiting.items, waiting.tokens, waiting.next_items) == (0, 0, 0)
    assert sorted(map(id, taken + left)) == sorted(map(id, parts))
    for tenant in "abc":
        mine = [each for each in parts if each.tenant == tenant and each not in left]
        assert [each for each in taken if each.tenant == tenant] == mine
