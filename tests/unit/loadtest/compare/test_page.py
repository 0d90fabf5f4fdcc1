"""The page of a comparison."""

from __future__ import annotations

from loadtest.compare.outage.schema import Fault
from loadtest.compare.page import comparison_page
from loadtest.compare.schema import ArmRun
from loadtest.drive.record import CONNECTION
from tests.unit.loadtest.compare.builders import make_comparison, make_figures, make_turn
from tests.unit.loadtest.compare.outage_turns import killed, record
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of

OTHER = "<smg>"


def turns() -> list[ArmRun]:
    slow = make_figures(ttft_p50=60.0, output_tokens_per_second=900.0)
    ours = [make_turn("gateway", number) for number in range(2)]
    return [*ours, *(make_turn(OTHER, number, figures=slow) for number in range(2))]


def test_it_has_the_best_first_what_was_tested_all_tables_and_links() -> None:
    comparison = make_comparison(turns(), {"litellm": "not installed"})
    html = comparison_page(comparison, {"gateway-1"})
    assert_it_needs_nothing(html, ["gateway-1/report.html"])
    places = [
        "Best medians",
        "What was tested",
        "Proxies against each other",
        "Under the workload",
        "Not here: litellm",
    ]
    assert [html.index(place) for place in places] == sorted(html.index(place) for place in places)
    assert '<td data-title="TTFT p50" class="ahead">50.0 ms</td>' in html  # two repetitions separate nothing
    enough = [*turns(), *(turn.model_copy(update={"repetition": turn.repetition + 2}) for turn in turns())]
    assert '<td data-title="TTFT p50" class="best">50.0 ms</td>' in comparison_page(make_comparison(enough), {})
    ttft, trade_off = plots_of(html)
    assert {line["name"]: line["style"] for line in ttft["lines"]} == {"gateway": "s1", OTHER: "s2"}
    assert trade_off["labels"] == [[50, 1000, "gateway"], [60, 900, OTHER]]


def test_an_outage_has_a_chart_for_each_proxy_with_its_moments() -> None:
    records = [record(float(at), at + 0.5) for at in range(30)] + [record(12.0, 13.0, None, CONNECTION)]
    found = killed({("gateway", Fault.KILL): records})
    comparison = make_comparison(turns()).model_copy(update={"killed": found})
    *_, outage = plots_of(comparison_page(comparison, []))
    assert outage["title"] == "gateway, engine killed:"
    assert [line["name"] for line in outage["lines"]] == ["answered", "lost"]
    assert len(outage["uprights"]) in (2, 3)


def test_a_comparison_of_nothing_has_a_page_with_its_reasons() -> None:
    comparison = make_comparison([]).model_copy(update={"passed": False, "reasons": ["nothing was measured"]})
    html = comparison_page(comparison, [])
    assert "nothing was measured" in html
