"""No arm gains from its place among the turns."""

from loadtest.compare.run import turn_order

ARMS = ["gateway", "smg", "nginx", "haproxy", "litellm"]


def test_every_repetition_has_every_arm_once() -> None:
    orders = turn_order(ARMS, 4, seed=1)
    assert len(orders) == 4
    assert all(sorted(order) == sorted(ARMS) for order in orders)


def test_no_arm_is_first_twice_or_always_follows_the_same_one() -> None:
    orders = turn_order(ARMS, 3, seed=7)
    assert len({order[0] for order in orders}) == 3
    before = [{order[at]: order[at - 1] for at in range(1, len(order))} for order in orders]
    assert not [arm for arm in ARMS if len({one.get(arm) for one in before}) == 1]


def test_the_seed_decides_and_one_arm_is_an_order_too() -> None:
    assert turn_order(ARMS, 2, seed=3) == turn_order(ARMS, 2, seed=3)
    assert len({tuple(turn_order(ARMS, 1, seed)[0]) for seed in range(10)}) > 1
    assert turn_order(["gateway"], 2, seed=0) == [["gateway"], ["gateway"]]
    assert turn_order([], 2, seed=0) == [[], []]
