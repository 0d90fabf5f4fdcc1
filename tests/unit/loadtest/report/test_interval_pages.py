"""Confidence intervals and ties on the pages of runs, series and several runs, and the room that they have there."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from loadtest.compare.page import comparison_page
from loadtest.report.document import quiet
from loadtest.report.formatting import margin
from loadtest.report.pages import page, series_page
from loadtest.report.schema import Bounds
from loadtest.report.series import Ran, series_of
from loadtest.sweep.report import outcome, write_report
from tests.browser import browser_page, needs_browser
from tests.unit.loadtest.compare.builders import make_comparison
from tests.unit.loadtest.compare.test_page import turns
from tests.unit.loadtest.report.pages import plots_of
from tests.unit.loadtest.report.runs import ENVIRONMENT, records_of, run_of
from tests.unit.loadtest.report.test_compared_page import page_of, series_in
from tests.unit.loadtest.sweep.test_report import by_seqs, keep, sweep

KNOWN = {"requests_per_second": (2.4, 2.7), "ttft_p50": (90.0, 108.0), "goodput_per_second": (2.0, 2.6)}


def run_page() -> str:
    records = records_of(0.1)
    found = run_of(records, Bounds(ttft_ms=300)).model_copy(update={"intervals": KNOWN})
    return page(found, records)


def two_targets(repeat: int = 4) -> str:
    """The second target has the latency of the first, and twice its speed."""
    ran = [
        Ran(
            target,
            f"c{users}",
            n,
            results=run_of(records_of(0.1 + n / 1000, seconds=(0.4 + n / 100) / speed), concurrency=users),
        )
        for n in range(repeat)
        for users in (1, 2)
        for target, speed in (("direct", 1.0), ("gateway", 2.0))
    ]
    series = series_of(ran, ENVIRONMENT)
    return series_page(series, series.folders)


def row_of(html: str, title: str) -> str:
    return html[html.index(title) :].split("</tr>")[0]


@pytest.mark.parametrize(
    ("value", "interval", "shown"),
    [
        (100.0, (98.0, 104.0), " ±4%"),
        (100.0, (99.8, 100.3), " ±0.3%"),
        (100.0, (100.0, 100.0), ""),
        (100.0, None, ""),
        (100.0, (0.0, 250.0), " ±>100%"),
        (0.0, (0.0, 1.0), ""),
    ],
)
def test_an_interval_has_as_many_digits_as_it_is_worth(
    value: float, interval: tuple[float, float] | None, shown: str
) -> None:
    assert margin(value, interval) == shown


def test_an_interval_is_set_apart_and_markup_stays_text() -> None:
    assert quiet("9 ms ±4%, tie") == '9 ms <span class="near">±4%</span> <span class="near">tie</span>'
    assert quiet("1.00, tie") == '1.00 <span class="near">tie</span>'
    assert quiet("<b> ±1%") == '&lt;b&gt; <span class="near">±1%</span>'
    assert quiet(True) == "True"


def test_a_run_has_its_intervals_in_tiles_and_in_the_table_of_latencies() -> None:
    html = run_page()
    assert '<strong>100 ms <span class="near">±10%</span></strong>' in html
    assert '<td data-title="p50">100 ms <span class="near">±10%</span></td>' in row_of(html, "TTFT, intended")
    assert "±" not in row_of(html, "TTFT, sent")
    assert "Latency from the intended and from the actual send, ± 95 % confidence within this run" in html
    records = records_of(0.1)
    assert "± 95 % confidence" not in page(run_of(records, Bounds()).model_copy(update={"intervals": {}}), records)


def test_whiskers_are_the_interval_of_the_runs_and_of_a_single_one_its_own() -> None:
    chart = next(plot for plot in plots_of(two_targets()) if plot["title"] == "TTFT p95 by users")
    # 3.182 x 1.29 ms / sqrt(4) around 101.5 ms
    assert chart["lines"][0]["spread"][0] == pytest.approx([99.4, 103.6], abs=0.1)
    ran = [
        Ran("", f"c{n}", 0, results=run_of(records_of(0.1), concurrency=n).model_copy(update={"intervals": KNOWN}))
        for n in (1, 2)
    ]
    single = plots_of(series_page(series_of(ran, ENVIRONMENT), []))
    chart = next(plot for plot in single if plot["title"] == "Requests/s by users")
    assert chart["lines"][0]["spread"] == [[2.4, 2.7], [2.4, 2.7]]


def test_targets_that_do_not_differ_tie() -> None:
    html = two_targets()
    table = html[html.index("To direct, pair by pair") :]
    cells = re.findall(r"<td data-title=\"(.*?)\">(.*?)</td>", row_of(table, ">gateway</td>"))
    tied = {title for title, text in cells if "tie" in text}
    assert "TTFT p50" in tied
    assert "tokens/s" not in tied


@needs_browser
@pytest.mark.timeout(180)
async def test_nothing_is_cut_on_a_screen_or_on_a_phone(tmp_path: Path) -> None:
    folders = [series_in(tmp_path / name, ttft, repeat=4) for name, ttft in (("first", 0.1), ("other", 0.1002))]
    turned = [turn.model_copy(update={"repetition": number}) for number in range(4) for turn in turns()[::2]]
    swept = sweep(tmp_path / "sweep")
    keep(swept, by_seqs)
    swept.carry_out()
    write_report(swept, outcome(swept, finished=True))
    pages = {
        "run": run_page(),
        "series": two_targets(),
        "many": page_of(*folders, folders[0]),
        "compare": comparison_page(make_comparison(turned), []),
        "sweep": (tmp_path / "sweep" / "report.html").read_text(),
    }
    for name, html in pages.items():
        (tmp_path / f"{name}.html").write_text(html, encoding="utf-8")
    async with browser_page(tmp_path / "browser") as tab:
        for name, width in product(pages, (1360, 390)):
            await tab.resize(width, 900, is_phone=width < 600)
            await tab.open((tmp_path / f"{name}.html").as_uri())
            await tab.until("document.documentElement.dataset.drawn && document.readyState === 'complete'")
            cut = await tab.run(
                "[...document.querySelectorAll('.card, .tile, body')].filter((one) => one.scrollWidth > "
                "one.clientWidth + 1).map((one) => one.innerText.slice(0, 80))"
            )
            assert (name, width, cut) == (name, width, [])
            assert await tab.run("document.querySelector('.near').offsetParent !== null")
        assert tab.complaints == []
