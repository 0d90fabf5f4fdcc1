"""Requests of files and of every endpoint, on simulated engines in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.client import ResponseWatch, open_session
from loadtest.drive.driver import Driver
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.spelling import Load
from loadtest.drive.target import Target
from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.workloads.bodies import DatasetError
from tests.unit.loadtest.drive.recorded import RecordedServer, seconds_from_now, stream

pytestmark = pytest.mark.virtual_time

ONE = {"role": "user", "content": "one"}
TWO = {"role": "user", "content": "two"}
GENERATED = [
    {"messages": [ONE], "max_tokens": 4, "stream": True},
    {"url": "/v1/chat/completions", "body": {"model": "sim", "messages": [ONE], "max_tokens": 4}},
    {"prompt": "once", "max_tokens": 4, "stream": True},
    {"input": "say it", "max_output_tokens": 4, "stream": True},
    {"input": [ONE], "max_output_tokens": 4},
]
POOLED = [{"input": ["a", "b"]}, {"query": "q", "documents": ["a", "b"]}, {"text_1": "q", "text_2": ["a", "b"]}]


async def driven(options: RunOptions, url: str) -> list[Record]:
    plan = options.plan(url, Target(["sim"]), Load("c1", {"concurrency": 1}), 0)
    return await sent(plan)


async def sent(plan: Plan) -> list[Record]:
    records: list[Record] = []
    clock = seconds_from_now()
    async with open_session(plan, clock) as session:
        driver = Driver(plan, 0, session, clock=clock, emit=records.append)
        warmed = await driver.warm_up()
        await driver.run()
    assert all(record.ok for record in warmed + records), [r.detail for r in warmed + records if not r.ok]
    return records


def dataset(folder: Path, lines: list[dict[str, Any]], **more: Any) -> RunOptions:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = RunOptions(url="http://any", dataset=path, concurrency="1", **more)
    options.check_files()
    return options


async def test_bodies_of_a_file_go_to_their_endpoints_and_are_measured(tmp_path: Path) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0), seed=1) as engine:
        records = await driven(dataset(tmp_path, GENERATED), engine.url)
    assert [record.completion_tokens for record in records] == [4] * 5
    assert [record.first_token is not None for record in records] == [True, False, True, True, False]
    assert all(record.prompt_tokens for record in records)


async def test_asked_for_explicitly_all_are_streamed(tmp_path: Path) -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0), seed=1) as engine:
        records = await driven(dataset(tmp_path, GENERATED, stream=True), engine.url)
    assert all(record.first_token is not None and record.completion_tokens == 4 for record in records)


async def test_inputs_and_documents_are_sent_to_an_embedding_model(tmp_path: Path) -> None:
    async with SimulatedEngine(EngineConfig(model="sim", embedding=True, time_scale=0), seed=1) as engine:
        records = await driven(dataset(tmp_path, POOLED), engine.url)
    assert len(records) == 3
    assert all(record.prompt_tokens and record.first_token is None for record in records)


async def test_an_agent_gets_its_own_answers_and_thinks_between_turns(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "recorded"}
    lines = [
        {"session_id": 1, "messages": [ONE], "max_tokens": 2, "stream": True},
        {"session_id": 1, "think_s": 0.2, "messages": [ONE, said, TWO], "max_tokens": 2, "stream": True},
    ]
    async with RecordedServer(lambda _: stream(0.5, 1.0)) as server:
        first, second = await driven(dataset(tmp_path, lines, warmup=0), server.url)
    assert (first.turn, second.turn) == (0, 1)
    assert (first.end, second.sent, second.end) == pytest.approx((1.0, 1.2, 2.2))
    assert server.bodies[1]["messages"] == [ONE, {"role": "assistant", "content": "word word "}, TWO]


@pytest.mark.parametrize(("endpoint", "embedding"), [("responses", False), ("rerank", True), ("score", True)])
async def test_made_up_prompts_of_every_endpoint(endpoint: str, embedding: bool) -> None:
    config = EngineConfig(embedding=embedding, time_scale=0)
    options = RunOptions(
        url="http://any", endpoint=endpoint, concurrency="1", requests=3, max_tokens=4, output_spread=0
    )
    async with SimulatedEngine(config, seed=1) as engine:
        records = await driven(options, engine.url)
    assert all((record.first_token is None) == embedding for record in records)


@pytest.mark.parametrize(
    ("events", "error", "done"),
    [
        ('data: {"type":"response.failed","response":{"error":{"message":"broke"},"usage":null}}', "broke", True),
        ('data: {"type":"error","message":"broke"}', "broke", False),
        ('data: {"type":"response.incomplete","response":{"error":null,"usage":{"output_tokens":1}}}', None, True),
    ],
)
def test_how_a_response_may_end(events: str, error: str | None, done: bool) -> None:
    watch = ResponseWatch(keeps_text=True)
    watch.feed(b'event: x\ndata: {"type":"response.output_text.delta","delta":"wo"}\n\n', 1.0)
    watch.feed(events.encode() + b"\n\n", 2.0)
    assert (watch.text(), watch.first_content, watch.events) == ("wo", 1.0, 1)
    assert (watch.error, watch.done) == (error, done)


def test_files_and_workloads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out --workload"):
        dataset(tmp_path, GENERATED, workload="sharegpt")
    with pytest.raises(ValueError, match="needs a file"):
        RunOptions(url="http://any", workload="bodies")
    options = RunOptions(url="http://any", trace=dataset(tmp_path, GENERATED).dataset)
    with pytest.raises(DatasetError, match="lines have no timestamp"):
        options.check_files()
    options.model_copy(update={"rate": "5"}).check_files()
