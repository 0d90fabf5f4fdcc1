"""`loadtest report`, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.report.files import UnreadableError, read, write_results, write_series, write_summary
from loadtest.report.schema import Bounds, Results
from loadtest.report.series import Ran, series_of
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of
from tests.unit.loadtest.report.runs import ENVIRONMENT, records_of, run_of

# What version 3 of results.json has and older ones have not.
_NEW_IN_BUCKETS = ("ttft_p99", "e2e_p99", "tpot_p50", "tpot_p95", "tpot_p99")


def _report(*words: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)], env={"COLUMNS": "300", "TERM": "dumb"})


def _written(folder: Path, ttft: float, bounds: Bounds | None = None) -> Results:
    results = run_of(records_of(ttft), bounds)
    write_results(results, records_of(ttft), folder)
    write_summary(results, folder)
    return results


def _series(folder: Path, ttft: float = 0.1) -> list[Ran]:
    ran = [
        Ran(target, f"c{users}", n, results=run_of(records_of(ttft + n / 100), concurrency=users))
        for n in range(2)
        for users in (1, 2)
        for target in ("direct", "gateway")
    ]
    for one in ran:
        write_results(one.results, records_of(ttft), folder / one.folder)
    write_series(series_of(ran, ENVIRONMENT), folder)
    return ran


def test_a_runs_files_are_made_anew_from_its_results_and_requests(tmp_path: Path) -> None:
    _written(tmp_path, 0.1)
    before = {name: (tmp_path / name).read_text() for name in ("report.html", "results.csv", "junit.xml")}
    for name in before:
        (tmp_path / name).unlink()
    done = _report(tmp_path / "results.json")
    assert done.exit_code == 0, done.output
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_a_series_and_its_runs_are_made_anew(tmp_path: Path) -> None:
    ran = _series(tmp_path)
    pages = [tmp_path / "report.html", *(tmp_path / one.folder / "report.html" for one in ran)]
    before = [page.read_text() for page in pages]
    for page in pages:
        page.unlink()
    assert _report(tmp_path).exit_code == 0
    assert [page.read_text() for page in pages] == before


def test_a_series_without_the_pages_of_its_runs_names_them_without_a_link(tmp_path: Path) -> None:
    ran = _series(tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "series.json").write_bytes((tmp_path / "whole" / "series.json").read_bytes())
    assert _report(tmp_path / "alone").exit_code == 0
    for name, links in (("whole", [f"{one.folder}/report.html" for one in ran]), ("alone", [])):
        html = (tmp_path / name / "report.html").read_text()
        assert_it_needs_nothing(html, links)
        assert ran[0].folder in html


def test_results_of_older_versions_are_read(tmp_path: Path) -> None:
    _written(tmp_path, 0.1, Bounds(ttft_ms=500))
    document = json.loads((tmp_path / "results.json").read_text())
    document["schema_version"] = 1
    for name in ("parts", "stalls", "samples"):
        del document[name]
    for name in ("whole_ratio",):
        del document["streaming"][name]
    for bucket in document["timeline"]:
        for name in _NEW_IN_BUCKETS:
            del bucket[name]
    del document["verdict"]["checks"], document["slo"]["attainments"]
    (tmp_path / "results.json").write_text(json.dumps(document))
    assert _report(tmp_path).exit_code == 0
    html = (tmp_path / "report.html").read_text()
    assert_it_needs_nothing(html)
    assert [line["name"] for line in plots_of(html)[0]["lines"]] == ["p50", "p95", "p99"]
    (tmp_path / "requests.jsonl").unlink()
    assert _report(tmp_path).exit_code == 0
    assert [line["name"] for line in plots_of((tmp_path / "report.html").read_text())[0]["lines"]] == ["p50", "p95"]


def test_an_older_series_gets_the_figures_of_this_version_from_its_runs(tmp_path: Path) -> None:
    _series(tmp_path)
    document = json.loads((tmp_path / "series.json").read_text())
    document["schema_version"] = 1
    for one in document["differences"]:
        del one["ratios"]
    (tmp_path / "series.json").write_text(json.dumps(document))
    assert read(tmp_path).series.differences[0].ratios
    (tmp_path / "direct-c1-1" / "results.json").unlink()
    assert not read(tmp_path).series.differences[0].ratios


def test_a_search_keeps_its_answer_when_its_page_is_made_anew(tmp_path: Path) -> None:
    ran = _series(tmp_path)
    series = series_of(ran, ENVIRONMENT).model_copy(
        update={"answer": ["1 users within the SLO"], "passed": False, "reasons": ["none"]}
    )
    write_series(series, tmp_path)
    assert _report(tmp_path).exit_code == 0
    assert "1 users within the SLO" in (tmp_path / "report.html").read_text()
    assert (read(tmp_path).series.passed, read(tmp_path).series.reasons) == (False, ["none"])


def test_two_runs_are_compared_and_a_broken_rule_is_exit_code_1(tmp_path: Path) -> None:
    for name, ttft in (("a", 0.1), ("b", 0.12)):
        _written(tmp_path / name, ttft)
    page = tmp_path / "out" / "compared.html"
    fine = _report(tmp_path / "a", tmp_path / "b", "--out", page, "--fail-if", "ttft_p95>+25%")
    assert fine.exit_code == 0, fine.output
    assert "+20.0%" in fine.output
    assert_it_needs_nothing(page.read_text())
    failed = _report(
        tmp_path / "a", tmp_path / "b", "--out", page, "--fail-if", "ttft_p95>+5%", "--fail-if", "e2e_p50>1"
    )
    assert failed.exit_code == 1
    assert "✗ ttft_p95 went from 100 to 120 ms (+20.0%) [ttft_p95>+5%]" in failed.output
    assert "✗ e2e_p50 is 400 ms [e2e_p50>1]" in failed.output
    assert "Rules are broken." in page.read_text()


def test_two_series_are_compared_load_by_load(tmp_path: Path) -> None:
    for name, ttft in (("a", 0.1), ("b", 0.2)):
        _series(tmp_path / name, ttft)
    done = _report(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "d.html", "--fail-if", "ttft_p50>+50%")
    assert done.exit_code == 1
    for place in ("direct c1", "gateway c2"):
        assert f"✗ {place}: ttft_p50 went from 105 to 205 ms (+95.2%) [ttft_p50>+50%]" in done.output


def test_a_rule_may_be_about_one_report_unless_it_is_about_a_change(tmp_path: Path) -> None:
    _written(tmp_path, 0.1)
    assert _report(tmp_path, "--fail-if", "ttft_p95>500").exit_code == 0
    assert _report(tmp_path, "--fail-if", "ttft_p95>50").exit_code == 1
    assert _report(tmp_path, "--fail-if", "ttft_p95>+5%").exit_code == 2


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("results.json", "{", "is not JSON"),
        ("results.json", "[]", "neither a run nor a series"),
        ("results.json", '{"verdict": {}, "schema_version": 99}', "is of version 99"),
        ("series.json", '{"points": 5}', "series.json: environment: Field required"),
        ("other.json", "{}", "holds neither a results.json nor a series.json"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnreadableError, match=why):
        read(tmp_path)
    assert _report(tmp_path).exit_code == 2


def test_a_request_that_is_none_says_where(tmp_path: Path) -> None:
    _written(tmp_path, 0.1)
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write('{"index": 1}\n')
    with pytest.raises(UnreadableError, match="line 21: not a request"):
        read(tmp_path)


def test_of_a_run_and_a_series_of_several_loads_nothing_is_compared(tmp_path: Path) -> None:
    _written(tmp_path / "run", 0.1)
    _series(tmp_path / "series")
    done = _report(tmp_path / "run", tmp_path / "series", "--out", tmp_path / "d.html", "--fail-if", "ttft_p50>+900%")
    assert done.exit_code == 1
    assert "nothing was measured in both" in done.output
    assert "only after: gateway c2" in done.output.replace("  ", " ")
    assert "series: gateway c2" in (tmp_path / "d.html").read_text()
