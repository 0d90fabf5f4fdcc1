"""Runs that would mislead: a client at its limit, a backend that stalls, and chunks that are not tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from loadtest.drive.plan import Plan
from loadtest.report.schema import Results
from tests.unit.loadtest.drive.recorded import (
    DONE,
    END,
    HEAD,
    WORD,
    Answer,
    Asked,
    RecordedServer,
    Recording,
    chunk,
    drive,
    event,
    stream,
    summarised,
    usage,
)
from tests.unit.loadtest.virtual_network import VirtualNetwork

pytestmark = pytest.mark.virtual_time

_STALL = 0.24, 1.74  # no request is due at either end of it


async def _results(answer: Answer, *alongside: Coroutine[Any, Any, None], **more: Any) -> Results:
    """What is reported of a run."""
    workload = {"groups": 3, "prefix_tokens": 20, "tail_tokens": 5, "max_tokens": 8}
    async with RecordedServer(answer) as server:
        plan = Plan.model_validate({"url": server.url, "model": "m", "workload": workload, **more})
        harvest = await drive(plan, *alongside)
    return summarised(plan, harvest)


async def test_a_client_that_cannot_keep_up_fails_the_run_whatever_the_server_did() -> None:
    async def busy() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualNetwork)
        while True:
            loop.hold_up(0.08)  # what decoding, hashing, or a loop without awaits does to a client
            await asyncio.sleep(0.02)

    run = {"rate_per_second": 50, "arrivals": "constant", "requests": 50}
    results = await _results(lambda _: stream(0.001), busy(), **run)
    assert results.requests.succeeded == 50
    # Four of the five requests of each tenth of a second are due while the loop stands still.
    assert results.client.send_lag is not None
    assert results.client.send_lag.max == pytest.approx(80)
    assert results.requests.late == 40
    assert not results.verdict.valid
    assert not results.verdict.passed
    assert any("event loop lag" in reason for reason in results.verdict.reasons)
    assert any("sent late" in reason for reason in results.verdict.reasons)


async def test_a_client_that_keeps_up_is_late_with_nothing() -> None:
    results = await _results(lambda _: stream(0.001), rate_per_second=50, arrivals="constant", requests=50)
    assert results.client.send_lag is not None
    assert results.client.send_lag.max == pytest.approx(0, abs=1e-6)
    assert results.client.workers[0].loop_lag_max == pytest.approx(0, abs=1e-6)
    assert results.requests.late == 0
    assert results.verdict.passed


def _in_a_stall(asked: Asked) -> Recording:
    """Answers at once, but for those that come in the stall: they get theirs at its end."""
    began, ended = _STALL
    return stream(ended - asked.at if began <= asked.at < ended else 0.0)


async def test_an_open_loop_holds_a_stall_against_every_request_that_was_due_in_it() -> None:
    results = await _results(_in_a_stall, rate_per_second=32, arrivals="constant", requests=80)
    assert results.requests.offered == 80
    latency = results.latency.ttft_from_intended
    assert latency is not None
    # 48 of the 80 were due in the stall, and waited for 1490, 1458.75, and so on down to 21.25 ms.
    assert latency.max == pytest.approx(1490)
    assert latency.p90 == pytest.approx(1490 - 8 * 31.25)
    assert latency.p50 == pytest.approx(1490 - 40 * 31.25)
    assert latency.mean == pytest.approx(sum(21.25 + 31.25 * number for number in range(48)) / 80)
    (stall,) = results.stalls
    assert (stall.start, stall.seconds) == pytest.approx((0.25, 1.49))
    assert stall.in_flight == 48
    assert any("nothing came for" in warning for warning in results.verdict.warnings)


async def test_a_closed_loop_hides_a_stall_from_its_percentiles_and_the_verdict_says_so() -> None:
    def answer(asked: Asked) -> Recording:
        return _in_a_stall(asked).later(0.0625)

    results = await _results(answer, concurrency=2, duration_seconds=4)
    latency = results.latency.ttft_from_intended
    assert latency is not None
    assert (latency.p90, latency.max) == pytest.approx((62.5, 1552.5))
    (stall,) = results.stalls
    assert stall.seconds == pytest.approx(1.5525)
    assert stall.in_flight == 2
    assert any("percentiles hide" in warning for warning in results.verdict.warnings)


async def test_a_backend_that_puts_several_tokens_into_a_chunk_has_no_itl_and_a_tpot_from_usage() -> None:
    results = await _results(lambda _: stream(0.5, 0.75, 1.0, 1.25, tokens=8), concurrency=1, requests=5)
    assert results.streaming is not None
    assert results.streaming.tokens_per_event == 2
    assert results.latency.itl is None
    assert results.latency.tpot is not None
    assert results.latency.tpot.count == 5
    assert results.latency.tpot.p50 == pytest.approx(750 / 7)
    assert any("2.00 tokens an event" in warning for warning in results.verdict.warnings)


async def test_a_proxy_that_collects_a_stream_is_found_out() -> None:
    at_once = HEAD + chunk(*[event(WORD)] * 8, event(usage(8)), DONE) + END
    results = await _results(lambda _: Recording([(0.5, at_once)]), concurrency=1, requests=5)
    assert results.latency.itl is None
    assert results.latency.tpot is None
    assert any("came in one piece" in warning for warning in results.verdict.warnings)
