"""Part of the comparison: the offline class fills what is idle, and interactive requests hardly feel it."""

from tests.bench.offline.compare import Aimd, Fixed, Offline, Row, arrivals, ran, row, table
from tests.bench.offline.fleet import Request, Rule

CAPACITY_PER_SECOND = 83.0  # requests
IDLE_TOKENS_PER_SECOND = 6500.0


def way(requests: list[Request], rule: Rule | None, objective: float | None, seconds: float) -> Row:
    return row("way", [ran(requests, rule, objective, seconds)], seconds)


def test_the_offline_class_uses_what_is_idle_and_is_hardly_felt() -> None:
    requests = arrivals(CAPACITY_PER_SECOND, 46.0, 1)
    alone = way(requests, None, None, 46.0)
    offline = way(requests, Offline(), alone.tpot_p99, 46.0)
    assert offline.ttft_p99 <= 1.4 * alone.ttft_p99
    assert offline.tpot_p99 <= 1.2 * alone.tpot_p99
    assert offline.line_tokens_per_second >= 0.8 * IDLE_TOKENS_PER_SECOND
    assert offline.revoked > 0
    both = row("both", [ran(requests, None, None, 46.0), ran([], None, None, 46.0)], 46.0)
    assert both.ttft_p99 == alone.ttft_p99, "all runs count together"
    assert table([alone, offline], IDLE_TOKENS_PER_SECOND).count("\n") == 3


def test_the_simple_rules_run_lines_as_batch_requests() -> None:
    fixed = way([], Fixed(8), None, 10.0)
    aimd = way([], Aimd(0.1), None, 10.0)
    assert 0 < fixed.line_tokens_per_second < 2 * aimd.line_tokens_per_second
    assert fixed.revoked == aimd.revoked == 0
