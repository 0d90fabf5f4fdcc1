"""Tables show medians with their intervals, who is ahead, and ours over theirs in the same repetition."""

from loadtest.compare.schema import ArmRun, Overhead
from loadtest.compare.tables import (
    COST,
    QUALITY,
    Column,
    best,
    cell,
    cell_text,
    columns_of,
    ratio,
    tables,
    ties,
    winners,
)
from loadtest.report.series import spread_of
from tests.unit.loadtest.compare.builders import make_comparison, make_figures, make_turn

HIT_RATE, TTFT = QUALITY[0], QUALITY[1]


def column(title: str) -> Column:
    return next(one for one in (*QUALITY, *COST) if one.title == title)


def three(arm: str, *ttft: float) -> list[ArmRun]:
    return [make_turn(arm, number, figures=make_figures(ttft_p50=value)) for number, value in enumerate(ttft)]


def test_a_cell_is_the_median_of_the_repetitions_with_its_confidence() -> None:
    found = cell(three("smg", 29, 30, 31), TTFT)
    assert cell_text(found, TTFT.shown) == "30.0 ms ±8%"  # 4.303 x 1 ms / sqrt(3)
    assert cell_text(found, TTFT.shown, near=True) == "30.0 ms ±2.48 ms"
    assert cell_text(spread_of([0.49, 0.5, 0.51]), HIT_RATE.shown, near=True) == "50.0% ±2.5 pp"
    assert cell_text(cell(three("smg", 10, 20), TTFT), TTFT.shown) == "15.0 ms"  # two have no interval
    assert cell_text(cell(three("smg", 10), TTFT), TTFT.shown) == "10.0 ms"
    assert cell_text(cell([], TTFT), TTFT.shown) == "-"


def test_the_best_is_the_lowest_latency_and_the_highest_hit_rate() -> None:
    turns = [
        make_turn("gateway", figures=make_figures(hit_ratio=0.4, ttft_p50=10)),
        make_turn("smg", figures=make_figures(hit_ratio=0.6, ttft_p50=20)),
    ]
    comparison = make_comparison(turns)
    assert (best(comparison, HIT_RATE), best(comparison, TTFT)) == ("smg", "gateway")
    assert winners(comparison)[1:3] == ["hit rate: smg", "TTFT p50: gateway"]


def test_no_arm_is_best_of_equals_or_alone() -> None:
    assert best(make_comparison([make_turn("gateway"), make_turn("smg")]), TTFT) is None
    assert best(make_comparison([make_turn("gateway")]), TTFT) is None


def test_an_engine_without_a_proxy_does_not_compete() -> None:
    turns = [*three("direct", 1), *three("gateway", 10), *three("smg", 20)]
    assert best(make_comparison(turns), TTFT) == "gateway"


def test_arms_that_repetitions_do_not_separate_from_the_best_tie_with_it() -> None:
    turns = [*three("gateway", 10, 20, 30, 40), *three("smg", 28, 39, 41, 42), *three("nginx", 50, 60, 70, 80)]
    comparison = make_comparison([*turns, *three("other", 90, 91, 92, 93)])
    assert ties(comparison, [TTFT]) == {TTFT: ["smg"]}
    assert "TTFT p50: gateway (ties with: smg)" in winners(comparison)
    shown = {row[0]: row[2] for row in tables(comparison)[0].rows}
    assert [name for name, text in shown.items() if text.endswith(", tie")] == ["gateway 1.2", "smg 1.2"]


def test_three_repetitions_separate_nothing_and_say_so() -> None:
    comparison = make_comparison([*three("gateway", 1, 2, 3), *three("smg", 70, 80, 90)])
    assert ties(comparison, [TTFT]) == {TTFT: ["smg"]}
    too_few = "too few repetitions to separate proxies (--repeat 4 or more can)"
    assert winners(comparison) == [too_few, "TTFT p50: gateway"]


def test_ratios_are_of_the_same_repetition() -> None:
    comparison = make_comparison([*three("gateway", 10, 100), *three("smg", 20, 50)])
    found = ratio(comparison, "smg", TTFT)
    assert found is not None
    assert (found.low, found.median, found.high) == (0.5, 1.25, 2.0)


def test_turns_that_the_client_spoilt_count_only_where_there_are_no_others() -> None:
    good, spoilt = make_turn("smg", 0), make_turn("smg", 1, valid=False)
    assert make_comparison([good, spoilt]).turns_of("smg") == [good]
    assert make_comparison([spoilt]).turns_of("smg") == [spoilt]


def test_columns_without_figures_and_silent_counts_are_left_out() -> None:
    shown = [one.title for one in columns_of(make_comparison([make_turn("gateway")]), QUALITY)]
    assert shown == ["hit rate", "TTFT p50", "TTFT p99", "output tokens/s"]
    failing = make_figures(failed={"http_502": 7}, attainment=0.5)
    shown = [one.title for one in columns_of(make_comparison([make_turn("gateway", figures=failing)]), QUALITY)]
    assert shown[-2:] == ["in SLO", "failed"]


def test_cpu_that_was_measured_by_itself_goes_before_that_of_the_workload() -> None:
    alone = make_turn("gateway", overhead=Overhead(cpu_us_per_request=100.0))
    assert column("CPU a request").value(alone) == 100.0
    assert column("CPU a streamed event").value(alone) == 25.0


def test_the_best_cells_are_marked_in_the_row_of_their_arm() -> None:
    first, ratios, *_ = tables(make_comparison([*three("gateway", 10), *three("smg", 20)]))
    assert first.head[:3] == ["proxy", "hit rate", "TTFT p50"]
    assert first.rows[0][:3] == ["gateway 1.2", "50.0%", "10.0 ms"]
    assert first.best == {(0, 2)}
    assert ratios.rows[0][:3] == ["smg", "1.00", "0.50"]
    assert ratios.head[:3] == ["ours / theirs", "hit rate ↑", "TTFT p50 ↓"]


def test_an_arm_without_figures_has_no_row() -> None:
    turns = [make_turn("gateway"), make_turn("smg", figures=None).model_copy(update={"figures": None})]
    assert [table.rows[0][0] for table in tables(make_comparison(turns))] == ["gateway 1.2"] * 3


def test_added_latency_has_a_sign_and_no_ratio() -> None:
    turns = [make_turn("gateway"), make_turn("smg")]
    found = tables(make_comparison(turns))
    cost = found[-1]
    assert cost.rows[0][1:3] == ["+0.50 ms", "+3.00 ms"]
    assert not [
        title for table in found if table.head[0] == "ours / theirs" for title in table.head if "added" in title
    ]
