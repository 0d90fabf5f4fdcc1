import re
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from loadtest.drive.record import Record
from loadtest.predict.comparison import Mismatch, read_run

DELTA = {
    'engine-0 vllm:prefix_cache_hits_total{engine="0"}': 300.0,
    'engine-1 vllm:prefix_cache_hits_total{engine="0"}': 100.0,
    'engine-0 vllm:prefix_cache_queries_total{engine="0"}': 500.0,
    'engine-1 vllm:prefix_cache_queries_total{engine="0"}': 300.0,
    "engine-1 vllm:external_prefix_cache_queries_total": 9000.0,
}

TRUSTED = {"valid": True, "reasons": ["SLO missed"]}


def written(
    folder: Path, records: list[Record], delta: dict[str, float], verdict: dict[str, object] | None = None
) -> Path:
    (folder / "requests.jsonl").write_bytes(b"\n".join(orjson.dumps(asdict(record)) for record in records))
    results = folder / "results.json"
    results.write_bytes(orjson.dumps({"metrics_delta": delta, "verdict": verdict or TRUSTED}))
    return results


def record(sent: float, outcome: str = "ok") -> Record:
    return Record(0, 0, sent, sent=sent, end=sent + 2, outcome=outcome, first_token=sent + 0.5, completion_tokens=7)


def test_answers_are_read_in_the_order_in_which_they_were_sent(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, [record(3.0), record(2.0, "timeout"), record(1.0)], DELTA))
    assert [(one.at, one.first, one.end, one.output_tokens) for one in run.sent] == [(1, 1.5, 3, 7), (3, 3.5, 5, 7)]


def test_the_hit_rate_is_that_of_all_engines_counters(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, [record(1.0)], DELTA)).hit_ratio == pytest.approx(0.5)
    assert read_run(written(tmp_path, [record(1.0)], {"vllm:prefix_cache_hits_total": 1.0})).hit_ratio is None


def test_the_client_s_own_doubts_are_passed_on(tmp_path: Path) -> None:
    assert read_run(written(tmp_path, [record(1.0)], {})).doubts == []
    late = {"valid": False, "reasons": ["requests were sent late"]}
    assert read_run(written(tmp_path, [record(1.0)], {}, late)).doubts == ["requests were sent late"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=re.escape("results.json: No such file")):
        read_run(tmp_path / "results.json")
    with pytest.raises(Mismatch, match="no request was answered"):
        read_run(written(tmp_path, [record(1.0, "timeout")], DELTA))
    (tmp_path / "results.json").write_bytes(b"{}")
    with pytest.raises(Mismatch, match="not what loadtest run writes"):
        read_run(tmp_path / "results.json")
