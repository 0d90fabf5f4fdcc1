"""Traces keep who shares what with whom; times can be stretched, never the order."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads.trace import TraceError
from tests.bench.routing.made_trace import made_trace
from tests.bench.routing.trace import (
    BLOCK_TOKENS,
    Row,
    at_rate,
    ideal_hit_ratio,
    own_rate,
    read_trace,
    slice_of,
    spread,
    with_crowd,
)

LINE = '{"t": 1.5, "n_blocks": 2, "tail_tokens": 3, "input_tokens": 35, "output_tokens": 7, "hash_ids": [4, 9]}\n'


def rows_at(*times: float) -> list[Row]:
    return [Row(at, (number,), 0, 1) for number, at in enumerate(times)]


def test_a_row_has_the_tokens_of_its_blocks_and_its_tail(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINE + "\n" + LINE.replace("1.5", "0.5"))
    first, second = read_trace(file)
    assert first.at == 0
    assert second == Row(1.0, (4, 9), 3, 7)
    assert second.input_tokens == 35


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        (LINE + '{"t": 1}\n', ":2: no 'input_tokens'"),
        (LINE.replace("7", "0"), ":1: .*lengths at least 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match=told):
        read_trace(file)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nothing")


def test_rows_of_one_moment_are_spread_up_to_the_next_and_others_stay() -> None:
    found = spread(rows_at(0, 0, 0, 3, 7, 7), random.Random(1))
    assert [row.hash_ids for row in found] == [(number,) for number in range(6)]
    assert 0 <= found[0].at < found[1].at < found[2].at < 3
    assert found[3].at == 3
    assert 7 <= found[4].at < found[5].at <= 11


@given(
    times=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    skip=st.integers(0, 5),
    limit=st.integers(1, 30),
    rate=st.floats(0.1, 100),
)
def test_slices_start_at_zero_stay_in_order_and_come_at_the_wanted_rate(
    times: list[int], skip: int, limit: int, rate: float
) -> None:
    rows = spread(rows_at(*map(float, sorted(times))), random.Random(0))
    if skip >= len(rows):
        with pytest.raises(TraceError, match="nothing is left"):
            slice_of(rows, skip, limit)
        return
    chosen = slice_of(rows, skip, limit)
    assert chosen[0].at == 0
    assert [row.hash_ids for row in chosen] == [row.hash_ids for row in rows[skip : skip + limit]]
    if chosen[-1].at > 1e-6:
        paced = at_rate(chosen, rate)
        assert [row.at for row in paced] == sorted(row.at for row in paced)
        assert own_rate(paced) == pytest.approx(rate)


def test_a_crowd_comes_in_the_middle_with_a_prefix_that_nobody_had() -> None:
    rows = rows_at(*map(float, range(11)))
    crowded = with_crowd(rows)
    crowd = [row for row in crowded if row not in rows]
    assert [row.at for row in crowd] == [4, 5]
    assert len({row.hash_ids for row in crowd}) == 1
    assert not set(crowd[0].hash_ids) & {block for row in rows for block in row.hash_ids}
    assert [row.at for row in crowded] == sorted(row.at for row in crowded)


def test_the_ideal_counts_whole_engine_blocks_seen_before_and_never_the_last_token() -> None:
    assert ideal_hit_ratio([Row(0, (1, 2), 0, 1), Row(1, (1, 2, 3), 0, 1)], 16) == pytest.approx(32 / 80)
    assert ideal_hit_ratio([Row(0, (1, 2, 3), 0, 1), Row(1, (1, 2, 3), 4, 1)], 32) == pytest.approx(32 / 100)
    assert ideal_hit_ratio([Row(0, (1, 2), 0, 1), Row(1, (1, 2), 0, 1)], 32) == 0


def test_the_made_trace_is_the_same_for_a_seed_and_has_turns_tools_and_a_system_prompt() -> None:
    rows = made_trace(1000, seed=3)
    assert rows == made_trace(1000, seed=3)
    assert rows != made_trace(1000, seed=4)
    assert len(rows) == 1000
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    first_blocks = {row.hash_ids[0] for row in rows}
    assert len(first_blocks) == 4  # the chats' system prompt, and three tools
    assert max(len(row.hash_ids) for row in rows) <= 120
    chats = [row.hash_ids for row in rows if row.hash_ids[0] == 0]
    assert sum(longer[: len(turn)] == turn for turn in chats[:100] for longer in chats if longer != turn) > 20


def test_the_made_trace_has_something_to_find_in_caches_but_not_everything() -> None:
    assert 0.25 < ideal_hit_ratio(made_trace(2000, seed=0), 2 * BLOCK_TOKENS) < 0.75
