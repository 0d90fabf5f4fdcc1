"""Workloads on simulated engines in virtual time: what is meant to be shared is found in their caches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.engine import EngineConfig, Limits, SimulatedEngine
from loadtest.report.summarise import routing
from tests.unit.loadtest.drive.recorded import drive

pytestmark = pytest.mark.virtual_time

_BYTES_PER_TOKEN = 4.0


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """An engine that takes no time."""
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=4096, block_size=16, num_blocks=5000)
    config = EngineConfig(model="sim", limits=limits, time_scale=0, max_model_len=16384)
    async with SimulatedEngine(config, seed=1) as running:
        yield running


@pytest.fixture
async def embedder() -> AsyncIterator[SimulatedEngine]:
    """An engine with an embedding model."""
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=4096, block_size=16, num_blocks=5000)
    config = EngineConfig(model="emb", limits=limits, time_scale=0, max_model_len=512, embedding=True)
    async with SimulatedEngine(config, seed=1) as running:
        yield running


async def records_of(plan: Plan) -> list[Record]:
    """One worker's records, in order of their index and turn."""
    records = (await drive(plan)).records
    assert all(record.ok for record in records), [record.detail for record in records if not record.ok]
    return records


def plan_for(engine: SimulatedEngine, workload: dict[str, Any], **more: Any) -> Plan:
    """A plan that ends with its requests."""
    workload = {"bytes_per_token": _BYTES_PER_TOKEN, "max_tokens": 4, **workload}
    return Plan.model_validate({"url": engine.url, "model": "sim", "workload": workload} | more)


def trace_file(folder: Path, rows: list[tuple[int, int, list[int]]]) -> dict[str, str]:
    """A trace in Mooncake's format, of (milliseconds, prompt tokens, block hashes)."""
    path = folder / "trace.jsonl"
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text(
        "\n".join(json.dumps(dict(zip(fields, (at, length, 3, ids), strict=True))) for at, length, ids in rows)
    )
    return {"path": str(path), "sha256": ""}


async def test_a_trace_is_sent_at_its_times_and_its_shared_blocks_are_hits(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    file = trace_file(tmp_path, [(0, 1100, [1, 2, 3]), (400, 1600, [1, 2, 4, 5]), (800, 1100, [7, 8, 9])])
    records = await records_of(plan_for(engine, {"kind": "trace", "file": file}, trace_speed=2.0))
    assert [record.intended for record in records] == [0.0, 0.2, 0.4]
    assert [record.sent for record in records] == pytest.approx([0.0, 0.2, 0.4])
    cached = [record.cached_tokens or 0 for record in records]
    assert cached[0] < 64
    assert 0.9 * 1024 < cached[1] < 1.3 * 1024
    assert cached[2] < 64


async def test_users_send_a_trace_in_its_order_where_a_closed_loop_is_asked_for(
    engine: SimulatedEngine, tmp_path: Path
) -> None:
    file = trace_file(tmp_path, [(0, 600, [1, 2]), (90_000, 600, [1, 2]), (900_000, 600, [3, 4])])
    records = await records_of(plan_for(engine, {"kind": "trace", "file": file}, concurrency=1))
    assert [record.index for record in records] == [0, 1, 2]
    assert records[-1].end < 1
    assert (records[1].cached_tokens or 0) > 400


async def test_a_trace_at_another_rate_ends_with_its_last_request(engine: SimulatedEngine, tmp_path: Path) -> None:
    file = trace_file(tmp_path, [(0, 600, [1, 2]), (90_000, 600, [1, 2]), (900_000, 600, [3, 4])])
    load = {"rate_per_second": 50, "arrivals": "constant"}
    records = await records_of(plan_for(engine, {"kind": "trace", "file": file}, **load))
    assert [record.intended for record in records] == [0.0, 0.02, 0.04]


async def test_a_rate_ramp_ends_above_where_it_began(engine: SimulatedEngine) -> None:
    load = {"first_rate_per_second": 0, "rate_per_second": 100, "ramp_seconds": 1, "duration_seconds": 1}
    records = await records_of(plan_for(engine, {"prefix_tokens": 32}, arrivals="constant", **load))
    early = sum(record.intended < 0.5 for record in records)
    assert (early, len(records)) == (13, 50)


async def test_prefix_repetition_asks_for_every_prefix_equally_often(engine: SimulatedEngine) -> None:
    workload = {"kind": "prefix-repetition", "groups": 5, "prefix_tokens": 320, "tail_tokens": 16}
    records = await records_of(plan_for(engine, workload, concurrency=1, requests=20))
    assert sorted(record.group for record in records) == sorted(list(range(5)) * 4)
    assert [record.group for record in records[:5]] != [record.group for record in records[5:10]]
    assert sum((record.cached_tokens or 0) >= 256 for record in records) == 15


async def test_a_sessions_next_turn_finds_the_turns_and_answers_before_it_in_the_cache(engine: SimulatedEngine) -> None:
    workload = {"kind": "sessions", "turns": (3, 3), "groups": 1, "prefix_tokens": 64, "tail_tokens": 160}
    records = await records_of(plan_for(engine, workload | {"max_tokens": 40}, concurrency=2, requests=4))
    assert [(record.index, record.turn) for record in records] == [(i, t) for i in range(4) for t in range(3)]
    by_place = {(record.index, record.turn): record for record in records}
    for index in range(4):
        for turn in (1, 2):
            before, record = by_place[index, turn - 1], by_place[index, turn]
            assert record.sent == pytest.approx(before.end)
            said = (before.prompt_tokens or 0) + (before.completion_tokens or 0)
            assert (record.cached_tokens or 0) >= said - 48  # the chat template's words around an answer
    reported = routing(records, plan_for(engine, workload, concurrency=1, requests=1).workload)
    assert reported.ideal_hit_ratio == pytest.approx(reported.hit_ratio, abs=0.15)


async def test_a_thinking_user_sends_the_next_turn_when_the_pause_is_over_and_latency_counts_from_then(
    engine: SimulatedEngine,
) -> None:
    workload = {"kind": "sessions", "turns": (2, 2), "think_seconds": 0.05, "prefix_tokens": 16}
    first, second = await records_of(plan_for(engine, workload, concurrency=1, requests=1))
    assert second.intended > first.end
    assert second.sent == pytest.approx(second.intended)


async def test_a_session_ends_with_the_run(engine: SimulatedEngine) -> None:
    workload = {"kind": "sessions", "turns": (9, 9), "think_seconds": 1000.0, "prefix_tokens": 16}
    records = await records_of(
        plan_for(engine, workload, rate_per_second=50, arrivals="constant", duration_seconds=0.2)
    )
    assert [record.turn for record in records] == [0] * 10


async def test_a_mix_sends_its_parts_by_share_each_to_its_endpoint(engine: SimulatedEngine) -> None:
    part = {"endpoint": "chat", "stream": True, "model": "sim"}
    texts = {"kind": "texts", "tail_tokens": 8, "inputs": (2, 2)}
    mix = [
        part | {"name": "chat", "share": 3, "workload": {"prefix_tokens": 32, "max_tokens": 4}},
        part | {"name": "completions", "share": 1, "endpoint": "completions", "workload": texts | {"kind": "unique"}},
    ]
    records = await records_of(plan_for(engine, {}, concurrency=4, requests=200, mix=mix))
    chat = [record for record in records if record.part == "chat"]
    assert len(records) == 200
    assert 125 <= len(chat) <= 175
    assert {record.asked_tokens for record in chat} == {4}


async def test_embeddings_are_asked_for_in_lists(embedder: SimulatedEngine) -> None:
    workload = {"kind": "texts", "tail_tokens": 8, "inputs": (1, 16)}
    load = {"endpoint": "embeddings", "stream": False, "concurrency": 2, "requests": 30}
    records = await records_of(plan_for(embedder, workload, model="emb", **load))
    assert len({record.prompt_tokens for record in records}) > 5
    assert {record.asked_tokens for record in records} == {0}
