"""The prefix report: how much of the prompts is found in KV caches, and what keeps the rest from being found.

Counting is done on the event loop and costs about a microsecond a request; everything else is done when the report is
asked for, on a snapshot, and may be done in another thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from gateway.insights.causes import Scale, breakers, find_cause
from gateway.insights.corpus import Breathe, build
from gateway.insights.families import find_families
from gateway.insights.hottest import Holders, applications, clients, counts, hottest, merged_rows
from gateway.insights.samples import REQUESTS, Bounds, Epoch, Limits, Sample, Samples, Tallies, add_up
from gateway.observe.record import Record
from gateway.request import Ask

_MOST_ROWS = 20
_LEAST_SECONDS = 60.0  # of traffic that rates by the hour are made of
Making = Callable[[Breathe], dict[str, Any]]


class PrefixReport:
    """Collects what the report is made of. Times are those of one clock, in seconds."""

    def __init__(
        self,
        now: float,
        random: Random,
        *,
        show_text: bool = False,
        holders: Holders | None = None,
        limits: Limits | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._began_seconds = now
        self._show_text = show_text
        self._holders = holders
        self._samples = Samples(now, limits or Limits())
        self._tallies = Tallies(now, bounds or Bounds(), random)

    def __repr__(self) -> str:
        return f"<PrefixReport {self._samples!r}, {self._tallies!r}>"

    def wants_sample(self, now: float) -> bool:
        """Whether to call `sample` for this request. To be asked once for every request that generates."""
        return self._samples.wants(now)

    def sample(self, pieces: Sequence[bytes], ask: Ask, client: str, application: str, now: float) -> None:
        """Keep a prompt: its canonical text message by message, the API key's name, and the application's if told."""
        self._samples.add(pieces, ask, client, application, now)

    def finished(self, record: Record) -> None:
        """Count a request that ended, if it was answered and its usage told."""
        ask = record.ask
        if ask is not None and ask.keys:
            self._tallies.count(record, ask)
            self._samples.finished(record, ask)

    def prepare(self, now: float, window_seconds: float | None = None) -> Making:
        """Take a snapshot. The function that comes back makes the report of it, wherever it is called."""
        window = min(window_seconds or self._tallies.window_seconds, self._tallies.window_seconds)
        taken = Snapshot(
            uptime_seconds=now - self._began_seconds,
            now_seconds=now,
            since_start=self._tallies.since_start(),
            epochs=self._tallies.snapshot(now - window),
            samples=self._samples.snapshot(now - window),
            models=frozenset(self._tallies.models()),
        )
        return lambda breathe: make(taken, self._show_text, self._holders, breathe)

    def report(self, now: float, window_seconds: float | None = None) -> dict[str, Any]:
        """The report, at once."""
        return self.prepare(now, window_seconds)(lambda: None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a report is made of."""

    uptime_seconds: float
    now_seconds: float
    since_start: list[int]
    epochs: list[Epoch]
    samples: list[Sample]
    models: frozenset[str]


def make(taken: Snapshot, show_text: bool, holders: Holders | None, breathe: Breathe) -> dict[str, Any]:
    """The report as a document of plain values."""
    rows = merged_rows(taken.epochs)
    breathe()
    in_window = add_up(rows.values())
    window_began = taken.epochs[0].began_seconds if taken.epochs else taken.now_seconds
    found, behind = _breakers(taken, show_text, breathe)
    return {
        "uptime_seconds": round(taken.uptime_seconds, 3),
        "window_seconds": round(min(taken.uptime_seconds, taken.now_seconds - window_began), 3),
        "show_text": show_text,
        "totals": {"since_start": counts(taken.since_start), "window": counts(in_window)},
        "shares": _shares(counts(in_window), behind),
        "clients": clients(rows, _MOST_ROWS),
        "applications": applications(rows, taken.samples, _MOST_ROWS, show_text),
        "prefixes": hottest(taken.epochs, taken.samples, _MOST_ROWS, show_text, holders),
        "breakers": found,
        "samples": {
            "kept": len(taken.samples),
            "bytes": sum(len(sample.text) for sample in taken.samples),
            "of_requests": sum(sample.weight for sample in taken.samples),
            "seconds": round(_span_seconds(taken), 3),
        },
    }


def _span_seconds(taken: Snapshot) -> float:
    first = taken.samples[0].at_seconds if taken.samples else taken.now_seconds
    return max(_LEAST_SECONDS, taken.now_seconds - first)


def _balanced(taken: Snapshot) -> list[Sample]:
    """The samples, weighted so that each API key has its share of the requests: that is known exactly."""
    ends = [*(epoch.began_seconds for epoch in taken.epochs[1:]), taken.now_seconds]
    recent = [epoch for epoch, end in zip(taken.epochs, ends, strict=False) if end >= taken.samples[0].at_seconds]
    counted: Counter[str] = Counter()
    for (client, _), row in merged_rows(recent).items():
        counted[client] += row[REQUESTS]
    sampled: defaultdict[str, float] = defaultdict(float)
    for sample in taken.samples:
        sampled[sample.client] += sample.weight
    known = [client for client in sampled if counted[client]]
    scale = sum(sampled[client] for client in known) / max(1, sum(counted[client] for client in known))
    factors = {client: scale * counted[client] / sampled[client] for client in known}
    return [replace(sample, weight=sample.weight * factors.get(sample.client, 1.0)) for sample in taken.samples]


def _breakers(taken: Snapshot, show_text: bool, breathe: Breathe) -> tuple[list[dict[str, Any]], float]:
    """What keeps caches cold, dearest first; and the share of all prompt text that stands behind a difference."""
    if not taken.samples:
        return [], 0.0
    corpus = build(_balanced(taken), breathe)
    samples = corpus.samples
    told = [round(each.hit_tokens * each.size_bytes / max(1, each.prompt_tokens)) for each in samples]
    hits = np.where([each.told for each in samples], np.array(told, np.int64), corpus.matched())
    causes = []
    for family in find_families(corpus, hits, breathe):
        cause = find_cause(corpus, family)
        if cause is not None:
            causes.append(cause)
        breathe()
    scale = Scale(_span_seconds(taken), show_text, taken.models)
    whole = sum(sample.prompt_tokens * sample.weight for sample in samples)
    found = breakers(corpus, causes, scale)
    behind = sum(each["saved_tokens_per_request"] * each["requests"] for each in found)
    return found[:_MOST_ROWS], behind / max(1, whole)


def _shares(window: dict[str, Any], behind: float) -> dict[str, float | None]:
    """Of all prompt tokens: found in a cache, lost behind a difference, and the rest, which is new or was evicted."""
    hit = window["hit_rate"] if window["hit_rate"] is not None else window["predicted_hit_rate"]
    if hit is None:
        return {"hit": None, "behind_a_difference": None, "other": None}
    behind = round(min(behind, 1.0 - hit), 4)
    return {"hit": hit, "behind_a_difference": behind, "other": round(max(0.0, 1.0 - hit - behind), 4)}
