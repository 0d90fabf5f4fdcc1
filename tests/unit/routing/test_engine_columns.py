"""What is kept from one look to the next against what is worked out anew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.cost_matrix import CostMatrix, EngineColumns, column_of
from gateway.routing.engine import CostModel, Engine
from tests.unit.routing.crowds import MODELS, NOW, WORKS, engines, work

CHANGES = st.sampled_from(["start", "first token", "finish", "sizes", "model", "fleet", "time"])


def same(kept: EngineColumns, anew: EngineColumns) -> None:
    for name in ("of_output", "slowness", "step", "stall", "room"):
        for one, other in zip(getattr(kept, name), getattr(anew, name), strict=True):
            assert one == pytest.approx(other, rel=1e-12)
    assert kept.mean_stall == anew.mean_stall


@given(MODELS, engines(), st.data())
def test_what_is_kept_is_what_would_be_made_anew(model: CostModel, among: list[Engine], data: st.DataObject) -> None:
    table, now = EngineColumns(), NOW
    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 3))):
            engine = data.draw(st.sampled_from(among))
            works = sorted(engine.kv.held, key=lambda held: (held.started_seconds, held.demand.prompt_tokens))
            match data.draw(CHANGES):
                case "start":
                    started = data.draw(WORKS)
                    engine.kv.held.add(started)
                    engine.load.start(started, now)
                    engine.placed += 1
                case "first token" if works:
                    engine.load.first_token(data.draw(st.sampled_from(works)), now)
                case "finish" if works:
                    ended = data.draw(st.sampled_from(works))
                    engine.kv.held.remove(ended)
                    engine.load.finish(ended, now)
                case "sizes":
                    engine.resize(data.draw(st.integers(1, 6)), data.draw(st.sampled_from([None, 500, 30_000])))
                case "model":
                    model = data.draw(MODELS)
                case "fleet":
                    among = [*among]
                case "time":
                    now += data.draw(st.sampled_from([0.001, 0.3, 20.0]))
        same(table.refresh(among, model, now), EngineColumns().refresh(among, model, now))


@given(MODELS, engines())
def test_what_is_ahead_is_as_the_engine_has_it(model: CostModel, among: list[Engine]) -> None:
    columns = EngineColumns().refresh(among, model, NOW)
    for at, engine in enumerate(among):
        ahead = engine.ahead_seconds(model, NOW)
        assert columns.of_output[1, at] == pytest.approx(ahead + column_of(engine, model, NOW).waits, rel=1e-12)


def test_an_engine_that_costs_the_same_is_worth_less_the_more_runs_there_and_was_placed_there() -> None:
    ttft, quiet = CostModel(decode_weight=0.0), Engine(0, "a")
    placed, busy = Engine(1, "b", placed=1), Engine(2, "c")
    busy.load.start(work(1, 0, 0.0, observable=True), NOW)
    busy.load.first_token(next(iter(busy.load.pending)), NOW)
    waits = [column_of(engine, ttft, NOW).waits for engine in (quiet, placed, busy)]
    assert waits[0] < waits[1] < waits[2]
    assert waits[1] < 1e-9


def test_the_columns_do_not_change_with_costs_computed_from_them() -> None:
    table, among = EngineColumns(), [Engine(0, "a"), Engine(1, "b")]
    model = CostModel()
    before = table.refresh(among, model, NOW).of_output
    CostMatrix(model, [100], [5.0], [np.zeros(2)], among, NOW, table)
    assert table.refresh(among, model, NOW).of_output.tolist() == before.tolist()
