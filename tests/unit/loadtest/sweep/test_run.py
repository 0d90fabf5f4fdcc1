"""How a sweep goes on: with servers and runs that are scripted, and a clock that they move."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from loadtest.access import Access
from loadtest.drive.record import Record
from loadtest.drive.run import Order
from loadtest.drive.target import Target, TargetError
from loadtest.report.schema import Results
from loadtest.servers.server import Launch, ServerFailed
from loadtest.sweep import run
from loadtest.sweep.plan import parse
from loadtest.sweep.run import Sweep
from loadtest.sweep.space import space_of
from loadtest.sweep.store import Store
from tests.unit.loadtest.sweep.runs import results

_START_SECONDS = 1.0
_WHOLE_RUN_SECONDS = 12.0
_REQUESTS = 300


class World:
    """The clock, the servers that were started, the orders that were carried out, and what goes wrong."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.dead = False
        self.gateways: list[str] = []
        self.orders: list[Order] = []
        self.runs: Callable[[Order], None] = lambda _order: None

    def monotonic(self) -> float:
        return self.now

    def measured(self, order: Order, _console: Console) -> tuple[Results, list[Record]]:
        self.orders.append(order)
        self.now += _WHOLE_RUN_SECONDS * (order.plan.requests or 0) / _REQUESTS
        self.runs(order)
        return results(), []


class Scripted:
    """In place of a server."""

    def __init__(self, world: World, launch: Launch, log_path: Path) -> None:
        self.world, self.url, self.log, self.start_seconds = world, launch.url, log_path, _START_SECONDS
        if log_path.name == "gateway.log":
            world.gateways.append(launch.url)

    def __enter__(self) -> Scripted:
        self.world.now += _START_SECONDS
        self.world.dead = False
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to stop."""

    stop = wait_gone = __exit__

    def check(self) -> None:
        if self.world.dead:
            raise ServerFailed("the server ended by itself, exit code 3", ["out of memory"])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    async def look_at(url: str, _access: Access, _model: str | None) -> Target:
        return Target(["m"], metrics_url=None if url in made.gateways else f"{url}/metrics")

    monkeypatch.setattr(run, "measured", made.measured)
    monkeypatch.setattr(run, "look_at", look_at)
    monkeypatch.setattr(run, "Server", lambda launch, log, _stop: Scripted(made, launch, log))
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def sweep(folder: Path, **changes: Any) -> Sweep:
    document = {
        "serve": {"command": ["vllm", "serve", "m"]},
        "flags": {"max-num-seqs": [1, 2, 4]},
        "workloads": [{"name": "short", "run": {"concurrency": 4, "requests": _REQUESTS}}],
    }
    plan = parse(document | changes)
    return Sweep(
        plan,
        space=space_of(plan),
        store=Store(folder, plan),
        console=Console(file=io.StringIO(), width=200),
        should_stop=lambda: False,
    )


def said(made: Sweep) -> list[str]:
    assert isinstance(made.console.file, io.StringIO)
    return [line for line in made.console.file.getvalue().splitlines() if line.startswith("[")]


def test_each_configuration_is_reported_with_how_long_the_rest_will_take(world: World, tmp_path: Path) -> None:
    made = sweep(tmp_path)
    made.carry_out()
    assert said(made) == [
        "[1/3] max-num-seqs=1",
        "[2/3, about 26 s left] max-num-seqs=2",  # two starts of 1 s and two runs of 12 s
        "[3/3, about 13 s left] max-num-seqs=4",
    ]


def test_the_time_left_counts_the_longer_runs_of_the_rounds_to_come(world: World, tmp_path: Path) -> None:
    made = sweep(tmp_path, search="halving", halving={"factor": 3, "shortest": 0.3})
    made.carry_out()
    assert said(made) == [
        "[1/3, runs of 33%] max-num-seqs=1",
        "[2/3, runs of 33%, about 23 s left] max-num-seqs=2",  # three starts, runs of 4, 4 and 12 s
        "[3/3, runs of 33%, about 18 s left] max-num-seqs=4",
        "[1/1, about 13 s left] max-num-seqs=1",
    ]
    assert [order.plan.requests for order in world.orders] == [100, 100, 100, 300]


def test_a_run_that_cannot_be_made_is_recorded_and_the_next_one_follows(world: World, tmp_path: Path) -> None:
    def refuse(_order: Order) -> None:
        if len(world.orders) == 1:
            raise TargetError("no warm-up request succeeded")

    world.runs = refuse
    made = sweep(tmp_path, repeat=2)
    made.carry_out()
    assert len(world.orders) == 6
    (stage,) = made.stages
    assert [failure.why for failure in made.failures(stage, "direct").values()] == ["no warm-up request succeeded"]
    assert len(made.found(stage, "direct")) == 2


@pytest.mark.parametrize("raises", [True, False])
def test_a_server_that_dies_in_a_run_fails_its_configuration_and_no_other(
    world: World, tmp_path: Path, raises: bool
) -> None:
    def die(_order: Order) -> None:
        if len(world.orders) == 2:
            world.dead = True
            if raises:
                raise TargetError("connection refused")

    world.runs = die
    made = sweep(tmp_path, repeat=3)
    made.carry_out()
    (stage,) = made.stages
    ((configuration, failure),) = made.failures(stage, "direct").items()
    assert (configuration.label, failure.why) == ("max-num-seqs=1", "the server ended by itself, exit code 3")
    assert failure.log == ["out of memory"]
    assert len(made.runs(stage, "direct", configuration)) == 1  # what it did before counts as kept, not as whole
    assert len(world.orders) == 2 + 6
    assert len(made.found(stage, "direct")) == 2


def test_the_engines_own_metrics_are_read_also_through_the_gateway(world: World, tmp_path: Path) -> None:
    made = sweep(tmp_path, flags={"max-num-seqs": [1]}, through=["direct", "gateway"])
    made.carry_out()
    direct, through = world.orders
    assert direct.plan.url != through.plan.url
    assert direct.pages == through.pages == {"engine": f"{direct.plan.url}/metrics"}
