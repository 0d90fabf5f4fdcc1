"""The tables hold ours against the others repetition by repetition, and hide nothing that went wrong."""

from xml.etree import ElementTree

import pytest

from tests.bench.routing.picture import picture
from tests.bench.routing.report import COLUMNS, markdown, ratios
from tests.bench.routing.results import Recovery, RoutingResults
from tests.unit.bench.routing.builders import fidelity, figures, results, turn

TTFT = next(column for column in COLUMNS if column.title.startswith("TTFT mean"))


def test_a_ratio_is_of_the_same_repetition() -> None:
    run = results(
        {
            "gateway-prefix": [turn(1, figures(100)), turn(2, figures(300)), turn(3, None, "it ended")],
            "smg": [turn(1, figures(200)), turn(2, figures(300)), turn(3, figures(10))],
        }
    )
    assert ratios(run, "smg", TTFT) == [0.5, 1.0]
    assert "| smg | 1.00 (1.00-1.00) | 0.75 (0.50-1.00) |" in markdown(run)


def test_the_table_has_medians_with_their_range() -> None:
    shown = markdown(results({"gateway-prefix": [turn(n, figures(ttft)) for n, ttft in enumerate((90, 300, 100))]}))
    assert "| **gateway, prefix** | 50.0 (50.0-50.0) | 100 (90-300) |" in shown
    assert "70 % of" not in shown
    assert "70% of the 10.0 that the engines can" in shown


@pytest.mark.parametrize(("errors", "judged"), [((0.01, 0.02, 0.2), "met"), ((0.01, 0.06, 0.2), "NOT met")])
def test_fidelity_is_judged_by_its_median(errors: tuple[float, ...], judged: str) -> None:
    turns = [turn(number, figures(fidelity=fidelity(error))) for number, error in enumerate(errors)]
    assert f"goal ≤ 5%: {judged}." in markdown(results({"gateway-prefix": turns}))


def test_recovery_is_shown_by_the_ordinal_of_the_requests() -> None:
    told = Recovery(before=fidelity(0.01), after={"1 to 5": fidelity(0.3), "6 to 20": fidelity(0.04)})
    shown = markdown(results({"gateway-prefix": [turn(1, figures(fidelity=fidelity(0.1), recovery=told))]}))
    assert "before 1.0 %, requests 1 to 5: 30.0 %, requests 6 to 20: 4.0 %" in shown


def test_an_engine_that_came_back_too_late_is_told() -> None:
    told = Recovery(before=fidelity(0.01), after={})
    shown = markdown(results({"gateway-prefix": [turn(1, figures(fidelity=fidelity(0.1), recovery=told))]}))
    assert "no request reached the engines that lost their caches again" in shown


def test_failures_wrong_lengths_and_a_late_client_are_told() -> None:
    run = results(
        {
            "gateway-prefix": [
                turn(1, figures(failed={"http_503": 2}, wrong_lengths=3, late_ms=400, others_share=0.3))
            ],
            "smg": [turn(1, None, "it ended with 1; its last words: none")],
        }
    )
    shown = markdown(run)
    assert "gateway, prefix: http_503: no." in shown
    assert "3 answers have another length" in shown
    assert "other processes used 30% of the machine" in shown
    assert "the client sent late (p99 400 ms)" in shown
    assert "smg: it ended with 1" in shown
    assert "| smg | - |" in shown


def test_the_picture_has_a_curve_of_each_arm_in_both_panels() -> None:
    run = results({name: [turn(1, figures()), turn(2, figures())] for name in ("gateway-prefix", "smg")})
    root = ElementTree.fromstring(picture(run))
    curves = [element for element in root.iter() if element.get("class", "").startswith("line s")]
    assert len(curves) == 2 + 4  # the legend and two panels
    assert sum("strong" in element.get("class", "") for element in curves) == 3
    text = "".join(root.itertext())
    assert "TTFT by percentile" in text
    assert "smg: 50% of prompt tokens found in a cache" in text


def test_there_is_no_picture_of_nothing() -> None:
    assert picture(results({"smg": [turn(1, None, "it ended")]})) == ""


def test_results_are_read_back_as_they_were_written() -> None:
    run = results({"smg": [turn(1, figures(fidelity=fidelity(0.1)))]})
    assert RoutingResults.model_validate_json(run.model_dump_json()) == run
