"""Records and turns of proxies that lose requests, for tests."""

from __future__ import annotations

from loadtest.compare.outage.run import Reached
from loadtest.compare.outage.schema import Fault, Moments, OutageResults, OutageTurn
from loadtest.compare.run import figures
from loadtest.drive.record import Record

MOMENTS = Moments(gone=10.0, let_back=20.0, serving=22.0, long_wait=3.0)


def record(sent: float, end: float, first: float | None = None, shown_as: str | None = None) -> Record:
    """Lost where it says how that showed."""
    outcome = "ok" if shown_as is None else "http_502"
    return Record(
        index=0, group=0, intended=sent, sent=sent, end=end, outcome=outcome, first_token=first, shown_as=shown_as
    )


def steadily() -> Reached:
    """Two engines that get one request each a second; the first is away from 10 to 22 s."""
    seen = Reached()
    mine = other = 0
    for second in range(40):
        if second > 0:
            other += 1
            mine = mine + 1 if second <= 10 else second - 22 if second > 22 else 0
        seen.at.append(float(second))
        seen.counts.append((None if 10 < second < 22 else float(mine), float(other)))
    return seen


def killed(turns: dict[tuple[str, Fault], list[Record]]) -> OutageResults:
    """Each in one repetition."""
    return OutageResults(
        load="steady",
        patience_seconds=5.0,
        turns=[
            OutageTurn(arm=arm, fault=fault, repetition=0, figures=figures(records, MOMENTS, steadily(), 0))
            for (arm, fault), records in turns.items()
        ],
    )
