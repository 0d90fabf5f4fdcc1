"""Our figures beside those of another client, as text cells."""

from __future__ import annotations

from loadtest.report.figure import milliseconds, number
from loadtest.report.schema import CrossCheck

CROSS_COLUMNS = ("ours", "theirs", "ours to theirs")
_NAMES = {"requests_per_second": "requests/s", "output_tokens_per_second": "output tokens/s"}
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}


def cross_title(check: CrossCheck) -> str:
    """What the table holds."""
    failed = f"; {check.failed} of its requests failed" if check.failed else ""
    return f"The same load by {check.client} afterwards, latencies from the actual send{failed}"


def cross_rows(check: CrossCheck) -> list[list[str]]:
    """Figure, ours, theirs, and the ratio."""
    rows = []
    for name, pair in check.figures.items():
        kind, _, percentile = name.partition("_")
        shown = number if name in _NAMES else milliseconds
        ratio = f"{pair.ours / pair.theirs:.2f}" if pair.theirs else "-"
        rows.append(
            [_NAMES.get(name) or f"{_LATENCIES[kind]} {percentile}", shown(pair.ours), shown(pair.theirs), ratio]
        )
    return rows
