"""Looking at a target, and its counters."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.access import Access
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.target import Target, TargetError, base_url, change, counters, look_at, read_counters

_PAGE = """# TYPE hits_total counter
hits_total{kind="actual",backend="a"} 5
# TYPE hits_created gauge
hits_created{kind="actual",backend="a"} 1.7e9
# TYPE in_flight gauge
in_flight 3
# TYPE wait_seconds histogram
wait_seconds_bucket{le="+Inf"} 2
wait_seconds_count 2
wait_seconds_sum 0.5
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 9
"""


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "h:1"])
def test_the_url_may_be_given_in_any_of_its_usual_forms(url: str) -> None:
    assert base_url(url) == "http://h:1"


async def test_models_and_bytes_per_token_are_asked_of_the_target(fake: Any) -> None:
    target = await look_at(fake.url, Access())
    assert target.models == ["first", "second"]
    assert target.bytes_per_token == pytest.approx(5, abs=0.01)


def _plan(url: str, target: Target, cpus: int = 4, **options: Any) -> Plan:
    chosen = RunOptions(url=url, **options)
    return chosen.plan(url, target, chosen.loads()[0], 1, cpus)


async def test_what_was_measured_gives_way_to_what_the_user_set(fake: Any) -> None:
    target = await look_at(fake.url, Access())
    measured = _plan(fake.url, target, concurrency="1")
    chosen = _plan(fake.url, target, concurrency="1", bytes_per_token=3, model="second", cache_salt="off")
    assert measured.workload.bytes_per_token == target.bytes_per_token
    assert (chosen.workload.bytes_per_token, chosen.model, chosen.cache_salt) == (3, "second", None)
    assert measured.cache_salt != _plan(fake.url, target, concurrency="1").cache_salt


async def test_automatic_workers_are_as_many_as_the_load_needs_up_to_half_the_cores(fake: Any) -> None:
    target = await look_at(fake.url, Access())
    assert _plan(fake.url, target, 12, rate="9", workers="auto").workers == 1
    assert _plan(fake.url, target, 12, rate="9:900", ramp=1.0, workers="auto").workers == 3
    assert _plan(fake.url, target, 12, concurrency="800", workers="auto").workers == 2
    assert _plan(fake.url, target, 12, concurrency="8000", workers="auto").workers == 6
    assert _plan(fake.url, target, 1, rate="900", workers="auto").workers == 1
    assert _plan(fake.url, target, 12, concurrency="2", workers="5").workers == 2


async def test_metrics_that_cannot_be_read_are_reported_before_the_run(fake: Any) -> None:
    assert await read_counters(f"{fake.url}/metrics", Access(), fake.url) == {'hits_total{backend="a"}': 3.0}
    with pytest.raises(TargetError, match="answers 404"):
        await read_counters(f"{fake.url}/nothing", Access(), fake.url)


def test_only_what_counts_upwards_is_read() -> None:
    assert counters(_PAGE) == {
        'hits_total{backend="a",kind="actual"}': 5.0,
        "wait_seconds_count": 2.0,
        "wait_seconds_sum": 0.5,
    }


def test_changes_leave_out_what_stood_still_and_survive_a_restart_of_the_target() -> None:
    before = {"still": 4.0, "moved": 1.0, "restarted": 100.0}
    after = {"still": 4.0, "moved": 3.5, "restarted": 2.0, "new": 1.0}
    assert change(before, after) == {"moved": 2.5, "new": 1.0, "restarted": 2.0}
