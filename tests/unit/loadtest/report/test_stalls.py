"""Stretches without a read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.drive.record import Record
from loadtest.report.timeline import stalls


def _record(sent: float, end: float, quiet: tuple[float, float] | None = None) -> Record:
    record = Record(0, 0, sent, sent=sent, end=end, outcome="ok")
    record.quiet_from, record.quiet_until = quiet or (sent, end)
    return record


def _usual() -> list[Record]:
    return [_record(100 + index / 10, 100.1 + index / 10) for index in range(50)]


def test_a_stretch_in_which_all_wait_is_a_stall_with_all_requests_of_its_time() -> None:
    held = [_record(1.0, 4.5, (2.0, 4.0)), _record(1.5, 4.2, (1.9, 4.1)), _record(3.0, 4.4, (3.0, 4.3))]
    (stall,) = stalls([*held, *_usual()])
    assert (stall.start, stall.seconds, stall.in_flight) == (2.0, 2.0, 3)


def test_it_is_none_while_one_request_is_read() -> None:
    assert stalls([_record(1.0, 4.5, (2.0, 4.0)), _record(1.5, 4.2, (1.5, 1.6)), *_usual()]) == []


def test_it_is_none_where_answers_usually_take_that_long() -> None:
    assert stalls([_record(second * 3.0, second * 3.0 + 3) for second in range(20)]) == []


def test_each_read_ends_a_stretch() -> None:
    held = [_record(0.0, 4.0, (0.0, 2.0)), _record(0.0, 4.0, (2.0, 4.0))]
    assert [stall.seconds for stall in stalls([*held, *_usual()])] == []
    apart = [_record(0.0, 1.5), _record(0.0, 3.1), *_usual()]
    assert [(stall.start, stall.in_flight) for stall in stalls(apart)] == [(0.0, 2), (1.5, 1)]


def test_nothing_is_reported_of_nothing() -> None:
    assert stalls([]) == []
    assert stalls([_record(1.0, 1.0)]) == []


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 20)), max_size=30))
def test_in_a_stall_something_is_in_flight_and_nothing_ends(spans: list[tuple[float, float]]) -> None:
    records = [_record(start, start + length) for start, length in spans] + _usual()
    for stall in stalls(records):
        inside = [record for record in records if stall.start < record.end < stall.start + stall.seconds - 1e-9]
        assert inside == []
        assert any(record.sent <= stall.start < record.end for record in records)
