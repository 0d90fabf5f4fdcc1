from heapq import nlargest
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.observe.record import Record
from gateway.core.request import Demand
from gateway.features.insights.samples import OTHERS, Counts, Epoch, PrefixReport, ReportLimits, Reuse, Samples
from tests.unit.insights.traffic import answered

LIMITS = ReportLimits(per_second=2.0, burst=3, samples=4, total_bytes=100, text_bytes=40)
BOUNDS = ReportLimits(epochs=3, epoch_seconds=10.0, rows=8, prefixes=16, taken=4)


def ask(size: int = 10) -> Demand:
    """A request with keys of its own: samples are found again by their identity."""
    return Demand("m", keys=tuple(range(1, 2)), edges=(size,), prompt_size=size, prompt_tokens=5)


def test_a_burst_is_taken_and_then_so_many_a_second() -> None:
    samples = Samples(0.0, LIMITS)
    taken = []
    for step in range(40):
        now = step / 10
        if samples.wants_sample(now):
            samples.sample([b"x"], ask(), "", "", now)
            taken.append(now)
    assert taken[:3] == [0.0, 0.1, 0.2]
    assert 6 <= len(taken[3:]) <= 8
    assert all(later - earlier >= 0.49 for earlier, later in pairwise(taken[3:]))


def test_a_bucket_that_was_full_for_long_gives_no_more_than_a_burst() -> None:
    samples = Samples(0.0, LIMITS)
    taken = 0
    for _ in range(10):
        if samples.wants_sample(1000.0):
            samples.sample([b"x"], ask(), "", "", 1000.0)
            taken += 1
    assert taken == 3


def test_a_sample_stands_for_the_requests_since_the_one_before() -> None:
    samples = Samples(0.0, LIMITS)
    for step in range(100):
        now = step / 50
        if samples.wants_sample(now):
            samples.sample([b"x"], ask(), "", "", now)
    kept = samples.snapshot(0.0)
    assert [sample.weight for sample in kept[-2:]] == [25, 25]


def test_the_oldest_are_forgotten_beyond_the_number_and_the_bytes() -> None:
    samples = Samples(0.0, LIMITS)
    for number in range(6):
        samples.sample([bytes([65 + number])], ask(), "", "", float(number))
    assert [sample.text for sample in samples.snapshot(0.0)] == [b"C", b"D", b"E", b"F"]
    for _ in range(3):
        samples.sample([b"y" * 30, b"z" * 30], ask(), "", "", 9.0)
    assert samples._bytes == 80
    assert [sample.text for sample in samples.snapshot(0.0)] == [b"y" * 30 + b"z" * 10] * 2
    assert repr(samples) == "<Samples 2, 80 bytes, 4 open>"


def test_what_became_of_a_request_is_learned() -> None:
    samples = Samples(0.0, LIMITS)
    asked = ask()
    samples.sample([b"x"], asked, "team", "shop", 1.0)
    before = samples.snapshot(0.0)
    record = Record("id", "chat", 1.0)
    record.prompt_tokens, record.predicted_hit_tokens, record.actual_hit_tokens = 7, 4, 3
    samples.finished(record, ask())  # equal, but another request
    assert not samples.snapshot(0.0)[0].has_usage
    samples.finished(record, asked)
    (sample,) = samples.snapshot(0.0)
    assert (sample.has_usage, sample.prompt_tokens, sample.hit_tokens) == (True, 7, 3)
    assert not before[0].has_usage
    assert repr(samples).endswith("0 open>")


def test_an_empty_prompt_and_what_is_too_old_are_left_out() -> None:
    samples = Samples(0.0, LIMITS)
    samples.sample([], ask(), "", "", 1.0)
    samples.sample([b"old"], ask(), "", "", 1.0)
    samples.sample([b"new"], ask(), "", "", 5.0)
    assert [sample.text for sample in samples.snapshot(2.0)] == [b"new"]


def ask_of(*keys: int) -> Demand:
    edges = tuple(100 * (place + 1) for place in range(len(keys)))
    return Demand("m", keys=keys, edges=edges, prompt_size=100 * len(keys), prompt_tokens=25 * len(keys))


def count(
    report: PrefixReport, keys: tuple[int, ...], hit_tokens: int = 0, now: float = 1.0, client: str = "a"
) -> None:
    asked = ask_of(*keys)
    report.finished(answered(asked, client, hit_tokens, now))


def test_tokens_are_counted_by_key_and_application() -> None:
    report = PrefixReport(0.0, Random(1), limits=BOUNDS)
    count(report, (1, 2), 25)
    count(report, (1, 3), 0)
    count(report, (9, 3), 0, client="b")
    (epoch,) = report._epochs(0.0)
    assert epoch.rows == {("a", 1): Counts(2, 100, 25, 100, 25), ("b", 9): Counts(1, 50, 0, 50, 0)}
    assert report._counted() == Counts(3, 150, 25, 150, 25)
    assert report._models == {"m"}


def test_counts_move_on_with_time_and_are_forgotten() -> None:
    report = PrefixReport(0.0, Random(1), limits=BOUNDS)
    for now in (1.0, 12.0, 25.0, 37.0):
        count(report, (1,), now=now)
    assert [epoch.began_seconds for epoch in report._epochs(-1.0)] == [10.0, 20.0, 30.0]
    assert [epoch.began_seconds for epoch in report._epochs(29.0)] == [20.0, 30.0]
    count(report, (1,), now=1000.0)
    assert sum(each.requests for epoch in report._epochs(960.0) for each in epoch.rows.values()) == 1
    assert report._counted().requests == 5


def test_a_snapshot_does_not_change() -> None:
    report = PrefixReport(0.0, Random(1), limits=BOUNDS)
    count(report, (1, 2), 50)
    (before,) = report._epochs(0.0)
    count(report, (1, 2), 50)
    assert before.rows[("a", 1)].requests == 1
    assert before.prefixes[1].requests == 1
    assert before.prefixes[1].backends == {"b0"}


def test_a_prefix_is_counted_from_its_first_hit_on() -> None:
    report = PrefixReport(0.0, Random(1))
    count(report, (1, 2, 3))
    assert report._epochs(0.0)[0].prefixes == {}
    count(report, (1, 2, 4), 50)
    count(report, (1, 2, 5), 0)  # on a backend that has not got it
    prefixes = report._epochs(0.0)[0].prefixes
    assert {key: (reuse.requests, reuse.saved_tokens) for key, reuse in prefixes.items()} == {1: (2, 25), 2: (2, 50)}
    assert prefixes[2].parent == 1
    assert (prefixes[2].size_bytes, prefixes[2].tokens) == (200, 50)


@given(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=20), st.integers(1, 20))
def test_of_the_prefixes_those_that_saved_most_are_kept(saved: list[float], kept: int) -> None:
    prefixes = {key: Reuse(1, 1.0, 0, 1, each, frozenset()) for key, each in enumerate(saved)}
    epoch = Epoch(0.0, {}, dict(prefixes))
    epoch.drop_rare_prefixes(kept)
    best = nlargest(kept, prefixes, key=lambda key: prefixes[key].saved_tokens)
    assert epoch.prefixes == {key: prefixes[key] for key in best}


def test_of_many_requests_a_share_is_looked_at_and_stands_for_all() -> None:
    report = PrefixReport(0.0, Random(1), limits=ReportLimits(taken=64))
    for number in range(6000):
        count(report, (1 + number % 2, 7), 50)
    epoch = report._epoch
    assert report._taken < 600
    for key in (1, 2):
        assert abs(epoch.prefixes[key].requests - 3000) < 600


@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from("abc"), st.integers(0, 3)), max_size=300))
def test_tables_are_bounded_and_lose_no_count(requests: list[tuple[int, str, int]]) -> None:
    report = PrefixReport(0.0, Random(1), limits=BOUNDS)
    for number, (first, client, hit) in enumerate(requests):
        count(report, (first, first + 1000, first + 2000), 25 * hit, now=1.0 + number / 20, client=client)
        epoch = report._epoch
        assert len(epoch.rows) <= BOUNDS.rows + 3
        assert len(epoch.prefixes) <= BOUNDS.prefixes + 3
    counted = report._counted()
    assert (counted.requests, counted.prompt_tokens) == (len(requests), 75 * len(requests))


def test_the_rarest_applications_share_a_row() -> None:
    report = PrefixReport(0.0, Random(1), limits=BOUNDS)
    for _ in range(5):
        count(report, (1,))
    for number in range(2, 30):
        count(report, (number,))
    rows = report._epochs(0.0)[0].rows
    assert rows[("a", 1)].requests == 5
    assert rows[("a", OTHERS)].requests > 10
    assert sum(counts.requests for counts in rows.values()) == 33
