"""Which LoRA adapters an engine has on its GPU, and what that means for where a request goes."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import Demand
from gateway.core.routing.adapters import LOAD_SECONDS, WAIT_SECONDS, AdapterSlots
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine, Shortlist
from gateway.core.routing.estimates import CostModel, Estimates
from gateway.core.routing.policy import Affinity, HitPredictor, PrefixPolicy

NAMES = frozenset("abc")


def slots_of(most: int | None, *running: str) -> AdapterSlots:
    made = AdapterSlots(NAMES)
    made.report(frozenset(running), most)
    return made


def test_an_adapter_is_loaded_by_its_first_request() -> None:
    slots = slots_of(2)
    assert slots.seconds("a") == LOAD_SECONDS
    slots.use("a")
    assert (slots.seconds("a"), slots.seconds("b")) == (0.0, LOAD_SECONDS)


def test_the_one_that_was_used_least_recently_leaves() -> None:
    slots = slots_of(2)
    for name in "abac":
        slots.use(name)
    assert slots.loaded == ["a", "c"]


def test_what_runs_keeps_its_slot() -> None:
    slots = slots_of(2, "a")
    for name in "bcb":
        slots.use(name)
    assert slots.loaded == ["a", "b"]


def test_while_others_use_all_slots_a_request_waits_for_one() -> None:
    slots = slots_of(2, "a", "b")
    assert slots.seconds("c") == LOAD_SECONDS + WAIT_SECONDS
    slots.report(frozenset("a"), 2)
    assert slots.seconds("c") == LOAD_SECONDS
    assert slots.seconds("b") == 0.0


def test_the_model_itself_and_unknown_names_cost_nothing() -> None:
    slots = slots_of(1, "a", "never listed")
    slots.use("base")
    assert (slots.seconds("base"), slots.loaded) == (0.0, ["a"])


def test_a_restart_empties_the_slots_and_a_new_list_those_of_others() -> None:
    slots = slots_of(2, "a", "b")
    slots.update(frozenset("bc"))
    assert slots.loaded == ["b"]
    slots.forget()
    assert (slots.loaded, slots.seconds("b")) == ([], LOAD_SECONDS)


@given(st.lists(st.sampled_from("abcx") | st.frozensets(st.sampled_from("abcx"))), st.none() | st.integers(1, 3))
def test_no_more_are_loaded_than_there_are_slots(steps: list[str | frozenset[str]], most: int | None) -> None:
    slots = slots_of(most)
    for step in steps:
        if isinstance(step, str):
            slots.use(step)
            assert step not in NAMES or slots.loaded[-1] == step
        else:
            slots.report(step, most)
        assert len(slots.loaded) <= (most or 3)
        assert NAMES.issuperset(slots.loaded)


def policy() -> PrefixPolicy:
    return PrefixPolicy(HitPredictor(PrefixIndex([1 << 30] * 80), HitAccuracy()), Estimates(), Affinity())


def engines(count: int, adapters: bool = True) -> list[Engine]:
    made = [Engine(number, str(number)) for number in range(count)]
    for each in made:
        each.list_adapters(NAMES if adapters else frozenset())
    return made


def test_an_engine_with_the_adapter_is_preferred_until_it_is_much_busier() -> None:
    chosen, fleet, demand = policy(), engines(3), Demand("a", prompt_tokens=100)
    chosen.placed(demand, fleet[1])
    options = chosen.options(demand, fleet, CostModel(), 0.0)
    assert options.cheapest(range(3)) == 1
    assert options.costs[0] - options.costs[1] == LOAD_SECONDS
    parts = chosen.parts(demand, options, CostModel(), 0.0)
    assert [part.adapter for part in parts] == [LOAD_SECONDS, 0.0, LOAD_SECONDS]
    assert [sum(part) for part in parts] == options.costs
    base = chosen.options(Demand("base", prompt_tokens=100), fleet, CostModel(), 0.0)
    assert len(set(base.costs)) == 1


def test_of_many_engines_the_one_with_the_adapter_is_found() -> None:
    chosen, fleet, demand = policy(), engines(70), Demand("a", prompt_tokens=100)
    chosen.placed(demand, fleet[69])
    options = chosen.likely_options(demand, Shortlist(fleet), CostModel(), 0.0)
    assert options.engines[options.cheapest(range(len(options.engines)))] is fleet[69]
    base = chosen.likely_options(Demand("base", prompt_tokens=100), Shortlist(fleet), CostModel(), 0.0)
    assert len(base.engines) <= len(fleet)


def test_engines_without_adapters_have_no_slots() -> None:
    fleet = engines(2, adapters=False)
    assert [engine.adapters for engine in fleet] == [None, None]
