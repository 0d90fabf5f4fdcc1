"""The estimate of the time left."""

from loadtest.report.formatting import seconds_text
from loadtest.sweep.run import Pace, Work


def test_nothing_is_reported_before_anything_is_known() -> None:
    pace = Pace()
    assert pace.seconds_left(Work(1, 1)) is None
    pace.started(10)
    assert pace.seconds_left(Work(1, 1)) is None
    assert pace.seconds_left(Work(2, 0)) == 20


def test_runs_take_as_long_as_their_share() -> None:
    pace = Pace()
    pace.started(10)
    pace.started(20)
    pace.ran(3, 0.1)
    pace.ran(12, 0.4)
    assert pace.seconds_left(Work(2, 1.5)) == 2 * 15 + 1.5 * 30


def test_times_are_reported_roughly() -> None:
    assert [seconds_text(seconds) for seconds in (42, 600, 7200)] == ["42 s", "10 min", "2.0 h"]
