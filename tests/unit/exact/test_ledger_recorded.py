"""What a real engine's recorded events say it holds is what it then reported to have used."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.features.exact.events import Ledger, read_events, read_frames
from gateway.features.exact.index import ExactIndex, packed, token_keys, token_seed

RECORDINGS = Path(__file__).resolve().parents[2] / "contract" / "recordings"


def recording(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def batches_of(exchange: dict[str, Any]) -> list[list[bytes]]:
    return [
        [batch["topic"].encode(), bytes.fromhex(batch["seq"]), bytes.fromhex(batch["payload"])]
        for batch in exchange["batches"]
    ]


@pytest.mark.parametrize("name", ["kv_events", "kv_events_ranks"])
def test_the_predicted_hit_is_the_reported_one(name: str) -> None:
    document = recording(name)
    ledgers, index, size = [Ledger(), Ledger()], ExactIndex(), document["block_size"]
    index.set_live(0, True)
    index.set_live(1, True)
    hits = []
    for exchange in document["exchanges"]:
        answer = exchange["answer"] if isinstance(exchange["answer"], dict) else {}
        tokens = exchange["tokenize"]["tokens"] if "tokenize" in exchange else exchange["request"].get("prompt")
        if (usage := answer.get("usage")) is not None:
            seed = token_seed(None, exchange["request"].get("cache_salt"))
            depths = index.depths(token_keys(packed(tokens), size, seed))
            hit = usage["prompt_tokens_details"]["cached_tokens"]
            predictions = [min(depth, (len(tokens) - 1) // size) * size for depth in depths]
            rank = exchange["headers"].get("X-data-parallel-rank", "0")
            assert hit == predictions[int(rank)] if rank in ("0", "1") else hit in predictions, exchange["name"]
            hits.append(hit)
        for frames in batches_of(exchange):
            _, _, payload = read_frames(frames)
            engine = msgspec.msgpack.decode(payload)[2] or 0
            for event in read_events(payload):
                ledgers[engine].update(event)
            _, added, removed = ledgers[engine].take()
            index.update(engine, added, removed)
    assert len(hits) > 2
    assert max(hits) > 0
    assert [ledger.ignored_events for ledger in ledgers] == [0, 0]


def test_what_a_replay_brings_is_what_came_live() -> None:
    document = recording("kv_events")
    live = [frames for exchange in document["exchanges"] for frames in batches_of(exchange)]
    whole = next(replay["messages"] for replay in document["replays"] if replay["start"] == 0)
    replayed = [[bytes.fromhex(frame) for frame in frames] for frames in whole]
    assert [frames[1:] for frames in replayed[:-1]] == live
