"""Every request has exactly one fate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.compare.outage.schema import Fate, Moments, fate_of, fates, steered_away_seconds
from loadtest.drive.record import ERROR_OBJECT, Record
from tests.unit.loadtest.compare.outage_turns import MOMENTS, record

TIMES = st.floats(0, 60, allow_nan=False)


@pytest.mark.parametrize(
    ("given", "fate"),
    [
        (record(9.0, 11.0, 9.1), Fate.ANSWERED),
        (record(30.0, 31.0), Fate.ANSWERED),
        (record(15.0, 22.0, 20.1), Fate.HELD_UP),
        (record(9.0, 20.5), Fate.ANSWERED),
        (record(18.0, 20.5), Fate.ANSWERED),
        (record(15.0, 22.0, 16.0), Fate.ANSWERED),
        (record(1.0, 2.0, 1.5, ERROR_OBJECT), Fate.LOST_BEFORE),
        (record(9.0, 10.0, 9.5, ERROR_OBJECT), Fate.BEGUN),
        (record(9.0, 11.0, None, ERROR_OBJECT), Fate.NOT_BEGUN),
        (record(10.0, 11.0, None, ERROR_OBJECT), Fate.NOT_BEGUN),
        (record(10.1, 11.0, 10.5, ERROR_OBJECT), Fate.WHILE_AWAY),
        (record(21.9, 30.0, None, ERROR_OBJECT), Fate.WHILE_AWAY),
        (record(22.0, 23.0, None, ERROR_OBJECT), Fate.AFTERWARDS),
    ],
)
def test_a_request_is_judged_by_when_it_was_sent_and_what_its_client_had(given: Record, fate: Fate) -> None:
    assert fate_of(given, MOMENTS) is fate


@st.composite
def any_moments(draw: st.DrawFn) -> Moments:
    gone, let_back, serving = sorted(draw(st.tuples(TIMES, TIMES, TIMES)))
    return Moments(gone, let_back, serving, long_wait=draw(TIMES))


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    sent, first, end = sorted(draw(st.tuples(TIMES, TIMES, TIMES)))
    return record(sent, end, draw(st.sampled_from([first, None])), draw(st.sampled_from([None, ERROR_OBJECT])))


@given(st.lists(any_record()), any_moments())
def test_every_request_has_one_fate_and_what_is_lost_is_what_was_not_answered(
    records: list[Record], moments: Moments
) -> None:
    found = fates(records, moments)
    assert set(found) == set(Fate)
    assert sum(found.values()) == len(records)
    assert found[Fate.ANSWERED] + found[Fate.HELD_UP] == sum(one.ok for one in records)
    assert 0.0 <= steered_away_seconds(records, moments) <= moments.serving - moments.gone


@given(any_record(), any_moments())
def test_only_what_was_sent_before_the_engine_went_can_have_been_caught_by_it(one: Record, moments: Moments) -> None:
    caught = fate_of(one, moments) in (Fate.BEGUN, Fate.NOT_BEGUN)
    assert caught == (not one.ok and one.sent <= moments.gone <= one.end and one.sent < moments.serving)


def test_steering_away_took_as_long_as_requests_were_still_lost() -> None:
    lost = [record(sent, sent + 1, None, ERROR_OBJECT) for sent in (9.0, 10.5, 13.0, 23.0)]
    assert math.isclose(steered_away_seconds([*lost, record(19.0, 20.0)], MOMENTS), 3.0)
    assert steered_away_seconds([*lost, record(14.0, 20.5, 20.2)], MOMENTS) == 4.0
    assert steered_away_seconds([record(19.0, 20.0)], MOMENTS) == 0.0
