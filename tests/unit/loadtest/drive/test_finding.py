"""A search for the highest load, run by run in virtual time."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.drive import finding
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record
from loadtest.drive.run import Order
from loadtest.drive.target import Target
from loadtest.report.schema import Results
from loadtest.report.series import Series
from tests.unit.loadtest.drive.recorded import REFUSED, Asked, RecordedServer, Recording, drive, stream, summarised
from tests.unit.loadtest.virtual_network import VirtualNetwork

_MOST_USERS = 3
_ANSWER_SECONDS = 0.5


async def _against_a_server_for_three(plan: Plan) -> Harvest:
    ends: list[float] = []

    def answer(asked: Asked) -> Recording:
        ends[:] = [end for end in ends if end > asked.at + 1e-9]
        if len(ends) == _MOST_USERS:
            return REFUSED
        ends.append(asked.at + _ANSWER_SECONDS)
        return stream(_ANSWER_SECONDS / 2, _ANSWER_SECONDS)

    async with RecordedServer(answer) as server:
        return await drive(plan.model_copy(update={"url": server.url}))


def _measured(order: Order, _console: Console) -> tuple[Results, list[Record]]:
    with asyncio.Runner(loop_factory=VirtualNetwork) as runner:
        harvest = runner.run(_against_a_server_for_three(order.plan))
    return summarised(order.plan, harvest, order.bounds), harvest.records


def test_a_search_names_the_most_users_that_keep_the_slo_and_what_limits_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(finding, "measured", _measured)
    options = RunOptions(
        url="http://any", find="max-concurrency", slo="ttft=0.3", requests=12, warmup=0, workers="1", out=tmp_path
    )
    console = Console(file=io.StringIO(), width=200)
    assert finding.find(options, Target(["m"]), console, None)
    series = Series.model_validate_json((tmp_path / "series.json").read_text())
    assert series.passed
    assert series.answer[0].startswith("3 users within the SLO")
    assert "limited by errors" in series.answer[0]
    assert [(point.offered, point.passed, point.runs) for point in series.points] == [
        (2, 1, 1),
        (3, 2, 2),
        (4, 0, 1),
        (8, 0, 1),
    ]
