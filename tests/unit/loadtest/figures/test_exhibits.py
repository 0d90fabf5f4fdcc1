"""Each statement about batching, by the figures that the page shows of it."""

from functools import cache

import pytest

from loadtest.figures.command import EXHIBITS
from loadtest.figures.exhibit import Exhibit


@cache
def shown(name: str) -> Exhibit:
    return EXHIBITS[name]()


def column(name: str, title: str) -> dict[str, float]:
    """A column's numbers by the first cells of their rows."""
    exhibit = shown(name)
    place = list(exhibit.head).index(title)
    return {row[0]: _number(row[place]) for row in exhibit.rows}


def _number(cell: str) -> float:
    return float(cell.replace(",", "").removesuffix("x").removesuffix("%").split()[0].rstrip("%x") or 0)


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_has_a_statement_a_finding_and_full_rows(name: str) -> None:
    exhibit = shown(name)
    assert exhibit.name == name
    assert exhibit.statement.endswith(".")
    assert exhibit.finding.endswith(".")
    assert {len(row) for row in exhibit.rows} == {len(exhibit.head)}
    for chart in exhibit.charts:
        assert chart.x_title
        assert chart.y_title
        assert all(len(series.points) > 1 for series in chart.series)


def test_the_batch_curve_meets_the_stated_figures() -> None:
    rates = column("batch-curve", "computed")
    for users, stated in (("1", 95), ("8", 620), ("32", 2400)):
        assert rates[users] == pytest.approx(stated, rel=0.05)


def test_the_card_holds_about_64_sequences_and_preempts_beyond() -> None:
    preemptions = column("memory", "preemptions")
    assert preemptions["64"] == 0 < preemptions["80"]
    assert "32 x 4.0 GiB = 128 GiB" in shown("memory").finding


def test_continuous_batching_gains_with_the_spread_of_answers() -> None:
    gains = [_number(row[5]) for row in shown("static").rows if row[5]]
    assert gains[0] == 1
    assert max(gains) > 5
    assert gains[1] < gains[2] < gains[3]


def test_slots_beyond_the_users_bring_nothing() -> None:
    rates = {(row[0], row[1]): row[2] for row in shown("concurrency").rows}
    assert rates["8", "8"] == rates["32", "8"] == rates["128", "8"]


def test_chunks_shorten_the_longest_pause_and_cost_the_long_prompts_a_little() -> None:
    longest, long, memory = (
        column("chunked-prefill", title) for title in ("longest", "TTFT p50, long", "working memory")
    )
    assert 5 * longest["2048"] < longest["off"]
    assert long["off"] < long["2048"] < 1.5 * long["off"]
    assert memory["2048"] < memory["off"]
    short = column("chunked-prefill", "tokens/s, short prompts only")
    assert short["2048"] < short["off"]


def test_a_split_pays_for_large_models_alone() -> None:
    rates = {(row[0], row[1]): row[2] for row in shown("tensor-parallel").rows}
    assert _number(rates["llama-3.2-3b", "4 x tp 1"]) > _number(rates["llama-3.2-3b", "1 x tp 4"])
    assert _number(rates["qwen3-32b", "4 x tp 1"]) < _number(rates["qwen3-32b", "1 x tp 4"])
    assert rates["llama-3.1-70b", "4 x tp 1"] == "does not fit"


def test_caching_helps_identical_prefixes_only() -> None:
    rates = column("prefix-caching", "tokens/s")
    assert rates["identical prefixes, caching on"] > 2 * rates["identical prefixes, caching off"]
    assert rates["unique prefixes, caching on"] == rates["unique prefixes, caching off"]


def test_a_gpu_passes_the_target_with_enough_users() -> None:
    busy = column("gpu-utilization", "h100-8b")
    assert busy["1"] < 85 < busy["256"]
    assert shown("gpu-utilization").charts[0].bounds == [(85.0, "target: 85 %")]


def test_all_settings_together_multiply() -> None:
    assert [*column("all-together", "over the first").values()][-1] > 4
