"""Which figures mean the same in two files."""

from __future__ import annotations

import pytest

from loadtest.report.schema import DEFINITIONS, Results, redefined

# What a file says of itself and of its run, or what was read from elsewhere: nothing is computed.
_NOT_COMPUTED = {"schema_version", "definitions", "environment", "plan", "metrics_delta", "samples"}


def test_every_figure_has_a_version_of_its_definition() -> None:
    assert set(Results.model_fields) - _NOT_COMPUTED == {path.partition(".")[0] for path in DEFINITIONS}


@pytest.mark.parametrize(
    ("path", "recorded", "versions"),
    [
        ("latency.ttft.p50", {}, None),
        ("slo.goodput_per_second", {}, (1, 2)),
        ("slo.attainments.tpot", {}, (1, 2)),
        ("verdict.checks[3].message", {}, (1, 2)),
        ("verdict.checks[3].message", DEFINITIONS, None),
        ("slo.met", {"slo": 2, "slo.goodput_per_second": 9}, None),
        ("slo.goodput_per_second", {"slo": 2, "slo.goodput_per_second": 9}, (9, 2)),
    ],
)
def test_a_figure_is_defined_otherwise_where_its_own_version_or_that_above_it_differs(
    path: str, recorded: dict[str, int], versions: tuple[int, int] | None
) -> None:
    assert redefined(path, recorded) == versions
