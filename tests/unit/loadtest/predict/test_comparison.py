from dataclasses import replace

import pytest

from loadtest.predict.comparison import Side, compared, verdict

MEASURED = Side([0.1, 0.2, 0.3], [1.0, 2.0, 3.0], 600, seconds=10.0, hit_ratio=0.5)


def test_each_figure_has_its_difference() -> None:
    predicted = Side([0.11, 0.21, 0.27], [1.0, 2.0, 3.0], 600, seconds=12.0, hit_ratio=0.52)
    lines = {line.name: line for line in compared(MEASURED, predicted)}
    assert list(lines) == [
        "TTFT p50",
        "TTFT p90",
        "TTFT p99",
        "E2E p50",
        "E2E p90",
        "E2E p99",
        "output tokens/s",
        "hit rate",
    ]
    assert lines["TTFT p50"].difference == pytest.approx(0.05)
    assert lines["TTFT p99"].difference_text == "-10.0%"
    assert lines["output tokens/s"].difference == pytest.approx(50 / 60 - 1)
    assert lines["hit rate"].difference_text == "+2.0 points"


@pytest.mark.parametrize(
    ("times", "points", "fits"),
    [(1.14, 4.9, True), (1.16, 0, False), (0.84, 0, False), (1, 5.1, False), (1, -6, False)],
)
def test_the_verdict_is_by_ttft_and_hit_rate(times: float, points: float, fits: bool) -> None:
    ttft = [value * times for value in MEASURED.ttft_seconds]
    found, reported = verdict(compared(MEASURED, replace(MEASURED, ttft_seconds=ttft, hit_ratio=0.5 + points / 100)))
    assert found is fits
    assert ("does not fit" in reported) is not fits


def test_what_was_not_measured_is_not_called_good() -> None:
    lines = compared(replace(MEASURED, ttft_seconds=[], hit_ratio=None), MEASURED)
    assert "hit rate" not in [line.name for line in lines]
    found, reported = verdict(lines)
    assert not found
    assert "hit rate was not measured" in reported
