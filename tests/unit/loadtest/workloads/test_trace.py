"""Traces are read as what they are, and bad lines are message."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from loadtest.workloads.trace import TraceError, read_trace


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "trace"
    text = (line if isinstance(line, str) else orjson.dumps(line).decode() for line in lines)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def _mooncake(at: int, prompt: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at, "input_length": prompt, "output_length": 7, "hash_ids": ids}


def test_mooncake_has_blocks_of_512_tokens_and_the_last_one_may_be_partial(tmp_path: Path) -> None:
    trace = read_trace(_file(tmp_path, _mooncake(5000, 1100, [0, 1, 2]), _mooncake(6500, 512, [0])))
    assert trace.block_tokens == 512
    assert [(row.at_seconds, row.prompt_tokens, row.keys) for row in trace.rows] == [
        (0.0, 1100, (0, 1)),
        (1.5, 512, (0,)),
    ]
    assert not trace.sessions


def test_a_timed_trace_has_seconds_and_the_blocks_that_fit_its_lengths(tmp_path: Path) -> None:
    rows = [_mooncake(1, 40, [0, 1, 2]), _mooncake(2, 16, [0])]
    rows[1]["timestamp"] = 2.25
    trace = read_trace(_file(tmp_path, *rows))
    assert trace.block_tokens == 16
    assert [(row.at_seconds, row.keys) for row in trace.rows] == [(0.0, (0, 1)), (1.25, (0,))]
    chat = {"chat_id": 7, "parent_chat_id": -1, "turn": 1, "type": "text"}
    whole = read_trace(_file(tmp_path, *(chat | _mooncake(at, 40, [0, 1, 2]) for at in (0, 3))))
    assert [row.at_seconds for row in whole.rows] == [0.0, 3.0]


def test_coarse_times_are_noticed_though_a_millisecond_off(tmp_path: Path) -> None:
    rows = [_mooncake(at, 600, [0]) for at in (0, 0, 3000, 5999, 5999, 9000, 12000)]
    assert read_trace(_file(tmp_path, *rows)).tick_seconds == 3.0
    rows.append(_mooncake(12100, 600, [0]))
    assert read_trace(_file(tmp_path, *rows)).tick_seconds == 0.0


def test_the_scaled_derivative_is_shown_by_its_longest_prompt(tmp_path: Path) -> None:
    def row(at: float, prompt: int, ids: list[int]) -> dict[str, object]:
        return {
            "t": at,
            "n_blocks": len(ids),
            "tail_tokens": prompt % 16,
            "input_tokens": prompt,
            "output_tokens": 3,
            "hash_ids": ids,
        }

    trace = read_trace(_file(tmp_path, row(0.0, 9, []), row(1.0, 211, list(range(13)))))
    assert trace.block_tokens == 16
    assert trace.rows[1].keys == tuple(range(13))


def test_sessions_keep_their_turns_and_think_times(tmp_path: Path) -> None:
    def turn(session: int, think: float, prompt: int) -> dict[str, object]:
        return {
            "session_id": session,
            "arrival": 2.0 + session,
            "think_s": think,
            "input_length": prompt,
            "output_length": 4,
            "hash_ids": list(range(prompt // 64)),
        }

    trace = read_trace(_file(tmp_path, turn(1, 0.0, 6500), turn(1, 1.5, 6600), turn(0, 0.0, 6400)))
    assert trace.sessions
    assert trace.block_tokens == 64
    assert [(row.session, row.think_seconds, row.at_seconds) for row in trace.rows] == [
        (1, 0.0, 3.0),
        (1, 1.5, 3.0),
        (0, 0.0, 2.0),
    ]


def test_azure_has_times_and_lengths_alone(tmp_path: Path) -> None:
    trace = read_trace(
        _file(
            tmp_path,
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:17:03.9799600,4808,10",
            "2023-11-16 18:17:04.0319600,3180,8",
        )
    )
    assert [row.at_seconds for row in trace.rows] == pytest.approx([0.0, 0.052])
    assert [(row.prompt_tokens, row.output_tokens, row.keys) for row in trace.rows] == [(4808, 10, ()), (3180, 8, ())]


def test_rows_and_minutes_can_be_limited(tmp_path: Path) -> None:
    path = _file(tmp_path, *(_mooncake(at * 10_000, 600, [0]) for at in range(30)))
    assert len(read_trace(path, limit=4).rows) == 4
    assert len(read_trace(path, minutes=1.0).rows) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace:2: neither JSON"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 2}', "trace:2: no 'hash_ids'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2, "hash_ids": []}', "trace:2: times must not be"),
        ('{"timestamp": 1, "input_length": 2000, "output_length": 2, "hash_ids": [1]}', "trace:2: 1 hash_ids for 3"),
        ('{"timestamp": "x", "input_length": 2, "output_length": 2, "hash_ids": []}', "trace:2: timestamp is not a"),
        ("[1]", "trace:2: not a JSON object"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message.replace("[", r"\[")):
        read_trace(_file(tmp_path, _mooncake(0, 600, [0, 1]), line))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="unknown format"):
        read_trace(_file(tmp_path, {"prompt": "x"}))
    with pytest.raises(TraceError, match="is empty"):
        read_trace(_file(tmp_path, ""))
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match=r"trace:2: 2 fields"):
        read_trace(_file(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "1,2"))
