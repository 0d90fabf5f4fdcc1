"""A run of thousands of streams, on a simulated engine of its own."""

from __future__ import annotations

import re
import resource
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.drive.fleet import WorkerFleet
from loadtest.drive.plan import Plan
from loadtest.drive.record import Tick
from loadtest.servers.server import Server, simulated_engine

_STREAMS = 4000
_OTHER_FILES = 100
_SUCCEEDED = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Server]:
    """An engine that takes no time, with as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < _STREAMS + _OTHER_FILES:
        pytest.skip(f"{_STREAMS} streams need more open files than the {hard} that are allowed here (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with simulated_engine(["--max-num-seqs", "4000", "--time-scale", "0"], tmp_path / "log") as running:
            yield running
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _answered(engine: Server) -> float:
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as page:
        return sum(map(float, _SUCCEEDED.findall(page.read().decode())))


@pytest.mark.timeout(240)
def test_a_worker_with_4000_streams_brings_in_all_of_them_though_the_parent_reads_late(engine: Server) -> None:
    workload = {"groups": 1, "prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 4}
    fields = {"url": engine.url, "model": "sim", "concurrency": _STREAMS, "requests": _STREAMS, "warmup_requests": 0}
    plan = Plan.model_validate({**fields, "workload": workload})
    deadline = time.monotonic() + 180

    def read_late(_: Tick) -> None:
        """Leaves the reports of all requests, more than a megabyte, in the pipe."""
        while _answered(engine) < _STREAMS:
            assert time.monotonic() < deadline, "not all requests were answered"
            time.sleep(0.2)

    with WorkerFleet(plan, lambda: False) as fleet:
        fleet.warm_up()
        harvest = fleet.measure(read_late)
    assert harvest.lost == []
    assert sorted(record.index for record in harvest.records if record.ok) == list(range(_STREAMS))
