"""Single requests on the page of a run: which ones, what is known of each, and the panel that shows one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.record import Record
from loadtest.report.pages import page
from loadtest.report.single_requests import MOST_SHOWN, shown_requests
from tests.browser import Page, browser_page, needs_browser
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of
from tests.unit.loadtest.report.runs import records_of, run_of

HOSTILE = "</script><script>document.title = 'taken'</script>"


def mixed() -> list[Record]:
    """Twenty that succeed, the second one late and slow, and one that fails."""
    records = records_of(0.1, fails=1)
    records[1].sent += 0.05
    records[1].first_token = records[1].sent + 0.25
    records[1].cached_tokens, records[1].queue_seconds, records[1].status = 40, 0.02, 200
    records[1].quiet_from, records[1].quiet_until = records[1].sent, records[1].sent + 0.25
    records[-1].detail = HOSTILE
    return records


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="requests-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_has_what_is_known_of_each_request() -> None:
    records = mixed()
    html = page(run_of(records), records)
    assert_it_needs_nothing(html)
    data = data_of(html)
    assert (data["total"], len(data["rows"])) == (21, 21)
    late, failed = data["rows"][1], data["rows"][-1]
    assert (late["due"], late["sent"], late["first"], late["end"]) == (0.4, 0.45, 0.7, 0.8)
    assert (late["prompt"], late["cached"], late["output"], late["queue"]) == (50, 40, 5, 0.02)
    assert late["pause"] == [0.45, 0.7]
    assert (failed["outcome"], failed["failed"], failed["detail"]) == ("http_503", True, HOSTILE)
    assert "first" not in failed


def test_each_dot_is_one_of_the_shown_requests() -> None:
    records = mixed()
    html = page(run_of(records), records)
    rows = data_of(html)["rows"]
    for plot in plots_of(html):
        assert len(plot["dotRows"]) == len(plot["dots"][0] if plot["dots"] else [])
    [ttft] = [plot for plot in plots_of(html) if plot["title"] == "TTFT over time"]
    found = [(rows[row]["due"], (rows[row]["first"] - rows[row]["due"]) * 1e3) for row in ttft["dotRows"]]
    assert found == [pytest.approx(place, rel=1e-3) for place in zip(*ttft["dots"], strict=True)]


def test_of_many_requests_failed_ones_and_the_slowest_are_kept() -> None:
    records = records_of(0.1, count=30_000, fails=30)
    records[777].first_token = records[777].intended + 0.39
    shown = shown_requests(records)
    assert len(shown.records) <= MOST_SHOWN
    assert shown.total == 30_030
    assert records[777] in shown.records
    assert sum(not record.ok for record in shown.records) == 30
    dues = [record.index for record in shown.records if record.ok]
    assert dues == sorted(dues)


def test_a_page_without_requests_has_no_table_of_them() -> None:
    assert "requests-data" not in page(run_of(mixed()), [])


async def opened(tab: Page, folder: Path) -> None:
    records = mixed()
    file = folder / "run.html"
    file.write_text(page(run_of(records), records), encoding="utf-8")
    await tab.resize(1360, 900)
    await tab.open(file.as_uri())
    await tab.until("document.querySelectorAll('#requests tr[data-row]').length == 12")


@needs_browser
@pytest.mark.timeout(180)
async def test_a_click_on_a_row_or_a_dot_opens_the_timeline_of_a_request(tmp_path: Path) -> None:
    async with browser_page(tmp_path) as tab:
        await opened(tab, tmp_path)
        await tab.click("#requests tr[data-row='1']")
        text = await tab.text("#request")
        for told in ("Request 1", "50.0 ms late", "TTFT 300 ms", "50, 40 of them cached", "250 ms without a byte"):
            assert told in text, text
        widths = await tab.run(
            "[...document.querySelectorAll('.track i')].map((one) => [one.classList[0], parseFloat(one.style.width)])"
        )
        assert dict(widths) == pytest.approx({"late": 12.5, "queued": 5, "waited": 57.5, "decode": 25, "pause": 62.5})
        await tab.click("#request button[aria-label='next request']")
        assert "Request 2" in await tab.text("#request")
        await tab.click("#request button[aria-label='close']")
        assert not await tab.run("document.getElementById('request').open")
        point = await tab.run(
            "(() => { document.querySelector('.u-over').scrollIntoView({block: 'center'});"
            " const box = document.querySelector('.u-over').getBoundingClientRect(); return [box.left, box.top]; })()"
        )
        plot = next(one for one in plots_of((tmp_path / "run.html").read_text()) if one["title"] == "TTFT over time")
        left, top = await tab.run(
            f"(() => {{ const box = document.querySelector('.u-over'), [low, high] = {json.dumps(plot['x']['range'])},"
            f" [bottom, roof] = {json.dumps(plot['y']['range'])};"
            f" return [(({plot['dots'][0][1]}) - low) / (high - low) * box.clientWidth,"
            f" (1 - Math.log({plot['dots'][1][1]} / bottom) / Math.log(roof / bottom)) * box.clientHeight]; }})()"
        )
        place = {"x": point[0] + left, "y": point[1] + top, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await tab.call("Input.dispatchMouseEvent", type=kind, **place)
        await tab.until("document.getElementById('request').open")
        assert "Request 1" in await tab.text("#request")
        assert tab.complaints == []


@needs_browser
@pytest.mark.timeout(180)
async def test_rows_are_sorted_and_filtered(tmp_path: Path) -> None:
    async with browser_page(tmp_path) as tab:
        await opened(tab, tmp_path)
        await tab.run(
            "[...document.querySelectorAll('#requests th button')].find((one) => one.textContent == 'TTFT').click()"
        )
        assert await tab.run("document.querySelector('#requests tr[data-row]').dataset.row") == "1"
        await tab.run(
            "(() => { const one = document.querySelector('#requests select');"
            " one.value = 'failed'; one.onchange(); })()"
        )
        assert await tab.run("document.querySelectorAll('#requests tr[data-row]').length") == 1
        await tab.click("#requests tr[data-row]")
        text = await tab.text("#request")
        assert "http_503" in text
        assert HOSTILE in text
        assert await tab.run("document.title") != "taken"
