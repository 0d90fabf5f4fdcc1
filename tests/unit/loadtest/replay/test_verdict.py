"""A cell is lost if another router is clearly better; what is and is not a rival."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.replay.grid import CellOutcome, GridCell, GridResults
from loadtest.replay.summary import Percentiles, PolicyFigures
from loadtest.replay.verdict import cells_of, verdict_tables
from tests.unit.loadtest.replay.builders import conversation_trace, scenario


def results(figures: dict[str, tuple[float, float]], loads: tuple[float, ...] = (0.5,)) -> GridResults:
    """The same mean E2E and goodput of each policy at all loads; at load 1, E2E is twice as long."""
    outcomes = []
    for load in loads:
        at = scenario(rate=10 * load)
        for policy, (e2e, goodput) in figures.items():
            seconds = e2e * (2 if load == 1 else 1)
            spread = Percentiles(seconds, seconds, seconds, p99=seconds)
            found = PolicyFigures(
                9,
                ttft=spread,
                tpot=spread,
                e2e=spread,
                goodput=goodput,
                ttft_violations=0.0,
                tpot_violations=0.0,
                hit_ratio=0.0,
                preemptions=0,
                prefill_imbalance=1.0,
                virtual_seconds=1.0,
                cpu_seconds=1.0,
            )
            outcomes.append(CellOutcome(GridCell(load, at, policy), found))
    return GridResults(conversation_trace(rows=3), "lmetric", {2: 10.0}, outcomes=outcomes, command="")


def test_each_figure_has_its_own_best_rival() -> None:
    (cell,) = cells_of(results({"ours": (1.0, 0.9), "lmetric": (1.1, 0.95), "llmd": (0.99, 0.5)}))
    assert (cell.e2e.rival, cell.e2e.ratio) == ("llmd", pytest.approx(1 / 0.99))
    assert (cell.goodput.rival, cell.goodput.best) == ("lmetric", 0.95)
    assert cell.losses == ["goodput"]  # a difference of 1 % in E2E is noise


def test_the_gateway_is_no_rival_of_itself() -> None:
    own = {"ours_exact": (0.1, 1.0), "gateway_round_robin": (0.1, 1.0), "ours, slots": (0.1, 1.0)}
    assert cells_of(results({"ours": (1.0, 0.9), **own})) == []
    assert cells_of(results({"lmetric": (1.0, 0.9), **own})) == []
    (cell,) = cells_of(results({"ours": (1.0, 0.9), "lmetric": (0.9, 0.0), **own}))
    assert cell.losses == ["E2E"]
    assert cell.goodput.ratio == 1.0  # the rival has none


def test_traces_are_summed_up_one_by_one_and_together() -> None:
    one = results({"ours": (1.1, 0.9), "lmetric": (1.0, 0.9)}, loads=(0.5, 1.0))
    other = replace(one, trace=replace(one.trace, name="other"))
    cells, lines = verdict_tables([one, other])
    assert cells.row_count == 4
    assert [list(column.cells) for column in lines.columns[:3]] == [
        ["made-up", "other", "all"],
        ["2", "2", "4"],
        ["2", "2", "4"],
    ]
    assert [list(column.cells)[-1] for column in lines.columns[3:]] == ["1.100"] * 4
    assert verdict_tables([results({"lmetric": (1.0, 1.0)})]) == []


def test_without_the_baseline_there_are_cells_and_no_means() -> None:
    _, lines = verdict_tables([replace(results({"ours": (1.0, 1.0), "llmd": (1.0, 1.0)}), baseline="sglang")])
    assert [list(column.cells) for column in lines.columns[3:]] == [[""]] * 4
