import pytest

from gateway.core.request import Demand
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine, prefill_seconds
from gateway.core.routing.estimates import CostModel, Estimates
from gateway.core.routing.policy import (
    Affinity,
    HitPredictor,
    LeastLoadedPolicy,
    Options,
    Policy,
    PrefixPolicy,
    RoundRobinPolicy,
)
from tests.unit.routing.crowds import options_of, work

KEYS = tuple(range(1, 6))  # 2 KiB of prompt, at 4 bytes a token
EDGES = (256, 512, 1024, 1536, 2048)


def engines(count: int = 3) -> list[Engine]:
    return [Engine(index, "abcdefgh"[index]) for index in range(count)]


def asking(tokens: int) -> Demand:
    """A prompt of that many tokens that begins with `KEYS`."""
    return Demand("m", keys=KEYS, edges=EDGES, prompt_size=4 * tokens, prompt_tokens=tokens)


def busy(engine: Engine, requests: int) -> None:
    for _ in range(requests):
        started = work(1, 1000, 0.0, observable=True)
        engine.load.start(started, 0.0)
        engine.load.first_token(started, 0.0)


def prefix_policy(count: int = 3) -> tuple[PrefixPolicy, PrefixIndex]:
    index = PrefixIndex([1 << 30] * count)
    return PrefixPolicy(HitPredictor(index, HitAccuracy()), Estimates(), Affinity()), index


def cheapest(policy: Policy, ask: Demand, among: list[Engine]) -> str:
    return min(options_of(policy, ask, among, 0.0), key=lambda option: option.cost).engine.name


def test_prefix_prefers_the_backend_that_holds_the_prompt() -> None:
    policy, index = prefix_policy()
    index.record(1, KEYS, EDGES)
    ask = asking(525)
    options = options_of(policy, ask, engines(), 0.0)
    assert [option.hit_tokens for option in options] == [0, 512, 0]
    assert cheapest(policy, ask, engines()) == "b"
    assert options[1].prefill_seconds < options[0].prefill_seconds


def test_prefix_leaves_the_holder_when_it_is_much_busier() -> None:
    policy, index = prefix_policy()
    index.record(1, KEYS, EDGES)
    among = engines()
    busy(among[1], 200)
    assert cheapest(policy, asking(525), among) != "b"


def test_prefix_remembers_what_was_placed_where() -> None:
    policy, index = prefix_policy()
    ask = asking(525)
    policy.placed(ask, options_of(policy, ask, engines(), 0.0)[2].engine)
    assert index.depths(KEYS) == [0, 0, len(KEYS)]


def test_each_option_has_the_prefill_of_its_own_hit_and_speed() -> None:
    policy, index = prefix_policy(4)
    index.record(1, KEYS, EDGES)
    index.record(3, KEYS, EDGES)
    among = [Engine(index, "abcd"[index], slowness=slowness) for index, slowness in enumerate((1.0, 1.0, 2.0, 2.0))]
    prefills = [option.prefill_seconds for option in options_of(policy, asking(525), among, 0.0)]
    model = CostModel()
    expected = [
        prefill_seconds(model, engine.slowness, 525, hit) for engine, hit in zip(among, (0, 512, 0, 512), strict=True)
    ]
    assert prefills == expected
    assert len(set(prefills)) == 4


def test_a_hit_is_never_longer_than_the_prompt() -> None:
    policy, index = prefix_policy(1)
    index.record(0, KEYS, EDGES)
    [option] = options_of(policy, asking(100), engines(1), 0.0)
    assert option.hit_tokens == 96


def test_options_come_in_the_order_of_the_engines_given_though_some_are_missing() -> None:
    policy, index = prefix_policy(3)
    index.record(2, KEYS, EDGES)
    a, _, c = engines()
    options = options_of(policy, asking(512), [c, a], 0.0)
    assert [(option.engine.name, option.hit_tokens) for option in options] == [("c", 496), ("a", 0)]


def test_a_short_answer_makes_a_busy_backend_cheaper() -> None:
    policy, _ = prefix_policy(1)
    among = engines(1)
    busy(among[0], 20)
    [long] = options_of(policy, Demand("m", prompt_tokens=100), among, 0.0)
    [short] = options_of(policy, Demand("m", prompt_tokens=100, output_tokens=1), among, 0.0)
    [longer] = options_of(policy, Demand("m", prompt_tokens=100, output_tokens=100_000), among, 0.0)
    assert short.cost < long.cost == longer.cost


def test_least_loaded_takes_the_smallest_share_of_slots() -> None:
    among = engines()
    busy(among[0], 2)
    busy(among[1], 3)
    busy(among[2], 3)
    among[2].slots = 512
    assert cheapest(LeastLoadedPolicy(), Demand("m"), among) == "c"


def test_round_robin_goes_round() -> None:
    policy, among = RoundRobinPolicy(), engines()
    order = []
    for _ in range(7):
        option = min(options_of(policy, Demand("m"), among, 0.0), key=lambda option: option.cost)
        policy.placed(Demand("m"), option.engine)
        order.append(option.engine.name)
    assert order == list("abcabca")


def test_round_robin_passes_over_backends_that_are_missing() -> None:
    policy, (a, b, c) = RoundRobinPolicy(), engines()
    policy.placed(Demand("m"), options_of(policy, Demand("m"), [a, b, c], 0.0)[0].engine)
    assert cheapest(policy, Demand("m"), [a, c]) == "c"
    policy.placed(Demand("m"), options_of(policy, Demand("m"), [a, b, c], 0.0)[2].engine)
    assert cheapest(policy, Demand("m"), [a, b]) == "a"


@pytest.mark.parametrize("policy", [LeastLoadedPolicy(), RoundRobinPolicy()])
def test_policies_without_an_index_do_not_wait_for_the_best(policy: Policy) -> None:
    assert not policy.waits_for_best
    assert options_of(policy, Demand("m"), [], 0.0) == []


def test_the_prefix_policy_waits_for_the_best_backend() -> None:
    assert prefix_policy()[0].waits_for_best


def test_the_parts_of_an_options_cost_are_all_of_it_but_what_a_hint_takes_off() -> None:
    policy, index = prefix_policy()
    index.record(1, KEYS, EDGES)
    among = engines()
    busy(among[0], 3)
    ask = asking(525)
    model, options = CostModel(), options_of(policy, ask, among, 0.0)
    priced = policy.options(ask, among, model, 0.0)
    for option, parts in zip(options, policy.parts(ask, priced, model, 0.0), strict=True):
        assert sum(parts) == pytest.approx(option.cost)
    ask.hint = 5
    policy.placed(ask, options[1].engine)
    hinted = options_of(policy, ask, among, 0.0)
    assert hinted[1].cost < options[1].cost
    priced = policy.options(ask, among, model, 0.0)
    assert [sum(parts) for parts in policy.parts(ask, priced, model, 0.0)] == pytest.approx(
        [each.cost for each in options]
    )


@pytest.mark.parametrize("policy", [LeastLoadedPolicy(), RoundRobinPolicy()])
def test_policies_without_an_index_predict_no_hits_and_have_no_parts(policy: Policy) -> None:
    among = engines()
    options = policy.options(Demand("m"), among, CostModel(), 0.0)
    assert options.hit_tokens == options.prefill_seconds == [0] * 3
    assert policy.parts(Demand("m"), options, CostModel(), 0.0) == [None] * 3
    assert options.cheapest(range(3)) == 0


def test_round_robin_ranks_anew_as_the_turn_passes_on() -> None:
    policy, among = RoundRobinPolicy(), engines()
    order = []
    for _ in range(4):
        best = policy.options(Demand("m"), among, CostModel(), 0.0).cheapest(range(3))
        policy.placed(Demand("m"), among[best])
        order.append(best)
    assert order == [0, 1, 2, 0]


def test_of_equal_costs_the_quietest_comes_first_then_the_one_that_was_chosen_less_often() -> None:
    among = engines()
    for at, count in enumerate((2, 1, 1)):
        busy(among[at], count)
    among[1].placed = 5
    assert Options(among, [1.0, 1.0, 1.0]).cheapest(range(3)) == 2
    assert Options(among, [1.0, 1.0, 1.0]).cheapest([0, 1]) == 1
    assert Options(among, [1.0, 1.0, 0.5]).cheapest([0, 1]) == 1


def test_a_request_without_blocks_leaves_nothing_in_the_record() -> None:
    policy, index = prefix_policy()
    policy.placed(Demand("m"), options_of(policy, Demand("m"), engines(), 0.0)[0].engine)
    assert index.used_bytes(0) == 0
