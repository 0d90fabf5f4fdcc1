"""Prompts of a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.workloads.prompts import NO_GROUP, WorkloadSpec
from loadtest.workloads.sources import TraceSource
from loadtest.workloads.trace import TraceError

_BLOCK_BYTES = 16 * 5


def _source(path: Path, rows: list[dict[str, Any]]) -> TraceSource:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    file = {"path": str(path), "sha256": ""}
    return TraceSource(
        WorkloadSpec.model_validate({"kind": "trace", "bytes_per_token": 5, "block_tokens": 16, "file": file})
    )


def _mooncake(at_ms: int, tokens: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 7, "hash_ids": list(ids)}


def test_equal_hashes_are_equal_text_and_others_differ_from_their_first_bytes(tmp_path: Path) -> None:
    rows = [_mooncake(0, 40, 1, 2, 9), _mooncake(500, 48, 1, 2, 3), _mooncake(2000, 20, 4, 8), _mooncake(2500, 9)]
    source = _source(tmp_path / "t.jsonl", rows)
    texts = [next(source.turns(index)).prompt.tail for index in range(4)]
    shared = 2 * _BLOCK_BYTES
    assert texts[0][:shared] == texts[1][:shared]
    assert texts[0][shared : shared + 12] != texts[1][shared : shared + 12]
    assert texts[2][:4] != texts[0][:4]
    assert len(texts[1]) == pytest.approx(48 * 5, abs=6)
    assert source.count == 4


def test_a_prompt_has_the_recorded_lengths_times_and_first_block(tmp_path: Path) -> None:
    source = _source(tmp_path / "t.jsonl", [_mooncake(3000, 40, 1, 2, 9), _mooncake(3100, 9)])
    assert source.arrivals_seconds == pytest.approx([0.0, 0.1])
    prompts = [next(source.turns(index)).prompt for index in range(2)]
    assert [(prompt.asked_tokens, prompt.max_tokens, prompt.group) for prompt in prompts] == [
        (40, 7, 1),
        (9, 7, NO_GROUP),
    ]


def test_times_that_were_rounded_are_spread_and_still_in_order(tmp_path: Path) -> None:
    rows = [_mooncake(at, 16 + number, number, 99, 98) for number, at in enumerate([0] * 20 + [3000] * 20)]
    source = _source(tmp_path / "t.jsonl", rows)
    assert list(source.arrivals_seconds) == sorted(source.arrivals_seconds)
    assert 2 < max(source.arrivals_seconds[:20]) < 3 < min(source.arrivals_seconds[20:])
    assert {next(source.turns(index)).prompt.asked_tokens for index in range(20)} == set(range(16, 36))


def test_two_processes_make_the_same_text(tmp_path: Path) -> None:
    rows = [_mooncake(0, 40, 1, 2, 9)]
    first, second = _source(tmp_path / "a.jsonl", rows), _source(tmp_path / "b.jsonl", rows)
    assert list(first.turns(0)) == list(second.turns(0))


def test_a_session_is_one_conversation_with_its_pauses(tmp_path: Path) -> None:
    def row(session: int, arrival: float, think: float, tokens: int, *ids: int) -> dict[str, Any]:
        return {
            "session_id": session,
            "arrival": arrival,
            "think_s": think,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": list(ids),
        }

    rows = [row(7, 4.0, 0.0, 32, 1, 2), row(5, 1.0, 0.0, 16, 1), row(7, 4.0, 2.5, 48, 1, 2, 3)]
    source = _source(tmp_path / "t.jsonl", rows)
    assert source.count == 2
    assert source.arrivals_seconds == [1.0, 4.0]  # kept: only requests are moved to begin at 0
    first, second = source.turns(1)
    assert (first.pause_seconds, second.pause_seconds) == (0.0, 2.5)
    assert second.prompt.tail.startswith(first.prompt.tail[: 2 * _BLOCK_BYTES])


def test_a_warm_up_is_of_the_usual_length_and_like_no_prompt(tmp_path: Path) -> None:
    source = _source(tmp_path / "t.jsonl", [_mooncake(0, 32, 1, 2), _mooncake(9, 64, 1, 2, 3, 4)])
    warm = source.warmup(0).tail
    assert len(warm) == 48 * 5
    assert warm[:8] != next(source.turns(0)).prompt.tail[:8]


def test_a_trace_that_cannot_be_read_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl:1"):
        _source(tmp_path / "t.jsonl", [{"when": 1}])
