"""What keys used: counted by day and model, kept for 400 days, and passed on."""

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.observe.record import Record
from gateway.core.request import Usage
from gateway.features.keys.usage import _MOST_MODELS, KeyUsage, totals
from tests.unit.front.wires import Clock

START = datetime(2026, 11, 26, 12, tzinfo=UTC)
TODAY = (START.date() - datetime(1970, 1, 1).date()).days
DAY_SECONDS = 86400.0


def record(
    key: str = "ann", model: str = "m", usage: Usage | None = None, outcome: str = "completed", estimated: int = 0
) -> Record:
    made = Record("id", "chat", 0.0, client=key)
    made.model = model
    if estimated:
        made.counted(1, estimated)
    if usage is not None:
        made.answered(usage, None, 0, client_was_slow=False)
    made.ended(outcome, 200, 1.0)
    return made


def counted(*records: Record, clock: Clock | None = None) -> KeyUsage:
    usage = KeyUsage(clock or Clock(START.timestamp()))
    usage.apply(has_keys=True)
    usage.finished([*records])
    return usage


def shown(usage: KeyUsage, since: int = 0, until: int = 10**6, *, by_day: bool = False) -> list[tuple[object, ...]]:
    return [(*place, *counts) for *place, counts in totals(usage.state(), since, until, by_day=by_day)]


def test_requests_and_tokens_are_counted_by_key_and_model() -> None:
    usage = counted(
        record(usage=Usage(10, 5, 4)),
        record(usage=Usage(20, 5)),
        record(model="n", usage=Usage(1, 2, 0)),
        record("bob", usage=Usage(7, 0)),
        record("", usage=Usage(99, 99)),
    )
    assert shown(usage) == [
        (0, "ann", "m", 2, 30, 4, 10, 0),
        (0, "ann", "n", 1, 1, 0, 2, 0),
        (0, "bob", "m", 1, 7, 0, 0, 0),
    ]
    assert dict(usage.tokens()) == {
        ("ann", "prompt"): 31, ("ann", "cached"): 4, ("ann", "completion"): 12,
        ("bob", "prompt"): 7, ("bob", "cached"): 0, ("bob", "completion"): 0,
    }  # fmt: skip


def test_what_did_not_complete_is_an_error_with_the_tokens_that_came() -> None:
    usage = counted(
        record(outcome="client_gone", estimated=7),
        record(outcome="quota_exceeded"),
        record(model="", outcome="rejected"),
        record(model=""),  # such as the list of models
    )
    assert shown(usage) == [(0, "ann", "", 1, 0, 0, 0, 1), (0, "ann", "m", 2, 1, 0, 7, 2)]


def test_without_keys_nothing_is_counted() -> None:
    usage = KeyUsage(Clock(START.timestamp()))
    usage.finished([record()])
    assert shown(usage) == []


def test_days_are_those_of_utc_and_are_kept_for_so_long() -> None:
    clock = Clock(START.timestamp())
    usage = counted(record(usage=Usage(1, 1)), clock=clock)
    clock.now += 12 * 3600 - 1
    usage.finished([record(usage=Usage(2, 2))])
    clock.now += 1
    usage.finished([record(usage=Usage(4, 4))])
    clock.now += 2 * DAY_SECONDS
    assert shown(usage, by_day=True) == [(TODAY, "ann", "m", 2, 3, 0, 3, 0), (TODAY + 1, "ann", "m", 1, 4, 0, 4, 0)]
    assert shown(usage, TODAY + 1) == shown(usage, TODAY + 1, TODAY + 1) == [(0, "ann", "m", 1, 4, 0, 4, 0)]
    assert shown(usage) == [(0, "ann", "m", 3, 7, 0, 7, 0)]
    clock.now = START.timestamp() + 400 * DAY_SECONDS
    assert shown(usage, by_day=True) == [(TODAY + 1, "ann", "m", 1, 4, 0, 4, 0)]
    clock.now -= DAY_SECONDS  # a clock that is set back
    usage.finished([record(usage=Usage(8, 8))])
    assert shown(usage, TODAY + 400, by_day=True) == [(TODAY + 400, "ann", "m", 1, 8, 0, 8, 0)]


def test_the_last_day_of_each_key_is_known_as_long_as_the_day_is_kept() -> None:
    clock = Clock(START.timestamp())
    old = counted(record("ann"), record("bob"), clock=clock)
    assert old.last_days() == {"ann": TODAY, "bob": TODAY}
    clock.now += DAY_SECONDS
    old.finished([record("ann")])
    assert old.last_days() == {"ann": TODAY + 1, "bob": TODAY}
    new = KeyUsage(clock)
    clock.now += DAY_SECONDS
    new.restore(old.state())
    assert new.last_days() == {"ann": TODAY + 1, "bob": TODAY}
    clock.now = START.timestamp() + 400 * DAY_SECONDS
    assert new.last_days() == {"ann": TODAY + 1}


def test_models_beyond_the_first_ones_are_counted_together() -> None:
    usage = counted(*[record(model=f"m{number}") for number in range(_MOST_MODELS + 50)])
    rows = shown(usage)
    assert len(rows) == _MOST_MODELS + 1
    assert (0, "ann", "other", 50, 0, 0, 0, 0) in rows


def test_labels_of_metrics_are_capped() -> None:
    usage = counted(*[record(f"key-{number}", usage=Usage(1, 0)) for number in range(1005)])
    tokens = dict(usage.tokens())
    assert tokens["other", "prompt"] == 5
    assert len(tokens) == 3 * 1001


@pytest.mark.parametrize("days", [0, 1, 399, 400])
def test_the_next_process_goes_on_counting(days: int) -> None:
    clock = Clock(START.timestamp() - DAY_SECONDS)
    old = counted(record(usage=Usage(1, 1)), clock=clock)
    clock.now += DAY_SECONDS
    old.finished([record(usage=Usage(2, 2))])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(old.state()))
    clock.now += days * DAY_SECONDS
    new = counted(record(usage=Usage(4, 4)), clock=clock)
    new.restore(state)
    expected = {TODAY - 1: [1, 1, 0, 1, 0], TODAY: [1, 2, 0, 2, 0]}
    kept = {day: counts for day, counts in expected.items() if day > TODAY + days - 400}
    own = [1, 4, 0, 4, 0]
    kept[TODAY + days] = [a + b for a, b in zip(own, kept.get(TODAY + days, [0] * 5), strict=True)]
    assert totals(new.state(), 0, 10**6, by_day=True) == [(day, "ann", "m", kept[day]) for day in sorted(kept)]


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from(["ann", "bob"]), st.integers(0, 100), st.booleans()), max_size=30
    )
)
@settings(max_examples=60, deadline=None)
def test_every_request_is_counted_once_on_its_day_whatever_is_restarted(
    story: list[tuple[float, str, int, bool]],
) -> None:
    clock, expected = Clock(START.timestamp()), dict[tuple[int, str], int]()
    usage = counted(clock=clock)
    for days, key, tokens, restarts in story:
        clock.now += days * DAY_SECONDS
        usage.finished([record(key, usage=Usage(tokens, 0))])
        place = (int(clock.now // DAY_SECONDS), key)
        expected[place] = expected.get(place, 0) + tokens
        if restarts:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(usage.state()))
            usage = counted(clock=clock)
            usage.restore(state)
    found = {(day, key): counts[1] for day, key, _, counts in totals(usage.state(), 0, 10**6, by_day=True)}
    assert found == expected
    assert sum(found.values()) == sum(tokens for *_, tokens, _ in story)


def test_what_was_counted_since_a_moment_is_passed_on_also_over_midnight() -> None:
    clock = Clock(START.timestamp())
    old = counted(record(usage=Usage(1, 1)), clock=clock)
    new = KeyUsage(clock)
    new.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(old.state())))
    moment = old.today()
    assert old.since(*moment) == [(TODAY, [])]
    old.finished([record(usage=Usage(2, 2)), record("bob", usage=Usage(4, 0))])
    clock.now += DAY_SECONDS
    old.finished([record(usage=Usage(8, 8))])
    for day, rows in old.since(*moment):
        new.add(rows, day)
    assert shown(new, by_day=True) == shown(old, by_day=True)
    assert sorted(shown(new)) == [(0, "ann", "m", 3, 11, 0, 11, 0), (0, "bob", "m", 1, 4, 0, 0, 0)]
