"""Measured figures (of `loadtest run --out`) beside predicted ones, and whether they are near enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from loadtest.drive.counted import hit_ratio as hit_ratio_of
from loadtest.drive.record import OK
from loadtest.recording import Logged
from loadtest.report.formatting import milliseconds, number, percent
from loadtest.report.statistics import percentile

WANTED_TTFT_SHARE = 0.15  # of the p50 TTFT
WANTED_HIT_POINTS = 5.0
_PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: what was measured, or what the model says. Of the same requests."""

    ttft_seconds: Sequence[float]
    e2e_seconds: Sequence[float]
    output_tokens: int
    _: KW_ONLY
    seconds: float  # from the first arrival to the last end
    hit_ratio: float | None  # of prompt tokens


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. Ratios (`points`) differ by points of a percent, all else by a share of what was measured."""

    name: str
    measured: float
    predicted: float
    _: KW_ONLY
    shown: Callable[[float], str]
    points: bool = False

    @property
    def difference(self) -> float:
        if self.points:
            return (self.predicted - self.measured) * 100
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def difference_text(self) -> str:
        return f"{self.difference:+.1f} points" if self.points else f"{self.difference:+.1%}"


def compared(measured: Side, predicted: Side) -> list[Line]:
    lines: list[Line] = []
    for name, ours, theirs in (
        ("TTFT", measured.ttft_seconds, predicted.ttft_seconds),
        ("E2E", measured.e2e_seconds, predicted.e2e_seconds),
    ):
        if ours and theirs:
            ours, theirs = sorted(ours), sorted(theirs)
            lines += [
                Line(
                    f"{name} p{each}", percentile(ours, each) * 1e3, percentile(theirs, each) * 1e3, shown=milliseconds
                )
                for each in _PERCENTS
            ]
    lines.append(Line("output tokens/s", _per_second(measured), _per_second(predicted), shown=number))
    if measured.hit_ratio is not None and predicted.hit_ratio is not None:
        lines.append(Line("hit rate", measured.hit_ratio, predicted.hit_ratio, shown=percent, points=True))
    return lines


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether p50 TTFT and hit rate are as near as wanted, and the sentence that says so."""
    by_name = {line.name: line for line in lines}
    parts: list[str] = []
    fits = True
    for name, wanted, bound in (
        ("TTFT p50", WANTED_TTFT_SHARE, f"{WANTED_TTFT_SHARE:.0%}"),
        ("hit rate", WANTED_HIT_POINTS, f"{WANTED_HIT_POINTS:g} points"),
    ):
        line = by_name.get(name)
        if line is None:
            parts.append(f"{name} was not measured")
            fits = False
        else:
            parts.append(f"{name} {line.difference_text} (wanted: within {bound})")
            fits = fits and abs(line.difference) <= wanted
    return fits, f"The model {'fits' if fits else 'does not fit'}: {', '.join(parts)}."


def _per_second(side: Side) -> float:
    return side.output_tokens / max(side.seconds, 1e-9)


_CLOCKS_APART_SECONDS = 1.0
_EQUAL_SHARE = 0.9  # of answers' lengths; requests that were sent together may arrive in another order


class Mismatch(Exception):
    """Log and results are not of the same run, or a file is not what it should be; the message says how."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One answered request. Times are seconds from the start of the client's run."""

    at: float
    first: float | None
    end: float
    _: KW_ONLY
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ClientRun:
    """In the order in which they were sent. `hit_ratio` is of the engines' own counters, where they were read.

    `doubts` are why the client does not trust its own figures.
    """

    sent: Sequence[Sent]
    hit_ratio: float | None
    doubts: Sequence[str] = ()


def read_run(results: Path) -> ClientRun:
    """`results.json`, with `requests.jsonl` beside it. Raises Mismatch."""
    lines = results.parent / "requests.jsonl"
    try:
        document: dict[str, Any] = orjson.loads(results.read_bytes())
        sent = [
            _sent(record) for line in lines.read_bytes().splitlines() if (record := orjson.loads(line))["outcome"] == OK
        ]
        hit_ratio = hit_ratio_of(document["metrics_delta"])
        verdict = document["verdict"]
        doubts = [] if verdict["valid"] else [str(reason) for reason in verdict["reasons"]]
    except OSError as error:
        raise Mismatch(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Mismatch(f"{results}: not what loadtest run writes: {error}") from None
    if not sent:
        raise Mismatch(f"{lines}: no request was answered")
    return ClientRun(sorted(sent, key=lambda one: one.at), hit_ratio, doubts)


def _sent(record: dict[str, Any]) -> Sent:
    first = record["first_token"]
    return Sent(
        float(record["sent"]),
        None if first is None else float(first),
        float(record["end"]),
        output_tokens=int(record["completion_tokens"] or 0),
    )


def first_of(requests: Sequence[Logged], run: ClientRun) -> int:
    """Where in the log the client's run begins: as many answers, as long, that arrived as they were sent.

    Others may come after it, such as the checks of a checkpoint. Raises Mismatch.
    """
    count = len(run.sent)
    if len(requests) < count:
        raise Mismatch(f"the client had {count} answers, but the log has {len(requests)} usable ones")
    took = run.sent[-1].at - run.sent[0].at
    fitting = [
        (apart, first)
        for first in range(len(requests) - count + 1)
        if abs(requests[first + count - 1].at_seconds - requests[first].at_seconds - took) <= 2 * _CLOCKS_APART_SECONDS
        and (apart := _apart_seconds(requests[first : first + count], run)) <= _CLOCKS_APART_SECONDS
    ]
    if not fitting:
        raise Mismatch(
            f"no {count} requests of the log are those of the client: give the log of the gateway that it used, and a"
            " run in which every request was answered"
        )
    return min(fitting)[1]


def _apart_seconds(judged: Sequence[Logged], run: ClientRun) -> float:
    """The most that arrivals differ from what was sent, beyond the usual; endless if answers have other lengths."""
    pairs = list(zip(judged, run.sent, strict=True))
    if sum(logged.output_tokens == one.output_tokens for logged, one in pairs) < _EQUAL_SHARE * len(pairs):
        return inf
    apart = [logged.at_seconds - one.at for logged, one in pairs]
    usual = median(apart)
    return max(abs(each - usual) for each in apart)


def client_seconds(judged: Sequence[Logged], run: ClientRun) -> float:
    """From the client to the gateway and back: the median of what first tokens took longer for the client."""
    longer = [
        one.first - one.at - logged.first_seconds
        for logged, one in zip(judged, run.sent, strict=True)
        if one.first is not None and logged.first_seconds is not None
    ]
    return max(0.0, median(longer)) if longer else 0.0


def measured_by_client(run: ClientRun) -> Side:
    return Side(
        ttft_seconds=[one.first - one.at for one in run.sent if one.first is not None],
        e2e_seconds=[one.end - one.at for one in run.sent],
        output_tokens=sum(one.output_tokens for one in run.sent),
        seconds=max(one.end for one in run.sent) - run.sent[0].at,
        hit_ratio=run.hit_ratio,
    )
