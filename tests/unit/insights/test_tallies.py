from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.insights.tallies import OTHERS, Bounds, Tallies, add_up
from gateway.request import Ask
from tests.unit.insights.traffic import answered

BOUNDS = Bounds(epochs=3, epoch_seconds=10.0, rows=8, prefixes=16, taken=4)


def ask(*keys: int) -> Ask:
    edges = tuple(100 * (place + 1) for place in range(len(keys)))
    return Ask("m", keys=keys, edges=edges, prompt_size=100 * len(keys), prompt_tokens=25 * len(keys))


def count(tallies: Tallies, keys: tuple[int, ...], hit_tokens: int = 0, now: float = 1.0, client: str = "a") -> None:
    asked = ask(*keys)
    tallies.count(answered(asked, client, hit_tokens, now), asked)


def test_tokens_are_counted_by_key_and_application() -> None:
    tallies = Tallies(0.0, BOUNDS, Random(1))
    count(tallies, (1, 2), 25)
    count(tallies, (1, 3), 0)
    count(tallies, (9, 3), 0, client="b")
    (epoch,) = tallies.snapshot(0.0)
    assert epoch.rows == {("a", 1): [2, 100, 25, 100, 25], ("b", 9): [1, 50, 0, 50, 0]}
    assert tallies.since_start() == [3, 150, 25, 150, 25]
    assert tallies.models() == {"m"}


def test_counts_move_on_with_time_and_are_forgotten() -> None:
    tallies = Tallies(0.0, BOUNDS, Random(1))
    for now in (1.0, 12.0, 25.0, 37.0):
        count(tallies, (1,), now=now)
    assert [epoch.began_seconds for epoch in tallies.snapshot(-1.0)] == [10.0, 20.0, 30.0]
    assert [epoch.began_seconds for epoch in tallies.snapshot(29.0)] == [20.0, 30.0]
    count(tallies, (1,), now=1000.0)
    assert sum(row[0] for epoch in tallies.snapshot(960.0) for row in epoch.rows.values()) == 1
    assert tallies.since_start()[0] == 5


def test_a_snapshot_does_not_change() -> None:
    tallies = Tallies(0.0, BOUNDS, Random(1))
    count(tallies, (1, 2), 50)
    (before,) = tallies.snapshot(0.0)
    count(tallies, (1, 2), 50)
    assert before.rows[("a", 1)][0] == 1
    assert before.prefixes[1].requests == 1
    assert before.prefixes[1].backends == {"b0"}


def test_a_prefix_is_counted_from_its_first_hit_on() -> None:
    tallies = Tallies(0.0, Bounds(), Random(1))
    count(tallies, (1, 2, 3))
    assert tallies.snapshot(0.0)[0].prefixes == {}
    count(tallies, (1, 2, 4), 50)
    count(tallies, (1, 2, 5), 0)  # on a backend that has not got it
    prefixes = tallies.snapshot(0.0)[0].prefixes
    assert {key: (reuse.requests, reuse.saved_tokens) for key, reuse in prefixes.items()} == {1: (2, 25), 2: (2, 50)}
    assert prefixes[2].parent == 1
    assert (prefixes[2].size_bytes, prefixes[2].tokens) == (200, 50)


def test_of_many_requests_a_share_is_looked_at_and_stands_for_all() -> None:
    tallies = Tallies(0.0, Bounds(taken=64), Random(1))
    for number in range(6000):
        count(tallies, (1 + number % 2, 7), 50)
    epoch = tallies._epoch
    assert epoch.taken < 600
    for key in (1, 2):
        assert abs(epoch.prefixes[key].requests - 3000) < 600


@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from("abc"), st.integers(0, 3)), max_size=300))
def test_tables_are_bounded_and_lose_no_count(requests: list[tuple[int, str, int]]) -> None:
    tallies = Tallies(0.0, BOUNDS, Random(1))
    for number, (first, client, hit) in enumerate(requests):
        count(tallies, (first, first + 1000, first + 2000), 25 * hit, now=1.0 + number / 20, client=client)
        epoch = tallies._epoch
        assert len(epoch.rows) <= BOUNDS.rows + 3
        assert len(epoch.prefixes) <= BOUNDS.prefixes + 3
    assert tallies.since_start()[:2] == [len(requests), 75 * len(requests)]


def test_the_rarest_applications_are_told_together() -> None:
    tallies = Tallies(0.0, BOUNDS, Random(1))
    for _ in range(5):
        count(tallies, (1,))
    for number in range(2, 30):
        count(tallies, (number,))
    rows = tallies.snapshot(0.0)[0].rows
    assert rows[("a", 1)][0] == 5
    assert rows[("a", OTHERS)][0] > 10
    assert add_up(rows.values())[0] == 33
