import math

import pytest

from gateway.core.routing.engine import Engine, EngineLoad, EngineUse, OtherLoad, Terms
from gateway.core.routing.estimates import CostModel
from tests.unit.routing.crowds import work

MODEL = CostModel()


def test_terms_are_those_of_the_load() -> None:
    engine = Engine(0, "a", slots=4, kv_cache_tokens=5000, slowness=1.5)
    assert engine.terms(MODEL) == Terms(MODEL, engine.load, 4, 5000, 1.5)


def test_terms_are_worked_out_once_until_something_changes() -> None:
    engine, started = Engine(0, "a"), work(1, 1000, 0.1, observable=True)
    seen = [engine.terms(MODEL)]
    assert engine.terms(MODEL) is seen[0]

    def changed() -> bool:
        seen.append(engine.terms(MODEL))
        assert seen[-1] == Terms(MODEL, engine.load, engine.slots, engine.kv_cache_tokens, engine.slowness)
        return seen[-1] is not seen[-2]

    engine.load.start(started, 0.0)
    assert changed()
    engine.load.first_token(started, 0.1)
    assert changed()
    engine.load.finish(started, 0.2)
    assert changed()
    engine.resize(2, None)
    assert changed()
    engine.resize(2, 100)
    assert changed()
    engine.resize(2, 100)
    assert not changed()
    assert engine.terms(CostModel(b=1e-5)) != seen[-1]


def test_a_prefill_that_ends_unseen_changes_the_terms() -> None:
    engine = Engine(0, "a")
    engine.load.start(work(1, 1000, 0.1, observable=False), 0.0)
    before = engine.terms(MODEL)
    assert engine.load.prefill_ahead_seconds(1.0) == 0.0
    assert engine.terms(MODEL) != before


def test_later_prefills_at_the_recent_rate_count_for_a_request_that_would_decode_there() -> None:
    model, busy, quiet = CostModel(), Engine(0, "a"), Engine(1, "b")
    for second in range(20):
        started = work(1, 1000, 0.4, observable=True)
        busy.load.start(started, float(second))
        busy.load.first_token(started, second + 0.4)
        busy.load.finish(started, second + 0.5)
    assert quiet.ahead_seconds(model, 20.0) == 0.0
    soon, later = busy.ahead_seconds(model, 20.0), busy.ahead_seconds(model, 50.0)
    assert soon > 0.05
    assert later < soon / 5
    assert busy.ahead_seconds(CostModel(decode_weight=0.0), 20.0) == 0.0


@pytest.mark.parametrize(("configured", "true"), [(1.0, 2.0), (2.0, 1.0), (4.0, 2.5), (1.0, 0.4)])
def test_its_relative_cost_is_learned_whatever_was_configured(configured: float, true: float) -> None:
    engine = Engine(0, "a", slowness=configured**0.5)
    for _ in range(120):
        engine.on_pace(math.log(true))
    assert engine.relative_cost == pytest.approx(true, rel=0.11)


def test_a_small_difference_is_none() -> None:
    engine = Engine(0, "a")
    for number in range(200):
        engine.on_pace((0.13, -0.05)[number % 2])
    assert engine.relative_cost == 1.0


def test_one_stream_does_not_move_it_far_and_voids_its_terms_only_if_it_moves() -> None:
    engine = Engine(0, "a")
    before = engine.terms(MODEL)
    engine.on_pace(0.5)
    assert engine.terms(MODEL) is before
    engine.on_pace(1000.0)  # a client cannot be believed so far
    assert 1.0 < engine.relative_cost < 1.5
    assert engine.terms(MODEL) == Terms(MODEL, engine.load, 256, None, engine.slowness)


def test_costs_count_what_other_gateways_have_in_flight_on_the_whole_engine() -> None:
    engine = Engine(0, "a", slots=8, kv_cache_tokens=20_000)
    engine.share(EngineUse(4, 10_000))
    alone = engine.terms(MODEL)
    engine.load.follow_others(OtherLoad(6, 5, 9000, 0.25, 0.3), 10.0)
    terms = engine.terms(MODEL)
    assert alone.room_tokens == 10_000
    assert terms.room_tokens == 20_000 - 9000
    assert terms.waits == pytest.approx(0.25 + terms.step * 1.5)
    assert terms.slot == 0.0
    assert engine.load.prefill_share(10.0) == pytest.approx(0.3)
    assert engine.load.own_prefill_share(12.0) == pytest.approx(0.0)
    engine.load.follow_others(None, 12.0)
    assert engine.terms(MODEL) == alone


def test_a_prefill_beside_those_of_other_gateways_is_not_alone() -> None:
    load = EngineLoad()
    load.follow_others(OtherLoad(1, 0, 100, 0.5, 0.0), 0.0)
    request = work(1, 100, 0.1, observable=True)
    load.start(request, 0.0)
    assert not request.alone
