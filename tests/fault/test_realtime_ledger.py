"""Realtime sessions cost what their backend reports, as it comes, and an estimate where it reports nothing."""

import json
from typing import Any

import pytest
import websockets

from tests.fault.rig import UnderTest, holds
from tests.fault.test_ledger import LIMITS, books, keeping_books
from tests.fault.test_rate_limits import SECRET, limited
from tests.fault.test_realtime import APPEND, FINAL, close_code, connect, event, speaking, update
from tests.realtime_engine import RealtimeEngine

USAGE = {"prompt_tokens": 3, "total_tokens": 43, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 1}}
KEY = {"additional_headers": {"authorization": f"Bearer {SECRET}"}}
EXPECTED = 201  # tokens that a session is charged when it opens


def spent(under_test: UnderTest) -> int:
    return int(under_test.gateway.core.ledger.limits["limited"].spent()["day"][1])


async def transcribe(session: Any) -> dict[str, Any]:
    await session.send(FINAL)
    return await event(session)


async def test_a_session_costs_what_is_reported_of_all_its_transcriptions() -> None:
    async with RealtimeEngine(usage=USAGE) as engine, keeping_books(engine) as under_test:
        async with speaking(under_test, **KEY) as session:
            for number in range(1, 8):
                assert (await transcribe(session))["usage"] == USAGE
                assert spent(under_test) == max(EXPECTED, 43 * number)
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [7 * 43] * 5


async def test_a_session_whose_audio_is_too_short_for_a_token_costs_its_text() -> None:
    async with RealtimeEngine() as engine, keeping_books(engine) as under_test:
        async with speaking(under_test, **KEY) as session:
            await session.send(json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA"}))
            await event(session)
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [3] * 5  # two events, and 80 ms of audio


@pytest.mark.parametrize("seconds", [0, 300])
async def test_a_session_without_reports_costs_an_estimate_of_its_audio_and_its_text(seconds: int) -> None:
    async with RealtimeEngine() as engine, keeping_books(engine) as under_test:
        async with connect(under_test, **KEY) as session:
            await event(session)
            await session.send(update("scripted"))
            for _ in range(seconds // 30):
                await session.send(json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA" * 320_000}))
                assert (await event(session))["type"] == "transcription.delta"
            tokens = seconds * 12.5 + seconds // 30
            assert spent(under_test) >= max(EXPECTED, 0.99 * tokens)
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        found = books(under_test)
        assert found == [found[0]] * 5
        assert tokens * 0.99 <= found[0] <= tokens * 1.02


async def test_a_session_whose_key_has_no_tokens_left_is_ended_with_an_error_event() -> None:
    sections = limited(**LIMITS | {"tokens_per_day": 300})
    async with RealtimeEngine(usage=USAGE) as engine, keeping_books(engine, sections=sections) as under_test:
        async with speaking(under_test, **KEY) as session:
            for _ in range(7):
                assert (await transcribe(session))["usage"] == USAGE
            failure = await event(session)
            assert (failure["type"], failure["code"]) == ("error", "insufficient_quota")
            assert "300 tokens per day" in failure["error"]
            assert await close_code(session) == 1008
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        assert books(under_test) == [7 * 43] * 5
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(under_test, **KEY)
        assert json.loads(refused.value.response.body)["error"]["code"] == "insufficient_quota"
        assert under_test.outcomes == {"quota_exceeded": 2}


async def test_another_request_that_uses_up_the_budget_ends_a_session_too() -> None:
    sections = limited(**LIMITS | {"tokens_per_day": 700})
    async with (
        RealtimeEngine(usage=USAGE) as engine,
        keeping_books(engine, sections=sections) as under_test,
        speaking(under_test, **KEY) as first,
        speaking(under_test, **KEY) as other,
    ):
        for _ in range(10):
            await transcribe(first)
        for _ in range(7):
            await transcribe(other)
        assert (await event(other))["code"] == "insufficient_quota"
        assert await close_code(other) == 1008


async def test_a_session_that_breaks_off_costs_what_it_used_until_then() -> None:
    async with RealtimeEngine(usage=USAGE) as engine, keeping_books(engine) as under_test:
        async with speaking(under_test, **KEY) as session:
            for _ in range(6):
                await transcribe(session)
            engine.cut(engine.sessions[0])
            assert await close_code(session) == 1011
        await holds(lambda: not len(under_test.gateway.core.ledger), "its entry is closed")
        assert books(under_test) == [6 * 43] * 5


async def test_a_session_of_a_key_without_limits_is_counted_too() -> None:
    async with RealtimeEngine(usage=USAGE) as engine, keeping_books(engine) as under_test:
        async with speaking(under_test, additional_headers={"authorization": "Bearer sk-free"}) as session:
            await transcribe(session)
        await holds(lambda: under_test.in_flight == 0, "the slot is free")
        await holds(lambda: bool(under_test.outcomes), "its record")
        assert books(under_test) == [0, 0, 0, 43, 43]


async def test_the_rate_of_a_key_counts_a_session_that_runs() -> None:
    sections = limited(tokens_per_minute=250)
    async with (
        RealtimeEngine(usage=USAGE) as engine,
        keeping_books(engine, sections=sections) as under_test,
        speaking(under_test, **KEY) as session,
    ):
        for _ in range(7):
            await transcribe(session)
        await session.send(APPEND)
        assert (await event(session))["type"] == "transcription.delta"  # rates go into debt
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(under_test, **KEY)
        assert json.loads(refused.value.response.body)["error"]["code"] == "rate_limit_exceeded"
