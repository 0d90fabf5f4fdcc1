"""Long lists are cut without losing or reordering anything; shares add up."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.embeddings.batching import ModelSizes
from gateway.features.embeddings.wire import shares


def pieces(tokens: list[int], max_items: int, most: int, max_tokens: int, replicas: int = 1) -> list[range]:
    sizes = ModelSizes()
    sizes.cap, sizes.limit, sizes.replicas = 4 * max_items, most, replicas
    return sizes.cut(tokens, max_items, max_tokens)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(1, 64), st.integers(1, 2000), st.integers(1, 8)
)
def test_pieces_are_the_list_in_order_and_keep_to_the_budget(
    tokens: list[int], max_items: int, max_tokens: int, replicas: int
) -> None:
    cut = pieces(tokens, max_items, max_items, max_tokens, replicas)
    assert [number for each in cut for number in each] == list(range(len(tokens)))
    for each in cut:
        assert 1 <= len(each) <= max_items
        assert len(each) == 1 or sum(tokens[each.start : each.stop]) <= max_tokens


def test_what_keeps_to_the_budget_is_not_cut() -> None:
    assert pieces([5] * 64, 64, 8, 8192, 4) == [range(64)]
    assert pieces([9000], 64, 8, 8192, 4) == [range(1)]


def test_what_is_cut_is_cut_for_every_replica_and_evenly() -> None:
    assert [len(each) for each in pieces([5] * 80, 64, 64, 8192, 4)] == [20] * 4
    assert [len(each) for each in pieces([5] * 2048, 64, 64, 8192, 2)] == [64] * 32
    assert [len(each) for each in pieces([5] * 65, 64, 16, 8192)] == [13] * 5


@given(st.integers(0, 10_000), st.lists(st.floats(0, 1000), min_size=1, max_size=64))
def test_shares_are_whole_and_add_up(total: int, weights: list[float]) -> None:
    parts = shares(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    for share, weight in zip(parts, weights, strict=True):
        exact = total * weight / whole if whole else total / len(weights)
        assert abs(share - exact) < 1 + 1e-6
