"""Of many engines only those are priced that can be the cheapest."""

from collections.abc import Sequence

import pytest

from gateway.core.request import Demand
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import FEW_ENGINES, Engine, Shortlist
from gateway.core.routing.estimates import CostModel, Estimates
from gateway.core.routing.policy import Affinity, HitPredictor, LeastLoadedPolicy, Options, PrefixPolicy
from tests.unit.routing.crowds import work

MANY, LEAST = 80, 16
MODEL = CostModel()
KEYS = tuple(range(1, 9))
EDGES = tuple(range(500, 4001, 500))
NOTHING = [0] * MANY


def engines(count: int = MANY) -> list[Engine]:
    """The later ones are busier."""
    made = [Engine(index, f"engine-{index}", slots=64) for index in range(count)]
    for engine in made:
        busy(engine, engine.index)
    return made


def busy(engine: Engine, requests: int) -> None:
    for _ in range(requests):
        started = work(1, 1000, 0.0, observable=True)
        engine.load.start(started, 0.0)
        engine.load.first_token(started, 0.0)


def names(shortlist: Shortlist, depths: Sequence[int] = NOTHING) -> set[int]:
    shortlist.refresh(MODEL, 0.0)
    return {engine.index for engine in shortlist.of(depths)}


def test_the_least_loaded_are_on_it() -> None:
    assert names(Shortlist(engines())) == set(range(LEAST))


def test_loads_are_followed() -> None:
    among = engines()
    shortlist = Shortlist(among)
    names(shortlist)
    busy(among[3], 30)
    assert names(shortlist) == {*range(LEAST + 1)} - {3}
    among[20].resize(1, None)
    shortlist.refresh(MODEL, 0.0)
    assert names(shortlist) == {*range(LEAST + 1)} - {3}


def test_engines_that_hold_more_of_the_prompt_than_all_of_these_are_on_it_too() -> None:
    depths = [2, *[0] * 18, 2, 3, 9, *[0] * (MANY - 22)]
    assert names(Shortlist(engines()), depths) == {*range(LEAST), 20, 21}


def test_holders_that_do_not_serve_the_model_do_not_count() -> None:
    assert names(Shortlist(engines()), [*[0] * MANY, 5]) == set(range(LEAST))


def test_equally_loaded_engines_are_all_on_it() -> None:
    among = [Engine(index, str(index)) for index in range(MANY)]
    assert names(Shortlist(among)) == set(range(MANY))


def test_another_cost_model_renews_all_costs() -> None:
    shortlist = Shortlist(engines())
    names(shortlist)
    assert shortlist.refresh(CostModel(1e-3), 0.0) == pytest.approx(shortlist.refresh(MODEL, 0.0))


def best(options: Options) -> tuple[str, float, int]:
    at = options.cheapest(range(len(options.engines)))
    return options.engines[at].name, options.costs[at], options.hit_tokens[at]


@pytest.mark.parametrize("holder", [None, 0, 5, 23, 60])
@pytest.mark.parametrize("count", [FEW_ENGINES, MANY])
def test_the_best_of_the_likely_ones_is_the_best_of_all_at_the_same_cost(count: int, holder: int | None) -> None:
    index, among = PrefixIndex([1 << 30] * MANY), engines(count)
    policy = PrefixPolicy(HitPredictor(index, HitAccuracy()), Estimates(), Affinity())
    if holder is not None:
        index.record(holder, KEYS, EDGES)
    for tokens in (1000, 30_000):
        demand = Demand("m", keys=KEYS, edges=EDGES, prompt_size=4 * tokens, prompt_tokens=tokens)
        likely = policy.likely_options(demand, Shortlist(among), MODEL, 0.0)
        assert best(likely) == best(policy.options(demand, among, MODEL, 0.0))
        assert len(likely.engines) == count if count == FEW_ENGINES else len(likely.engines) < LEAST + 2


def test_policies_that_ignore_prompts_price_all() -> None:
    among = engines()
    assert LeastLoadedPolicy().likely_options(Demand("m"), Shortlist(among), MODEL, 0.0).engines is among
