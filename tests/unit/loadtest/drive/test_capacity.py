"""What a client says of itself before a run."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from loadtest.drive.capacity import Capacity, client_limits, files_of, raise_file_limit, token_events_per_second
from loadtest.drive.plan import Plan

_ONE = Capacity(token_events_per_second=50_000, open_files=1000)


def _plan(**load: Any) -> Plan:
    fields = {"url": "http://x", "model": "m", "requests": 9, "workload": {"max_tokens": 100}}
    return Plan.model_validate(fields | load)


async def test_a_client_measures_how_many_tokens_it_can_take() -> None:
    assert 1_000 < await token_events_per_second() < 10_000_000


def test_the_limit_is_named_and_a_plan_within_it_has_no_complaint() -> None:
    text, beyond = client_limits(_plan(rate_per_second=400, workers=2), [_ONE, _ONE], cpus=8)
    assert text == "client limit: about 100,000 tokens/s with 2 workers, 1,000 open files each"
    assert beyond == []


def test_workers_share_the_cores_that_there_are() -> None:
    text, _ = client_limits(_plan(concurrency=4, workers=2), [_ONE, _ONE], cpus=1)
    assert "about 50,000 tokens/s" in text


@pytest.mark.parametrize("ramp", [{}, {"first_rate_per_second": 900, "ramp_seconds": 5}])
def test_a_rate_of_more_tokens_than_the_client_reads_is_named_before_the_run(ramp: dict[str, Any]) -> None:
    rate = 100 if ramp else 900
    (complaint,) = client_limits(_plan(rate_per_second=rate, **ramp), [_ONE], cpus=8)[1]
    assert "offers up to 90,000 tokens/s" in complaint
    assert "--workers" in complaint


def test_more_users_than_open_files_are_named_before_the_run() -> None:
    plan = _plan(concurrency=3000, workers=2)
    assert files_of(plan, 0) == 1564
    (complaint,) = client_limits(plan, [_ONE, _ONE], cpus=8)[1]
    assert "1,564 open files" in complaint
    assert "allows 1,000" in complaint


def test_a_process_takes_all_open_files_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, hard), hard))
    try:
        assert raise_file_limit(100) == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
