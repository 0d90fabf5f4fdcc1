from pathlib import Path

import orjson
from typer.testing import CliRunner, Result

from loadtest.__main__ import app
from loadtest.workloads.trace import read_trace
from tests.unit.loadtest.recording.test_access_log import lines


def record(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["record", *arguments], input=stdin)


def test_a_trace_is_written_that_a_replay_reads(tmp_path: Path) -> None:
    log, out = tmp_path / "access.log", tmp_path / "trace.jsonl"
    prefix = {"bytes": 4096, "ends": [2048, 4096], "hashes": ["aa", "bb"]}
    log.write_bytes(b"".join([*lines({"prompt_tokens": 1024, "prefix": prefix}) * 2, b"started\n"]))
    result = record(str(log), "--out", str(out))
    assert result.exit_code == 0
    assert result.stdout == f"{out}: 2 requests in 0 s; lines left out: 1 not of the access log\n"
    trace = read_trace(out)
    assert trace.block_tokens == 512
    assert [row.prompt_tokens for row in trace.rows] == [1024, 1024]
    assert trace.rows[0].keys == trace.rows[1].keys == (0, 1)


def test_a_log_may_come_through_a_pipe_with_blocks_of_another_size(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    assert record("-", "--out", str(out), "--block-size", "50", stdin=b"".join(lines({}))).exit_code == 0
    assert orjson.loads(out.read_bytes())["hash_ids"] == [0, 1]


def test_a_log_without_hashes_says_what_to_set(tmp_path: Path) -> None:
    result = record("-", "--out", str(tmp_path / "t"), stdin=b"".join(lines({"prefix": None})))
    assert result.exit_code == 1
    assert result.stderr == (
        "loadtest: no request to record; lines left out: 1 without prefix hashes"
        " (set server.access_log_prefixes: true)\n"
    )
    assert not (tmp_path / "t").exists()


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    missing = tmp_path / "missing.log"
    result = record(str(missing), "--out", str(tmp_path / "t"))
    assert (result.exit_code, result.stderr) == (1, f"loadtest: {missing}: No such file or directory\n")
