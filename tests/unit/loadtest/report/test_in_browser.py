"""Pages as a browser draws them; skipped where there is none."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from loadtest.report.chart import Chart, ChartSeries, doubling, linear
from loadtest.report.document import render
from tests.browser import BROWSER, needs_browser

pytestmark = [needs_browser, pytest.mark.timeout(180)]
_HOSTILE = "</script><script>document.title = 'taken'</script>"

# Points at the first plot, drags over a part of it, and points again; what the legends say then is the outcome.
_POINTING = """
<script>
const reported = [];
const over = document.querySelector(".u-over");
const box = over.getBoundingClientRect();
const act = (kind, x) => over.dispatchEvent(new MouseEvent(kind, {
  bubbles: true, clientX: box.left + x * box.width, clientY: box.top + 20, button: 0, movementX: 5 }));
const tell = () => reported.push([...document.querySelectorAll(".u-legend")].map((one) => one.innerText));
const steps = [
  () => { act("mouseenter", 0.5); act("mousemove", 0.5); }, tell,
  () => { act("mousedown", 0.5); act("mousemove", 0.9); }, () => act("mouseup", 0.9),
  () => act("mousemove", 0.01), tell,
  () => act("dblclick", 0.01), () => act("mousemove", 0.01), tell,
  () => {
    const out = document.createElement("pre");
    out.id = "reported";
    out.textContent = JSON.stringify(reported);
    document.body.append(out);
  },
];
steps.forEach((step, index) => setTimeout(step, 200 * (index + 1)));
</script>
"""


def _page() -> str:
    time = linear(0, 10, 0, 100, 5, " s")
    counts = linear(0, 20, 100, 0, 4)
    users = doubling([1, 2, 4], 0.9, 5, 0, 100)
    first = ChartSeries(_HOSTILE, "s1", [(float(second), float(second)) for second in range(11)])
    second = ChartSeries(
        "held", "s2 dashed", [(float(second), 2.0 * second) for second in range(11)], steps=True, area=True
    )
    curve = ChartSeries("gateway", "s1", [(1, 5), (2, 9), (4, 16)], spread=[(4, 6), (8, 10), (15, 17)])
    charts = [
        Chart(_HOSTILE, note="", x=time, y=counts, series=[first], dots=[(1.0, 3.0)], marks=[2.0]),
        Chart("another", note="", x=time, y=counts, series=[second]),
        Chart("curve", note="", x=users, y=counts, series=[curve], x_shown=["1", "2", "4"]),
    ]
    return render("page.html", "plots", "", charts)


def _run(html: str, folder: Path) -> tuple[str, str]:
    """The document after its scripts, and what the browser complained of."""
    assert BROWSER is not None
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,900",
        "--virtual-time-budget=5000",
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_every_plot_is_drawn_and_nothing_is_complained_of(tmp_path: Path) -> None:
    dom, complaints = _run(_page(), tmp_path)
    assert complaints == ""
    assert 'data-drawn="3"' in dom
    assert dom.count("<canvas") == 3
    assert "<title>plots</title>" in dom


def test_pointing_shows_values_of_all_plots_of_that_time_and_dragging_zooms_them(tmp_path: Path) -> None:
    without_policy = re.sub(r'<meta http-equiv="content-security-policy"[^>]*>', "", _page())
    dom, _ = _run(without_policy.replace("</body>", f"{_POINTING}</body>"), tmp_path)
    found = re.search(r'<pre id="reported">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    reported = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">"))
    assert [[_last_number(legend) for legend in legends[:2]] for legends in reported] == [
        ["5", "10"],
        ["5", "10"],
        ["0", "0"],
    ]


def _last_number(legend: str) -> str:
    return re.split(r"\D+", legend.strip())[-1]
