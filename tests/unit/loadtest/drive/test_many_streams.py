"""A run of as many streams as this machine carries, on a simulated engine of its own."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.drive.fleet import WorkerFleet
from loadtest.drive.plan import Plan
from loadtest.drive.record import Tick
from loadtest.servers.server import Server, simulated_engine

_STREAMS = 1500
_SUCCEEDED = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Server]:
    """An engine that takes no time."""
    with simulated_engine(["--max-num-seqs", "4000", "--time-scale", "0"], tmp_path / "log") as running:
        yield running


def _answered(engine: Server) -> float:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as page:
        return sum(map(float, _SUCCEEDED.findall(page.read().decode())))


def test_a_worker_with_many_streams_brings_in_all_of_them_though_the_parent_reads_late(engine: Server) -> None:
    workload = {"groups": 1, "prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4}
    fields = {"url": engine.url, "model": "sim", "concurrency": _STREAMS, "requests": _STREAMS, "warmup_requests": 0}
    plan = Plan.model_validate({**fields, "workload": workload})
    deadline = time.monotonic() + 50

    def read_late(_: Tick) -> None:
        """Leaves the reports of all requests, half a megabyte, in the pipe."""
        while _answered(engine) < _STREAMS:
            assert time.monotonic() < deadline, "not all requests were answered"
            time.sleep(0.2)

    with WorkerFleet(plan, lambda: False) as fleet:
        fleet.warm_up()
        harvest = fleet.measure(read_late)
    assert harvest.lost == []
    assert sorted(record.index for record in harvest.records if record.ok) == list(range(_STREAMS))
