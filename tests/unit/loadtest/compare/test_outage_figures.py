"""What records of a run with an outage come to."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.compare.outage.schema import Fate
from loadtest.compare.run import figures, spans
from loadtest.drive.record import CONNECTION, ERROR_OBJECT
from tests.unit.loadtest.compare.outage_turns import MOMENTS, record, steadily

RECORDS = [
    record(1.0, 2.0, 1.1),
    record(2.0, 3.0),
    record(9.5, 10.2, 9.7, ERROR_OBJECT),
    record(9.6, 10.3, None, CONNECTION),
    record(12.0, 13.0, 12.4),
    record(14.5, 15.0, None, CONNECTION),
    record(30.0, 31.0, 30.2),
]


def test_figures_report_what_was_lost_how_it_showed_and_how_long_first_tokens_took() -> None:
    found = figures(RECORDS, MOMENTS, steadily(), 0)
    lost = {fate: count for fate, count in found.fates.items() if count}
    assert lost == {Fate.ANSWERED: 4, Fate.BEGUN: 1, Fate.NOT_BEGUN: 1, Fate.WHILE_AWAY: 1}
    assert found.shown_as == {ERROR_OBJECT: 1, CONNECTION: 2}
    assert found.first_error.startswith("http_502")
    assert found.steered_away_seconds == 4.5
    ttft = (found.ttft_p99_before, found.ttft_p99_away, found.ttft_p99_after)
    assert [round(value or 0.0) for value in ttft] == [100, 400, 200]
    assert found.share_seconds == 0.0
    assert found.reached_engines == 39 + 10 + 17


def test_where_nothing_was_streamed_there_are_no_first_tokens() -> None:
    found = figures([record(1.0, 2.0)], MOMENTS, steadily(), 0)
    assert found.ttft_p99_before is found.ttft_p99_away is found.ttft_p99_after is None


@given(st.lists(st.tuples(st.floats(0, 200), st.booleans())))
def test_every_request_is_in_one_span(sent: list[tuple[float, bool]]) -> None:
    records = [record(at, at + 1, None, None if ok else CONNECTION) for at, ok in sent]
    found = spans(records)
    assert sum(span.answered for span in found) == sum(ok for _, ok in sent)
    assert sum(span.lost for span in found) == sum(not ok for _, ok in sent)
    widths = {round(b.start - a.start, 6) for a, b in pairwise(found)}
    assert len(widths) <= 1
