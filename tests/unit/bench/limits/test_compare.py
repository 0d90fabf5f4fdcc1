import pytest

from tests.bench.limits import crowds
from tests.bench.limits.closed_loop import Crowd
from tests.bench.limits.compare import compared, table

SECONDS = 200.0


@pytest.mark.parametrize("crowd", [crowds.ALL[0], crowds.ALL[2]], ids=lambda crowd: crowd.name)
def test_the_adaptive_limit_is_as_good_as_the_best_static_one_wherever_it_starts(crowd: Crowd) -> None:
    best, too_high, *adaptive = compared(crowd, SECONDS, seeds=1)
    assert too_high.waiting > 100
    assert too_high.preemptions_per_minute > 50
    assert [row.name for row in adaptive] == ["adaptive, from 256", "adaptive, from 8"]
    for row in adaptive:
        assert row.tokens_per_second >= 0.97 * best.tokens_per_second  # 0.98 in longer runs
        assert row.waiting < 1
        assert row.waiting_p95 <= 3
        assert row.preemptions_per_minute < 0.3 * too_high.preemptions_per_minute


def test_the_table_shows_each_limit_against_the_best() -> None:
    crowd = Crowd("few", prompt_tokens=100, output_tokens=50, kv_tokens=50_000, max_num_seqs=8, users=40)
    rows = compared(crowd, 30.0, seeds=1)
    lines = table([(crowd, rows)]).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| few | best static | ")
    assert " | 100.0% | " in lines[2]
