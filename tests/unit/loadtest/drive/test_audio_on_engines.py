"""Uploads of audio to a simulated engine and to recorded answers, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.target import Target
from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.report.schema import Results
from tests.unit.loadtest.drive.recorded import RecordedServer, Recording, drive, stream, summarised, whole

pytestmark = pytest.mark.virtual_time


def _plan(url: str, **options: Any) -> Plan:
    given = {"endpoint": "transcriptions", "concurrency": "1", "requests": 4} | options
    asked = RunOptions(url=url, warmup=0, **given)
    return asked.plan(url, Target(["sim"]), asked.loads()[0], 1)


async def _sent(**options: Any) -> Sequence[Record]:
    async with SimulatedEngine(EngineConfig(), seed=1) as engine:
        return (await drive(_plan(engine.url, **options))).records


async def _results(answer: Recording, **options: Any) -> Results:
    async with RecordedServer(lambda _: answer) as server:
        plan = _plan(server.url, **options)
        harvest = await drive(plan)
    return summarised(plan, harvest)


@pytest.mark.parametrize("endpoint", ["transcriptions", "translations"])
async def test_audio_is_uploaded_and_answered_whole(endpoint: str) -> None:
    records = await _sent(endpoint=endpoint, audio_seconds="5:20")
    assert [record.outcome for record in records] == ["ok"] * 4, [record.detail for record in records]
    assert all(5 <= (record.audio_seconds or 0) <= 20 for record in records)
    assert all(record.first_token is None for record in records)


@pytest.mark.parametrize("endpoint", ["transcriptions", "translations"])
async def test_a_streamed_text_has_a_first_token_and_usage(endpoint: str) -> None:
    records = await _sent(endpoint=endpoint, stream=True)
    assert [record.outcome for record in records] == ["ok"] * 4, [record.detail for record in records]
    assert all(record.sent < (record.first_token or 0) < record.end for record in records)
    assert {record.completion_tokens for record in records} == {6}
    assert {record.events for record in records} == {6}


async def test_audio_goes_beside_chats_in_a_mix() -> None:
    records = await _sent(mix="chat=0.5,transcriptions=0.5", requests=20, endpoint="chat", max_tokens=4)
    assert all(record.ok for record in records)
    assert {record.part: record.audio_seconds for record in records} == {"chat": None, "transcriptions": 10}


async def test_the_real_time_factor_is_audio_by_time_and_ttft_that_of_the_stream() -> None:
    answer = stream(0.5, 1.0, 2.0)
    results = await _results(answer, concurrency="3", requests=12, audio_seconds="10", stream=True)
    assert results.requests.succeeded == 12
    # Three at a time take 2 s each. The steady part, from 2 to 8 s, has the ends of all of them.
    assert results.audio is not None
    assert results.audio.seconds == 120
    assert results.audio.seconds_per_second == pytest.approx(120 / 6)
    assert results.audio.request_seconds_per_second == pytest.approx(10 / 2)
    assert results.steady is not None
    assert (results.steady.start, results.steady.end) == pytest.approx((2, 8))
    assert results.latency.ttft is not None
    assert results.latency.ttft.p50 == pytest.approx(500)
    assert not any("usage" in warning for warning in results.verdict.warnings)


async def test_silence_is_an_answer_and_its_length_is_what_the_server_counts(tmp_path: Any) -> None:
    (tmp_path / "one.mp3").write_bytes(b"ID3")
    answer = whole({"text": "", "usage": {"type": "duration", "seconds": 7}}, at=0.5)
    results = await _results(answer, dataset=tmp_path, requests=2)
    assert results.requests.succeeded == 2
    assert results.audio is not None
    assert results.audio.seconds == 14
    assert results.audio.request_seconds_per_second == pytest.approx(14)
    assert not any("usage" in warning for warning in results.verdict.warnings)


async def test_an_answer_without_text_is_no_success() -> None:
    results = await _results(whole({"hello": "world"}), requests=1)
    assert results.requests.errors == {"bad_body": 1}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"endpoint": "transcriptions", "workload": "unique"}, "belong together"),
        ({"workload": "audio"}, "belong together"),
        ({"endpoint": "transcriptions", "workload": "texts"}, "workload texts is for"),
        ({"endpoint": "transcriptions", "audio_seconds": "0"}, "audio-seconds 0"),
    ],
)
def test_options_that_do_not_fit_audio_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RunOptions(url="http://any", **given)


def test_a_folder_is_for_audio_only(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="a folder as --dataset holds audio"):
        RunOptions(url="http://any", dataset=tmp_path)
