"""Checks as JUnit's XML."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.files import checkpoint_checks, junit, junit_of_run, junit_of_series
from loadtest.report.schema import Bounds, Check, Results
from loadtest.report.series import Ran, series_of
from tests.unit.loadtest.report.runs import ENVIRONMENT, records_of, run_of

_Outcomes = dict[str, str]


def _outcomes(xml: str) -> dict[str, _Outcomes]:
    """By suite and case: passed, or why not; and the counts are right."""
    found: dict[str, _Outcomes] = {}
    for suite in ElementTree.fromstring(xml):
        cases = found[suite.attrib["name"]] = {}
        for case in suite:
            problem = next(iter(case), None)
            cases[case.attrib["name"]] = "passed" if problem is None else f"{problem.tag}: {problem.attrib['message']}"
        assert int(suite.attrib["tests"]) == len(cases)
        assert int(suite.attrib["failures"]) == sum(reported.startswith("failure") for reported in cases.values())
        assert int(suite.attrib["skipped"]) == sum(reported.startswith("skipped") for reported in cases.values())
    return found


def _of(results: Results) -> _Outcomes:
    (cases,) = _outcomes(junit_of_run(results)).values()
    return cases


def test_every_check_of_a_run_that_passed_is_a_case() -> None:
    cases = _of(run_of(records_of(0.1), Bounds(ttft_ms=500, e2e_ms=900)))
    assert set(cases.values()) == {"passed"}
    assert {"client sends in time", "errors", "SLO", "SLO: TTFT", "SLO: E2E"} <= set(cases)


def test_the_bound_that_was_missed_is_named() -> None:
    cases = _of(run_of(records_of(0.1), Bounds(ttft_ms=50, e2e_ms=900)))
    assert cases["SLO: TTFT"] == "failure: TTFT of at most 50 ms kept by 0.0% of offered requests < 95.0%"
    assert cases["SLO: E2E"] == "passed"
    assert cases["SLO"].startswith("failure: SLO met by 0.0%")


def test_errors_fail_with_their_ratio() -> None:
    cases = _of(run_of(records_of(0.1, fails=5)))
    assert cases["errors"].startswith("failure: 5 of 25 requests failed (20.00% > 0.00%")


def test_an_invalid_run_fails_and_show_nothing_reliable() -> None:
    cases = _of(run_of(records_of(0.1), Bounds(ttft_ms=50), lag=0.9))
    assert cases["client worker 0: event loop lag"].startswith("failure: ")
    assert all(cases[name].startswith("skipped: ") for name in ("errors", "SLO", "SLO: TTFT"))


@pytest.mark.parametrize("lag", [0.001, 0.9], ids=["valid", "invalid"])
@pytest.mark.parametrize("bound", [50, 500], ids=["missed", "kept"])
@pytest.mark.parametrize("fails", [0, 3])
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_the_file_fails_exactly_where_the_run_does(lag: float, bound: float, fails: int, old: bool) -> None:
    results = run_of(records_of(0.1, fails=fails), Bounds(ttft_ms=bound), lag=lag)
    if old:
        results = results.model_copy(update={"verdict": results.verdict.model_copy(update={"checks": []})})
    assert any(reported.startswith("failure") for reported in _of(results).values()) == (not results.verdict.passed)


def test_a_series_fails_where_it_did_and_a_load_that_is_too_much_is_skipped() -> None:
    slow, quick = (run_of(records_of(ttft), Bounds(ttft_ms=150)) for ttft in (0.3, 0.1))
    spoilt = run_of(records_of(0.1), lag=0.9)
    carried = series_of([Ran("a", "c1", 0, results=quick), Ran("a", "c2", 0, results=slow)], ENVIRONMENT)
    (cases,) = _outcomes(junit_of_series(carried)).values()
    assert cases["c2: passes"] == "skipped: 0 of 1 valid runs passed"
    assert cases["some load is carried"] == "passed"
    beaten = series_of(
        [Ran("a", "c1", 0, results=slow), Ran("b", "c1", 0, results=spoilt)], ENVIRONMENT, {"b-c2-1": "gone"}
    )
    found = _outcomes(junit_of_series(beaten))
    assert found["a"]["some load is carried"].startswith("failure")
    assert found["b"]["c1: client keeps up"].startswith("failure")
    assert found["runs that could not be made"]["b-c2-1"] == "failure: gone"
    assert (carried.passed, beaten.passed) == (True, False)


def test_what_the_checkpoint_checked_has_a_suite_of_its_own(tmp_path: Path) -> None:
    checks = [
        {"name": "health of a", "status": "ok"},
        {"name": "caps", "status": "failed", "expected": "at most 8", "found": "9", "why": ""},
        {"name": "embeddings", "status": "not checked", "why": "no such model"},
    ]
    (tmp_path / "checkpoint.json").write_text(json.dumps({"id": "x", "checks": checks}))
    found = _outcomes(junit_of_run(run_of(records_of(0.1)), checkpoint_checks(tmp_path)))
    assert found["checkpoint"] == {
        "health of a": "passed",
        "caps": "failure: expected at most 8, found 9",
        "embeddings": "skipped: no such model",
    }
    series = series_of([Ran("a", "c1", 0, results=run_of(records_of(0.1)))], ENVIRONMENT)
    found = _outcomes(junit_of_series(series, {"a-c1-1": checkpoint_checks(tmp_path), "b": []}))
    assert list(found) == ["a", "checkpoint of a-c1-1"]
    (tmp_path / "checkpoint.json").write_text("{")
    assert checkpoint_checks(tmp_path) == []
    assert checkpoint_checks(tmp_path / "none") == []


@given(st.text())
def test_any_text_can_be_written(text: str) -> None:
    (suite,) = ElementTree.fromstring(junit([(text, [Check(name=text, passed=False, message=text)])]))
    assert suite.tag == "testsuite"
