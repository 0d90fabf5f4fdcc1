"""The simulated engine's KV events are those of the recorded real one.

`recordings/kv_events.json` is a session with a stock engine whose cache holds 16 blocks; `kv_events_ranks.json` is one
with two data-parallel ranks, which tells hashes as bytes. An exchange is a request, its answer, its prompt's tokens and
the frames that it made the engine publish; a replay has all frames of one answer. Frames are hexadecimal.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from loadtest.engine import EngineConfig, Limits, SimulatedEngine
from loadtest.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, KvEventsConfig, encoder
from tests.contract.cases import COMPLETION_PATH, MODEL, Case, get
from tests.contract.exchange import ask
from tests.contract.recording import RECORDINGS, load
from tests.contract.shape import header_shape
from tests.contract.test_simulated_engine import metric_labels

DEADLINE_SECONDS = 10.0
STOCK: dict[str, Any] = json.loads((RECORDINGS / "kv_events.json").read_text())
RANKS: dict[str, Any] = json.loads((RECORDINGS / "kv_events_ranks.json").read_text())
STOCK_BLOCKS = 16
FIELDS = ("max_tokens", "cache_salt", "vllm_xargs", "session_id")  # of the requests, what changes events

Payload = list[Any]


def config(session: dict[str, Any], num_blocks: int, ranks: int = 1) -> EngineConfig:
    """A simulated engine like the recorded one."""
    limits = Limits(
        max_num_seqs=4, max_num_batched_tokens=2048, block_size=session["block_size"], num_blocks=num_blocks
    )
    return EngineConfig(
        model=MODEL,
        limits=limits,
        time_scale=0,
        max_model_len=512,
        dev_mode=True,
        data_parallel_size=ranks,
        kv_events=KvEventsConfig("tcp://*:0", "tcp://*:0", topic=session["kv_event_sources"]["0"]["topic"]),
    )


@pytest.fixture
async def stock() -> AsyncIterator[SimulatedEngine]:
    """The simulated twin of the first session's engine."""
    async with SimulatedEngine(config(STOCK, STOCK_BLOCKS)) as engine:
        yield engine


@pytest.fixture
async def ranks() -> AsyncIterator[SimulatedEngine]:
    """The simulated twin of the second session's engine."""
    async with SimulatedEngine(config(RANKS, 32_768, ranks=2)) as engine:
        yield engine


def recorded_payloads() -> list[bytes]:
    """Every batch of both sessions."""
    exchanges = [*STOCK["exchanges"], *RANKS["exchanges"]]
    return [bytes.fromhex(batch["payload"]) for exchange in exchanges for batch in exchange["batches"]]


@pytest.mark.parametrize("payload", recorded_payloads(), ids=lambda payload: f"{len(payload)} bytes")
def test_a_recorded_batch_is_encoded_as_it_was(payload: bytes) -> None:
    events_of = tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int]
    unix_seconds, events, rank = msgspec.msgpack.decode(payload, type=events_of)
    assert encoder(Encoding.MAP)(unix_seconds, events, rank) == payload


def as_completion(exchange: dict[str, Any]) -> Case:
    """The same tokens, salt, session and report mode, as a completion: its prompt may be token ids."""
    request = exchange["request"]
    if request["path"] == "/reset_prefix_cache":
        return Case("reset", "/reset_prefix_cache", {})
    prompt = exchange["tokenize"]["tokens"] if "tokenize" in exchange else request["prompt"]
    wanted = {name: request[name] for name in FIELDS if name in request}
    return Case(exchange["name"], COMPLETION_PATH, {"model": MODEL, "prompt": prompt, "ignore_eos": True, **wanted})


async def replayed(engine: SimulatedEngine, rank: int, start: int) -> list[list[bytes]]:
    """All frames of an answer to a replay request."""
    assert engine.service.kv_events is not None
    context = zmq.asyncio.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.connect(engine.service.kv_events.sources()[str(rank)]["replay_endpoint"])
        await client.send_multipart([b"", start.to_bytes(8, "big")])
        messages: list[list[bytes]] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not messages or messages[-1][2] != b"\xff" * 8:
                messages.append(await client.recv_multipart())
        return messages
    finally:
        context.destroy(linger=0)


class Comparable:
    """Batches with hashes numbered as they appear and without time: two engines hash differently, not otherwise."""

    def __init__(self, prompt_tokens: set[int]) -> None:
        self._numbers: dict[int | bytes, int] = {}
        self._prompt_tokens = prompt_tokens

    def events(self, payload: bytes) -> Payload:
        """The events and the rank. Output tokens become None: each engine says something else."""
        _, events, rank = msgspec.msgpack.decode(payload)
        return [[self._event(event) for event in events], rank]

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        renamed = dict(event)
        if "block_hashes" in event:
            renamed["block_hashes"] = [self._number(block) for block in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            renamed["parent_block_hash"] = self._number(event["parent_block_hash"])
        if "token_ids" in event:
            renamed["token_ids"] = [token if token in self._prompt_tokens else None for token in event["token_ids"]]
        return renamed

    def _number(self, block: int | bytes) -> int:
        return self._numbers.setdefault(block, len(self._numbers))


async def test_the_recorded_session_makes_the_same_batches(stock: SimulatedEngine) -> None:
    assert stock.service.kv_events is not None
    [publisher] = stock.service.kv_events.by_rank
    published: dict[str, int] = {}
    for exchange in STOCK["exchanges"]:
        before, case = publisher.next_seq, as_completion(exchange)
        answer = await asyncio.to_thread(ask, stock.url, case)
        assert answer["status"] == exchange["status"] == 200
        published[exchange["name"]] = publisher.next_seq - before
        if case.path == COMPLETION_PATH:
            real, simulated = exchange["answer"]["usage"], answer["json"]["usage"]
            assert simulated["prompt_tokens_details"]["cached_tokens"] == real["prompt_tokens_details"]["cached_tokens"]
            assert simulated["completion_tokens"] == real["completion_tokens"]
    assert published == {exchange["name"]: len(exchange["batches"]) for exchange in STOCK["exchanges"]}

    prompt_tokens = {token for e in STOCK["exchanges"] for token in (as_completion(e).body or {}).get("prompt", ())}
    choices = [choice for e in STOCK["exchanges"] for choice in (e["answer"] or {}).get("choices", ())]
    prompt_tokens -= {token for choice in choices for token in choice["token_ids"]}
    recorded_batches, ours = Comparable(prompt_tokens), Comparable(prompt_tokens)
    sent = [message[3] for message in await replayed(stock, 0, 0)][:-1]
    recorded = [bytes.fromhex(batch["payload"]) for exchange in STOCK["exchanges"] for batch in exchange["batches"]]
    assert [ours.events(payload) for payload in sent] == [recorded_batches.events(payload) for payload in recorded]


@pytest.mark.parametrize("start", [replay["start"] for replay in STOCK["replays"]])
async def test_a_replay_has_the_recorded_frames(stock: SimulatedEngine, start: int) -> None:
    for exchange in STOCK["exchanges"]:
        await asyncio.to_thread(ask, stock.url, as_completion(exchange))
    [recorded] = [replay["messages"] for replay in STOCK["replays"] if replay["start"] == start]
    without_payload = [[frame.hex() for frame in message[:3]] for message in await replayed(stock, 0, start)]
    assert without_payload == [message[:3] for message in recorded]
    assert recorded[-1][3] == ""


@pytest.mark.parametrize("session", [STOCK, RANKS], ids=["one rank", "two ranks"])
async def test_sources_are_told_as_recorded(
    stock: SimulatedEngine, ranks: SimulatedEngine, session: dict[str, Any]
) -> None:
    engine = stock if session is STOCK else ranks
    answer = await asyncio.to_thread(ask, engine.url, get("sources", "/kv_event_sources"))
    assert header_shape(answer["headers"]) == header_shape(load("kv_event_sources")["headers"])
    simulated, real = answer["json"], session["kv_event_sources"]
    ports = dict.fromkeys(("endpoint", "replay_endpoint"), "tcp://...")
    assert {rank: {**source, **ports} for rank, source in simulated.items()} == {
        rank: {**source, **ports} for rank, source in real.items()
    }
    assert all(source[name].startswith("tcp://") for source in simulated.values() for name in ports)


@pytest.mark.parametrize("exchange", RANKS["exchanges"], ids=lambda exchange: exchange["name"])
async def test_a_rank_is_answered_as_recorded(ranks: SimulatedEngine, exchange: dict[str, Any]) -> None:
    body = {name: value for name, value in exchange["request"].items() if name != "path"}
    case = Case(exchange["name"], exchange["request"]["path"], body, headers=exchange["headers"])
    answer = await asyncio.to_thread(ask, ranks.url, case)
    assert answer["status"] == exchange["status"]
    if exchange["name"] in ("rank_0", "rank_1", "rank_bad"):
        assert answer["json"]["system_fingerprint"].startswith(f"vllm-{ranks.config.version}-dp2-")
        assert exchange["answer"]["system_fingerprint"].startswith(f"vllm-{RANKS['version']}-dp2-")
    else:
        assert (answer.get("json") or answer.get("events")) == exchange["answer"]


async def test_the_metrics_of_two_ranks_are_labelled_as_recorded(ranks: SimulatedEngine) -> None:
    page = (await asyncio.to_thread(ask, ranks.url, get("metrics", "/metrics")))["text"]
    lines = [line for line in page.splitlines() if line.startswith("vllm:")]
    real = {tuple(series(line)) for line in RANKS["metrics"]}
    simulated = {tuple(series(line)) for line in lines if "_bucket{" not in line and "_created{" not in line}
    assert simulated <= real, "samples that a real engine does not have"
    assert {name for name, *_ in simulated} == set(metric_labels(page)) & {name for name, *_ in real}
    assert {labels for name, labels in simulated if name == "vllm:cache_config_info"} == {'engine="0"', 'engine="1"'}


def series(line: str) -> tuple[str, str]:
    """A sample's name and those of its labels that tell series apart, model and cache configuration left out."""
    name, _, rest = line.partition("{")
    labels = rest.rpartition("}")[0].split(",")
    kept = ("engine=", "source=", "reason=", "finished_reason=", "sleep_state=")
    return name, ",".join(label for label in labels if label.startswith(kept))
