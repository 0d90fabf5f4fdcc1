"""Tables and notes of what was lost."""

from __future__ import annotations

from loadtest.compare.outage.report import HEAD, notes, rows
from loadtest.compare.outage.schema import Fault, OutageTurn
from loadtest.compare.tables import tables
from loadtest.drive.record import CONNECTION, ERROR_OBJECT
from tests.unit.loadtest.compare.builders import make_comparison
from tests.unit.loadtest.compare.outage_turns import killed, record

LOST = [record(9.5, 10.2, 9.7, ERROR_OBJECT), record(12.0, 13.0, None, CONNECTION), record(1.0, 2.0, 1.1)]


def test_a_row_has_a_cell_for_each_column_and_a_proxy_without_figures_has_none() -> None:
    found = killed({("ours", Fault.KILL): LOST, ("theirs", Fault.HANG): LOST})
    (row,) = rows(found, Fault.KILL, {"ours": "ours 1.0", "theirs": "theirs 2"})
    assert len(row) == len(HEAD)
    assert row[:7] == ["ours 1.0", "2 of 3", "1", "0", "1", "0", "0"]
    assert row[7] == "2.0 s"
    assert row[-1] == "1 error object, 1 broken connection"


def test_requests_are_summed_up_over_repetitions() -> None:
    once = killed({("ours", Fault.KILL): LOST})
    twice = once.model_copy(update={"turns": [once.turns[0], once.turns[0].model_copy(update={"repetition": 1})]})
    (row,) = rows(twice, Fault.KILL, {"ours": "ours"})
    assert row[1:6] == ["4 of 6", "2", "0", "2", "0"]


def test_notes_report_the_load_what_failed_and_the_first_error_of_each() -> None:
    found = killed({("ours", Fault.KILL): LOST})
    broken = OutageTurn(arm="theirs", fault=Fault.HANG, repetition=0, failure="it ended by itself with 1")
    reported = notes(found.model_copy(update={"turns": [*found.turns, broken]}))
    assert "steady" in reported[0]
    assert reported[1] == "theirs, hang, repetition 1: it ended by itself with 1."
    assert reported[2] == "ours, kill: http_502: None."


def test_on_a_terminal_a_proxy_is_a_column() -> None:
    found = killed({("gateway", Fault.KILL): LOST, ("smg", Fault.KILL): LOST})
    comparison = make_comparison([], {"gateway": "", "smg": ""}).model_copy(update={"killed": found})
    (wide,), (compact,) = tables(comparison), tables(comparison, compact=True)
    assert [row[0] for row in wide.rows] == compact.head[1:]
    assert [row[0] for row in compact.rows] == wide.head[1:]
    assert wide.rows[1][1] == compact.rows[0][2] == "2 of 3"
