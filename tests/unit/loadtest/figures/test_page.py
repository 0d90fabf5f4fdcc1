"""The page of figures: as a file, by its command, and in a browser."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.figures.command import EXHIBITS
from loadtest.figures.exhibit import Exhibit, chart
from loadtest.figures.page import digest, page
from tests.browser import browser_page, needs_browser
from tests.unit.loadtest.report.pages import Reader


def exhibit(name: str, finding: str = "It is so.") -> Exhibit:
    charts = [chart(f"Of {name}", {"a": [(1, 2.0), (8, 9.0)]}, "users", "tokens/s", bounds=[(5.0, "target")])]
    return Exhibit(
        name,
        title=name.title(),
        statement="It is said.",
        verdict="holds",
        finding=finding,
        charts=charts,
        head=["users", "rate"],
        rows=[["1", "2"]],
    )


def test_the_page_needs_no_network_and_has_every_statement_chart_and_table() -> None:
    reader = Reader()
    reader.feed(page([exhibit("one"), exhibit("two")], {"loadtest": "1.0"}, "loadtest figures"))
    assert reader.links == ["#one", "#two"]
    assert reader.handlers == []
    assert reader.tags["figure"] == 2
    assert "default-src 'none'" in reader.policy


def test_equal_figures_have_equal_digests() -> None:
    assert digest([exhibit("one")]) == digest([exhibit("one")]) != digest([exhibit("one", "It is not so.")])


def test_the_command_computes_what_was_chosen(tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, ["figures", "--out", str(out), "--only", "concurrency"])
    assert done.exit_code == 0
    assert "The effective batch is the active concurrency: holds." in done.stdout
    assert out.read_text().count("<figure>") == 1
    refused = CliRunner().invoke(app, ["figures", "--only", "nothing"])
    assert refused.exit_code == 2
    assert "unknown: nothing" in refused.output


@needs_browser
@pytest.mark.timeout(180)
async def test_nothing_is_cut_in_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    found = [EXHIBITS[name]() for name in ("batch-curve", "chunked-prefill", "tensor-parallel")]
    file.write_text(page(found, {"loadtest": "1.0"}, "loadtest figures"), encoding="utf-8")
    async with browser_page(tmp_path) as tab:
        await tab.resize(1360, 900)
        await tab.open(file.as_uri())
        await tab.until(f"document.documentElement.dataset.drawn == {sum(len(one.charts) for one in found)}")
        assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        cut = "[...document.querySelectorAll('.card')].filter((card) => card.scrollWidth > card.clientWidth + 1).length"
        assert await tab.run(cut) == 0
        assert tab.complaints == []
