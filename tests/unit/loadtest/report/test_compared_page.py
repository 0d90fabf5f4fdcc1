"""Several runs, or series, on one page: tables against the first, charts of all, folders that are dropped on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.report.compared_page import compared_page
from loadtest.report.diff import diff_of_many
from loadtest.report.files import Saved, read, write_results, write_series, write_summary
from loadtest.report.series import Ran, series_of, series_of_one
from tests.browser import browser_page, needs_browser
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of
from tests.unit.loadtest.report.runs import ENVIRONMENT, curve_of, records_of, run_of

HOSTILE = "</script><b>a"
TTFTS = {"a": 0.1, "b": 0.12, "c": 0.08}


def run_in(folder: Path, ttft: float) -> Path:
    records = records_of(ttft)
    results = run_of(records)
    write_results(results, records, folder)
    write_summary(results, folder)
    return folder


def series_in(folder: Path, ttft: float, users: tuple[int, ...] = (1, 2), repeat: int = 1) -> Path:
    ran = [
        Ran("", f"c{count}", n, results=run_of(records_of(ttft + n / 1000), concurrency=count))
        for n in range(repeat)
        for count in users
    ]
    write_series(series_of(ran, ENVIRONMENT), folder)
    return folder


def page_of(*folders: Path) -> str:
    saved = [read(folder) for folder in folders]
    return compared_page(saved, diff_of_many([one.series for one in saved]), [{} for _ in folders])


def test_runs_are_columns_with_their_change_against_the_first(tmp_path: Path) -> None:
    folders = [run_in(tmp_path / name, ttft) for name, ttft in TTFTS.items()]
    html = page_of(*folders)
    assert_it_needs_nothing(html)
    row = html[html.index("<td>TTFT p50</td>") :].split("</tr>")[0]
    cells = ("100 ms", "120 ms", "+20.0%", "80.0 ms", "-20.0%")
    assert [row.index(cell) for cell in cells] == sorted(row.index(cell) for cell in cells)
    assert "better" not in row  # single runs cannot differ significantly
    plots = {plot["title"]: plot for plot in plots_of(html)}
    for title in (
        "Throughput against latency",
        "TTFT p95 over time",
        "Output tokens per second",
        "Distribution of E2E",
    ):
        assert [line["name"] for line in plots[title]["lines"]] == ["a", "b", "c"]
        assert plots[title]["y"]["title"]


def test_series_have_a_table_for_each_load_and_charts_by_load(tmp_path: Path) -> None:
    folders = [series_in(tmp_path / name, ttft, repeat=8) for name, ttft in TTFTS.items()]
    folders.append(series_in(tmp_path / "d", 0.1, users=(1, 4)))
    html = page_of(*folders)
    assert html.count('class="figures rows"') == 2
    assert "<li>d: c4</li>" in html or "d:  c4" in html
    row = html[html.index("<td>TTFT p50</td>") :].split("</tr>")[0]
    assert '<span class="worse">+' in row
    assert '<span class="better">-' in row
    plots = {plot["title"]: plot for plot in plots_of(html)}
    assert [line["name"] for line in plots["TTFT p95 by users"]["lines"]] == ["a", "b", "c", "d"]


def test_the_command_writes_the_page_and_checks_rules_against_the_first(tmp_path: Path) -> None:
    folders = [str(run_in(tmp_path / name, ttft)) for name, ttft in TTFTS.items()]
    out = tmp_path / "out" / "compared.html"
    done = CliRunner().invoke(app, ["report", *folders, "--out", str(out), "--fail-if", "ttft_p95>+5%"])
    assert done.exit_code == 1
    assert "b: ttft_p95 went from 100 to 120 ms" in done.output
    assert "c: " not in done.output
    assert "3 load tests compared" in out.read_text()


def test_the_page_of_two_runs_lays_their_curves_over_each_other() -> None:
    before, after = run_of(records_of(0.1), url=f"http://{HOSTILE}"), run_of(records_of(0.2))
    sides = [
        Saved(name, Path(name), series_of_one(run), run=run, records=records_of(ttft))
        for name, run, ttft in (("<b>a", before, 0.1), ("b", after, 0.2))
    ]
    html = compared_page(sides, diff_of_many([one.series for one in sides]), [{}, {}], [f"rule {HOSTILE}"])
    assert_it_needs_nothing(html)
    assert "<b>a" not in html
    plots = {plot["title"]: plot for plot in plots_of(html)}
    assert {"TTFT p95 over time", "Output tokens per second", "Distribution of TTFT"} <= set(plots)
    assert [line["name"] for line in plots["TTFT p95 over time"]["lines"]] == ["<b>a", "b"]
    assert "Rules are broken." in html
    assert html.index("All in one") < html.index("Figures") < html.index("How they were made")


def test_the_page_of_two_series_has_their_batch_size_curves() -> None:
    before, after = (
        Saved(name, Path(name), curve_of({"gw": speed}), run=None, records=[]) for name, speed in (("a", 1), ("b", 2))
    )
    html = compared_page([before, after], diff_of_many([before.series, after.series]), [{}, {}])
    assert_it_needs_nothing(html)
    first, per_user, *_ = plots_of(html)
    assert [line["name"] for line in first["lines"]] == ["a: gw", "b: gw"]
    assert first["data"][2][0] > 1.9 * first["data"][1][0]
    assert per_user["title"] == "Output tokens per second and user"


@needs_browser
@pytest.mark.timeout(180)
async def test_a_folder_that_is_dropped_on_the_page_becomes_a_column(tmp_path: Path) -> None:
    folders = [run_in(tmp_path / name, ttft) for name, ttft in TTFTS.items()]
    more = run_in(tmp_path / "dropped" / "fourth", 0.2)
    file = tmp_path / "compared.html"
    file.write_text(page_of(*folders), encoding="utf-8")
    async with browser_page(tmp_path / "browser") as tab:
        await tab.resize(1360, 900)
        await tab.open(file.as_uri())
        await tab.until("document.getElementById('folders').hidden === false")
        data = {"items": [], "files": [str(more.parent)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            await tab.call("Input.dispatchDragEvent", type=kind, x=300, y=200, data=data)
        await tab.until("document.querySelector('#folders [role=status]').textContent")
        assert "fourth added" in await tab.text("#folders")
        head = await tab.text("table.figures tr")
        assert head.split() == ["a", "b", "c", "fourth"]
        row = await tab.text("table.figures tr[data-column=ttft_p50_ms]")
        assert row.split()[-3:] == ["200", "ms", "+100.0%"]
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert tab.complaints == []
