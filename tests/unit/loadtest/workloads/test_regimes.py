"""Made traces are what their descriptions state, and the same each time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from loadtest.workloads.regimes import REGIMES, made, trace_from
from loadtest.workloads.trace import Row, TraceError


def mean_tokens(rows: list[Row]) -> tuple[float, float]:
    """Of prompts and answers."""
    return mean(row.prompt_tokens for row in rows), mean(row.output_tokens for row in rows)


@pytest.mark.parametrize("name", REGIMES)
def test_a_regime_is_a_valid_trace_of_a_few_thousand_rows_and_always_the_same(name: str) -> None:
    trace = made(name)
    assert trace == made(name)
    assert 1000 < len(trace.rows) < 5100
    for row in trace.rows:
        assert len(row.keys) == row.prompt_tokens // trace.block_tokens
        assert row.output_tokens >= 1
    if not trace.sessions:
        assert all(before.at_seconds <= after.at_seconds for before, after in pairwise(trace.rows))


def test_reasoning_has_long_answers_and_shares_only_a_system_prompt() -> None:
    rows = list(made("reasoning").rows)
    prompt_tokens, output_tokens = mean_tokens(rows)
    assert 900 < prompt_tokens < 1100
    assert 7500 < output_tokens < 8500
    uses = Counter(key for row in rows for key in row.keys)
    assert sorted(set(uses.values())) == [1, len(rows)]


def test_mixed_has_two_percent_of_very_long_prompts() -> None:
    rows = made("mixed").rows
    long = [row for row in rows if row.prompt_tokens >= 80_000]
    assert 0.018 < len(long) / len(rows) < 0.022
    assert mean(row.prompt_tokens for row in rows if row.prompt_tokens < 80_000) < 2000


def test_tools_are_few_templates_and_bursts() -> None:
    rows = made("tools").rows
    assert len({row.keys[0] for row in rows}) == 16
    seconds = Counter(int(row.at_seconds) for row in rows)
    assert max(seconds.values()) > 1.5 * mean(seconds.values())


def test_agents_are_sessions_whose_prompts_grow_by_the_answers() -> None:
    trace = made("agents")
    assert trace.sessions
    turns = 0
    for before, after in pairwise(trace.rows):
        if before.session == after.session:
            turns += 1
            assert after.keys[: len(before.keys)] == before.keys
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.think_seconds > 0
    assert turns > 1500


def test_embeddings_have_no_answers_and_share_nothing() -> None:
    rows = made("embeddings").rows
    assert {row.output_tokens for row in rows} == {1}
    assert set(Counter(key for row in rows for key in row.keys).values()) == {1}


def test_synthetic_prefixes_follow_zipfs_law() -> None:
    uses = Counter(row.keys[0] for row in made("synthetic").rows).most_common()
    assert uses[0][1] > 5 * uses[9][1] > 0


def test_a_regime_can_be_cut_and_have_other_blocks() -> None:
    assert len(trace_from("regime:agents", limit=20).rows) == 20
    assert made("tools", minutes=0.1).rows[-1].at_seconds < 7
    assert trace_from("regime:tools", 512).block_tokens == 512


def test_a_name_that_is_unknown_is_reported_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="regime:best: unknown regime; there are reasoning, mixed, tools"):
        trace_from("regime:best")
    with pytest.raises(TraceError, match="No such file"):
        trace_from(str(tmp_path / "none"))
