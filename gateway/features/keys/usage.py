"""Usage of each API key, by day (UTC) and model: counted from finished requests, kept for 400 days.

Only keys are counted: they are configured, while clients name tenants. Past days are kept packed.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record

_DAY_SECONDS = 86400
_MOST_DAYS = 400
_MOST_MODELS = 200  # of a key on a day; further ones are counted as OTHER
_MOST_LABELS = 1000  # keys in metrics
OTHER = "other"
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "errors")
Counts = list[int]  # in the order of COUNTS
Row = tuple[str, str, Counts]  # key and model
State = dict[str, Any]


class KeyUsage:
    """Owner of these counts. `finished` is called with finished requests, `apply` says whether there are keys."""

    def __init__(self, unix_seconds: Callable[[], float]) -> None:
        self._unix_seconds = unix_seconds
        self._is_on = False
        self._day = self._now_day()
        self._today: dict[tuple[str, str], Counts] = {}
        self._models: dict[str, int] = {}  # today's, by key
        self._past: dict[int, bytes] = {}
        self._last_days: dict[str, int] = {}  # of past days, the last one on which a key was used
        self._labels: dict[str, Counts] = {}  # by key, since the start of the process

    def apply(self, *, has_keys: bool) -> None:
        """Take over whether requests have keys. Without any, requests are not looked at."""
        self._is_on = has_keys

    def finished(self, records: list[Record]) -> None:
        """Count finished requests, except requests answered by the gateway itself, such as the list of models."""
        if not self._is_on:
            return
        self._turn()
        for record in records:
            client, model = record.client, record.model
            if not client or (not model and record.outcome == "completed"):
                continue
            self._count(record, 1, 0 if record.outcome == "completed" else 1)

    def counted(self, record: Record) -> None:
        """Count the tokens of a response that went on after its answer, which was counted as a request."""
        if self._is_on and record.client:
            self._turn()
            self._count(record, 0, 0)

    def _count(self, record: Record, requests: int, errors: int) -> None:
        client, cached = record.client, record.actual_hit_tokens or 0
        counts = [requests, record.prompt_tokens, cached, record.completion_tokens, errors]
        _add(self._entry(client, record.model), counts)
        if client not in self._labels and len(self._labels) >= _MOST_LABELS:
            client = OTHER
        label = self._labels.get(client)
        if label is None:
            label = self._labels[client] = [0] * len(counts)
        _add(label, counts)

    def add(self, rows: Iterable[Row], day: int) -> None:
        """Add another process's counts of this day."""
        self._turn()
        if day == self._day:
            for key, model, counts in rows:
                _add(self._entry(key, model), counts)
        elif self._day - _MOST_DAYS < day < self._day:
            merged = {(key, model): counts for key, model, counts in _unpacked(self._past.get(day, b"\x90"))}
            for key, model, counts in rows:
                _add(merged.setdefault((key, model), [0] * len(COUNTS)), counts)
            self._past[day] = _packed(merged)
            for key, _ in merged:
                self._last_days[key] = max(day, self._last_days.get(key, day))

    def last_days(self) -> dict[str, int]:
        """The last day on which each key was used, of the days that are kept."""
        self._turn()
        return self._last_days | {key: self._day for key, _ in self._today}

    def today(self) -> tuple[int, list[Row]]:
        """The current day, and its counts."""
        self._turn()
        return self._day, [(key, model, [*counts]) for (key, model), counts in self._today.items()]

    def since(self, day: int, rows: list[Row]) -> list[tuple[int, list[Row]]]:
        """The counts, day by day, since `today` returned this; the input of `add`."""
        today, current = self.today()
        days = {each: _unpacked(packed) for each, packed in self._past.items() if each >= day} | {today: current}
        known = {(key, model): counts for key, model, counts in rows}
        nothing = [0] * len(COUNTS)
        for key, model, counts in days.get(day, []):
            for place, amount in enumerate(known.get((key, model), nothing)):
                counts[place] -= amount
        return [(each, [row for row in found if row[2] != nothing]) for each, found in days.items()]

    def state(self) -> State:
        """All that was counted; `restore` takes it, and `totals` reads it in any thread."""
        day, rows = self.today()
        return {"day": day, "rows": rows, "past": {**self._past}}

    def restore(self, state: State) -> None:
        """Take over another process's counts, by day and model."""
        for day, packed in state["past"].items():
            self.add(_unpacked(packed), day)
        self.add([(key, model, [*counts]) for key, model, counts in state["rows"]], state["day"])

    def add_gauges(self, metrics: Metrics) -> None:
        text = (
            "Tokens by API key: prompt, those of it in the KV cache, completion; other = keys beyond the first 1,000."
        )
        metrics.counter("gateway_key_tokens_total", text, ("key", "kind"), self.tokens)

    def tokens(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Tokens since the start of the process, by key and kind, for metrics."""
        for key, counts in self._labels.items():
            for kind, place in (("prompt", 1), ("cached", 2), ("completion", 3)):
                yield (key, kind), counts[place]

    def _entry(self, key: str, model: str) -> Counts:
        """Today's counts of a key and a model, which may be changed."""
        counts = self._today.get((key, model))
        if counts is None:
            models = self._models.get(key, 0)
            if models >= _MOST_MODELS and model != OTHER:
                return self._entry(key, OTHER)
            self._models[key] = models + 1
            counts = self._today[key, model] = [0] * len(COUNTS)
        return counts

    def _turn(self) -> None:
        """Pack a day that is over, and forget days that are too old. A clock that is set back changes nothing."""
        day = self._now_day()
        if day <= self._day:
            return
        if self._today:
            self._past[self._day] = _packed(self._today)
        self._last_days |= {key: self._day for key, _ in self._today}
        self._last_days = {key: last for key, last in self._last_days.items() if last > day - _MOST_DAYS}
        self._day = day
        self._today, self._models = {}, {}
        self._past = {each: packed for each, packed in self._past.items() if each > day - _MOST_DAYS}

    def _now_day(self) -> int:
        return int(self._unix_seconds() // _DAY_SECONDS)


def _add(counts: Counts, more: Counts) -> None:
    for place, amount in enumerate(more):
        counts[place] += amount


def _packed(counts: dict[tuple[str, str], Counts]) -> bytes:
    return msgspec.msgpack.encode([[key, model, each] for (key, model), each in counts.items()])


def _unpacked(packed: bytes) -> list[Row]:
    return msgspec.msgpack.decode(packed, type=list[tuple[str, str, list[int]]])


def totals(state: State, since: int, until: int, *, by_day: bool) -> list[tuple[int, str, str, Counts]]:
    """Usage from one day to another, both included, by key and model: each with its day, or 0 for all days."""
    sums: dict[tuple[int, str, str], Counts] = {}
    days = {**state["past"], state["day"]: state["rows"]}
    for day in sorted(days):
        if since <= day <= until:
            found = days[day]
            for key, model, counts in _unpacked(found) if isinstance(found, bytes) else found:
                _add(sums.setdefault((day if by_day else 0, key, model), [0] * len(COUNTS)), counts)
    return [(*place, counts) for place, counts in sorted(sums.items())]
