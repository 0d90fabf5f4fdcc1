"""An engine that goes under load serves again afterwards, whatever happened to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.compare.outage.run import OutageLoad, observe
from loadtest.compare.outage.schema import Fault
from loadtest.servers.engines import EngineOptions, Engines, Kind
from loadtest.servers.server import Server, ServerFailed, serves, simulated_engine
from loadtest.workloads.prompts import Endpoint

LOAD = OutageLoad(rate_per_second=6.0, seconds=3.0, max_tokens=8)


class SlowToReturn(Server):
    """Serves at first, and is given up when it is to serve again; the time after that it serves."""

    waits = 0

    def wait_ready(self) -> None:
        self.waits += 1
        if self.waits == 2:
            raise ServerFailed("not today")
        super().wait_ready()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    log = tmp_path / "engine.log"
    process = SlowToReturn(simulated_engine(["--time-scale", "0", "--dev-mode"], log).launch, log)
    one = Engines(EngineOptions(Kind.SIM, 1), [process])
    try:
        one.start(0)
        process.wait_ready()
        yield one
    finally:
        one.stop()


def test_one_that_does_not_come_back_is_reported_and_started_once_more(engines: Engines) -> None:
    plan = LOAD.plan(engines.urls[0], Endpoint.COMPLETIONS, "sim", 1)
    with pytest.raises(ServerFailed, match="not today"):
        observe(engines, LOAD.outage(0, Fault.KILL), plan)
    assert serves(f"{engines.urls[0]}/health")


def test_all_requests_are_recorded_around_the_time_in_which_it_hung(engines: Engines) -> None:
    plan = LOAD.plan(engines.urls[0], Endpoint.COMPLETIONS, "sim", 1)
    found = observe(engines, LOAD.outage(0, Fault.HANG), plan)
    moments = found.moments
    assert 1.0 <= moments.gone < moments.let_back == moments.serving
    assert {record.part for record in found.records} == {"streams", "whole"}
    assert [record.sent for record in found.records] == sorted(record.sent for record in found.records)
    assert found.seen.at == sorted(found.seen.at)
    assert found.seen.at[-1] >= max(record.end for record in found.records)
    assert serves(f"{engines.urls[0]}/health")
