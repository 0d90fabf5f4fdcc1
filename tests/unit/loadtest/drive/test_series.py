"""A series that does not come to its end."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.drive import run
from loadtest.drive.options import RunOptions
from loadtest.drive.record import Record
from loadtest.drive.run import Order
from loadtest.drive.target import Target
from loadtest.report.schema import Results
from tests.unit.loadtest.sweep.runs import results


@pytest.mark.parametrize("between", [True, False])
def test_a_series_that_is_ended_by_hand_reports_what_it_has_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, between: bool
) -> None:
    """By a signal between two runs, or in one."""

    def measured(order: Order, _console: Console) -> tuple[Results, list[Record]]:
        found = results()
        if order.plan.concurrency == 4:
            if between:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                early = found.verdict.model_copy(update={"ended_early": True})
                found = found.model_copy(update={"verdict": early})
        assert order.plan.concurrency != 8
        return found, []

    monkeypatch.setattr(run, "measured", measured)
    options = RunOptions(url="http://x", concurrency="2,4,8", requests=9, out=tmp_path)
    console = Console(file=io.StringIO(), width=200)
    found = run.carry_out_series(options, {"": Target(["m"])}, console)
    assert found is not None
    assert not found.passed
    assert found.folders == (["c2-1", "c4-1"] if between else ["c2-1"])
    assert found.failures == {"c8-1" if between else "c4-1": "ended by hand, as all that follow"}
    assert (tmp_path / "series.json").exists()
