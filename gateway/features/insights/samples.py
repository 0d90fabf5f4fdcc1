"""The data of the report: a few prompts, and counts over a sliding window, with its tables. All is bounded.

`Samples` keeps prompts, limited in number and bytes. `PrefixReport` counts requests and hits in epochs, by key and
application, and recurring prefixes: an epoch's full table drops its rarest rows. Dropped applications are added to the
row of their key. Prefixes are counted on a share of the requests, which halves as an epoch fills.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

from gateway.core.observe.record import Record
from gateway.core.request import Demand

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
OTHERS = 0  # in place of an application: all that have no row of their own
Application = tuple[str, int]  # an API key's name, and the key of the first prefix block
Holders = Callable[[int], Iterable[str]]
_LEAST_SECONDS = 60.0  # of traffic, for hourly rates


@dataclass(slots=True)
class Sample:
    """One prompt. `weight`: the number of requests it represents; token counts are estimates until it `has_usage`."""

    text: bytes
    model: str
    client: str
    name: str
    keys: tuple[int, ...]
    edges: tuple[int, ...]
    at_seconds: float
    weight: float
    size_bytes: int
    prompt_tokens: int
    hit_tokens: int = 0
    has_usage: bool = False

    def finished(self, record: Record) -> None:
        """Replace the estimates by the reported values."""
        self.has_usage = True
        self.prompt_tokens = record.prompt_tokens or self.prompt_tokens
        actual = record.actual_hit_tokens
        self.hit_tokens = record.predicted_hit_tokens if actual is None else actual


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits of the kept data: samples, first all of `burst`, then `per_second`; and tables of counts.

    `taken`: the number of requests after which the closely examined share halves.
    """

    per_second: float = 1.0
    _: KW_ONLY
    burst: int = 128
    samples: int = 512
    total_bytes: int = 8 << 20
    text_bytes: int = 64 << 10
    epochs: int = 12
    epoch_seconds: float = 300.0
    rows: int = 1024
    prefixes: int = 2048
    taken: int = 256


class Samples:
    """Takes one request in some, by a token bucket, and forgets the oldest."""

    def __init__(self, now: float, limits: ReportLimits) -> None:
        self._limits = limits
        self._tokens = float(limits.burst)
        self._filled_seconds = now
        self._seen = 0  # requests since the last sample
        self._kept: deque[Sample] = deque()
        self._bytes = 0
        self._open: dict[int, Sample] = {}  # of requests in flight, by identity of their keys

    def __repr__(self) -> str:
        return f"<Samples {len(self._kept)}, {self._bytes} bytes, {len(self._open)} open>"

    def wants_sample(self, now: float) -> bool:
        """Whether to call `sample` for this request. Called once for every request that generates."""
        self._seen += 1
        passed, self._filled_seconds = max(0.0, now - self._filled_seconds), now
        self._tokens = min(self._limits.burst, self._tokens + passed * self._limits.per_second)
        return self._tokens >= 1.0

    def sample(self, pieces: Sequence[bytes], demand: Demand, client: str, application: str, now: float) -> None:
        """Keep a prompt, given message by message. A name that does not look like a label is not kept."""
        self._tokens = max(0.0, self._tokens - 1.0)
        text = b"".join(pieces)[: self._limits.text_bytes]
        if not text:
            return
        name = application if _NAME.fullmatch(application) else ""
        weight, keys, edges = max(1, self._seen), demand.keys, demand.edges
        size, tokens = demand.prompt_size, demand.prompt_tokens
        sample = Sample(text, demand.model, client, name, keys, edges, now, weight, size, tokens)
        self._seen = 0
        self._kept.append(sample)
        self._bytes += len(text)
        self._open[id(keys)] = sample
        while len(self._kept) > self._limits.samples or self._bytes > self._limits.total_bytes:
            self._bytes -= len(self._kept.popleft().text)
        while len(self._open) > self._limits.samples:
            del self._open[next(iter(self._open))]

    def forget(self) -> None:
        """Discard all prompts, including the prompts of requests in flight."""
        self._kept.clear()
        self._open.clear()
        self._bytes = 0

    def finished(self, record: Record, demand: Demand) -> None:
        sample = self._open.pop(id(demand.keys), None)
        if sample is not None:
            sample.finished(record)

    def snapshot(self, since_seconds: float) -> list[Sample]:
        """The samples taken since then, oldest first; not changed afterwards."""
        return [replace(sample) for sample in self._kept if sample.at_seconds >= since_seconds]


@dataclass(slots=True)
class Counts:
    """Counts of requests. `reported_prompt_tokens`: of requests with a reported hit."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_hit_tokens: int = 0
    reported_prompt_tokens: int = 0
    actual_hit_tokens: int = 0

    def count(self, record: Record) -> None:
        """Count one request that was answered."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.predicted_hit_tokens += record.predicted_hit_tokens
        if (actual := record.actual_hit_tokens) is not None:
            self.reported_prompt_tokens += record.prompt_tokens
            self.actual_hit_tokens += actual

    def add(self, other: "Counts") -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.predicted_hit_tokens += other.predicted_hit_tokens
        self.reported_prompt_tokens += other.reported_prompt_tokens
        self.actual_hit_tokens += other.actual_hit_tokens


def total(rows: Iterable[Counts]) -> Counts:
    sums = Counts()
    for row in rows:
        sums.add(row)
    return sums


@dataclass(slots=True, init=False)
class Reuse:
    """A prefix that was found in a cache again. `requests` counts requests that begin with it, from then on.

    Its constructor is written out, because a compiled one costs a quarter.
    """

    size_bytes: int
    tokens: float
    parent: int
    requests: int
    saved_tokens: float
    backends: frozenset[str]

    def __init__(
        self, size_bytes: int, tokens: float, parent: int, requests: int, saved_tokens: float, backends: frozenset[str]
    ) -> None:
        self.size_bytes = size_bytes
        self.tokens = tokens
        self.parent = parent
        self.requests = requests
        self.saved_tokens = saved_tokens
        self.backends = backends

    def plus(self, other: "Reuse") -> "Reuse":
        requests, saved_tokens = self.requests + other.requests, self.saved_tokens + other.saved_tokens
        return replace(self, requests=requests, saved_tokens=saved_tokens, backends=self.backends | other.backends)


@dataclass(slots=True)
class Epoch:
    """The counts of some minutes."""

    began_seconds: float
    rows: dict[Application, Counts] = field(default_factory=dict)
    prefixes: dict[int, Reuse] = field(default_factory=dict)

    def copy(self) -> "Epoch":
        rows = {application: replace(row) for application, row in self.rows.items()}
        prefixes = {key: replace(reuse) for key, reuse in self.prefixes.items()}
        return Epoch(self.began_seconds, rows, prefixes)

    def drop_rare_rows(self, kept: int) -> None:
        ranked = sorted(self.rows.items(), key=lambda item: item[1].requests, reverse=True)
        self.rows = dict(ranked[:kept])
        for (client, _), row in ranked[kept:]:
            self.rows.setdefault((client, OTHERS), Counts()).add(row)

    def drop_rare_prefixes(self, kept: int) -> None:
        ranked = sorted([reuse.saved_tokens for reuse in self.prefixes.values()], reverse=True)[:kept]
        least, left = ranked[-1], dict[int, Reuse]()
        equal = ranked.count(least)  # number to keep of the prefixes that saved the least
        for key, reuse in self.prefixes.items():
            if reuse.saved_tokens == least:
                equal -= 1
            if reuse.saved_tokens > least or (reuse.saved_tokens == least and equal >= 0):
                left[key] = reuse
        self.prefixes = left


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of a report. `holders` returns the backends that have a prefix, if that is known exactly."""

    uptime_seconds: float
    _: KW_ONLY
    now_seconds: float
    since_start: Counts
    epochs: list[Epoch]
    samples: list[Sample]
    models: frozenset[str]
    show_text: bool
    holders: Holders | None

    @property
    def span_seconds(self) -> float:
        """The time in which the samples were taken."""
        return max(_LEAST_SECONDS, self.now_seconds - self.samples[0].at_seconds) if self.samples else _LEAST_SECONDS


class PrefixReport:
    """Collects the data of the report, and owns the counts. Times are seconds of one clock."""

    def __init__(
        self,
        now: float,
        random: Random,
        *,
        show_text: bool = False,
        holders: Holders | None = None,
        limits: ReportLimits | None = None,
    ) -> None:
        self._limits = limits or ReportLimits()
        self._began_seconds = now
        self._random = random
        self.is_enabled = True
        self._show_text = show_text
        self._holders = holders
        self.samples = Samples(now, self._limits)
        self._epoch = Epoch(now)
        self._taken, self._stride, self._skip = 0, 1, 0  # of the epoch: how many requests are looked at closely
        self._past: deque[Epoch] = deque(maxlen=self._limits.epochs - 1)
        self._since_start = Counts()
        self._models: set[str] = set()  # that have answered; a bounded number

    def apply(self, *, enabled: bool, show_text: bool) -> None:
        """Take over other settings. A report that is disabled keeps no prompts."""
        if self.is_enabled and not enabled:
            self.samples.forget()
        self.is_enabled, self._show_text = enabled, show_text

    def finished(self, record: Record) -> None:
        """Count a request that ended, if it was answered and its usage reported, and complete its sample."""
        demand = record.demand
        if demand is None or not demand.keys or not self.is_enabled:
            return
        self.samples.finished(record, demand)
        epoch = self._epoch
        if record.ended_seconds - epoch.began_seconds >= self._limits.epoch_seconds:
            epoch = self._next_epoch(record)
        application = (record.client, demand.keys[0])
        row = epoch.rows.get(application)
        if row is None:
            if len(self._models) < self._limits.rows:
                self._models.add(record.model)
            if len(epoch.rows) >= self._limits.rows:
                epoch.drop_rare_rows(self._limits.rows // 2)
            row = epoch.rows.setdefault(application, Counts())
        row.count(record)
        if self._skip:
            self._skip -= 1
        else:
            self._look_closely(epoch, record, demand)

    def snapshot(self, now: float, window_seconds: float | None = None) -> Snapshot:
        """All data of the last `window_seconds`; not changed afterwards."""
        longest = self._limits.epochs * self._limits.epoch_seconds
        since, uptime = now - min(window_seconds or longest, longest), now - self._began_seconds
        samples, models, counted = self.samples.snapshot(since), frozenset(self._models), self._counted()
        return Snapshot(
            uptime,
            now_seconds=now,
            since_start=counted,
            epochs=self._epochs(since),
            samples=samples,
            models=models,
            show_text=self._show_text,
            holders=self._holders,
        )

    def _epochs(self, since_seconds: float) -> list[Epoch]:
        """The epochs that end after then, oldest first; not changed afterwards."""
        epochs = [*self._past, self._epoch.copy()]
        ends = [later.began_seconds for later in epochs[1:]]
        return [epoch for epoch, end in zip(epochs, [*ends, float("inf")], strict=True) if end > since_seconds]

    def _counted(self) -> Counts:
        return total((self._since_start, *self._epoch.rows.values()))

    def _next_epoch(self, record: Record) -> Epoch:
        length, began = self._limits.epoch_seconds, self._epoch.began_seconds
        missed = int((record.ended_seconds - began) // length)
        self._since_start = self._counted()
        self._past.append(self._epoch)
        for quiet in range(max(1, missed - self._limits.epochs), missed):
            self._past.append(Epoch(began + quiet * length))
        self._epoch = Epoch(began + missed * length)
        self._taken, self._stride, self._skip = 0, 1, 0
        return self._epoch

    def _look_closely(self, epoch: Epoch, record: Record, demand: Demand) -> None:
        """Count every prefix of the request that is known to recur, or that its own hit shows to recur."""
        self._taken += 1
        weight, here = self._stride, frozenset((record.backend,))
        if self._taken % self._limits.taken == 0:
            self._stride *= 2
        self._skip = int(self._random.random() * (2 * self._stride - 1)) if self._stride > 1 else 0
        actual = record.actual_hit_tokens
        hit = float(record.predicted_hit_tokens if actual is None else actual)
        tokens_per_byte = record.prompt_tokens / max(1, demand.prompt_size)
        prefixes, edges, parent = epoch.prefixes, demand.edges, 0
        for place, key in enumerate(demand.keys):
            reuse, tokens = prefixes.get(key), edges[place] * tokens_per_byte
            if reuse is None:
                if not hit or tokens > hit + 16:  # engines cache whole blocks: a hit falls a little short of the text
                    break
                reuse = prefixes[key] = Reuse(edges[place], tokens, parent, 0, 0.0, here)
            reuse.requests += weight
            reuse.saved_tokens += weight * (hit if hit < tokens else tokens)
            if record.backend not in reuse.backends and len(reuse.backends) < 64:
                reuse.backends |= here
            parent = key
        if len(prefixes) > self._limits.prefixes:
            epoch.drop_rare_prefixes(self._limits.prefixes // 2)


# The tables of the report.

Key = TypeVar("Key")
Table = list[dict[str, Any]]
_SAME = 0.8  # of a prefix's requests with the same continuation: then the longer prefix stands for both
_EXCERPT_BYTES = 80


def identity(key: int) -> str:
    return blake2b(key.to_bytes(8, "little", signed=key < 0), digest_size=4).hexdigest()


def counts(row: Counts) -> dict[str, Any]:
    """A row of counts, with its rates; None where no backend has reported usage."""
    prompt, reported = row.prompt_tokens, row.reported_prompt_tokens
    return {
        "requests": row.requests,
        "prompt_tokens": prompt,
        "predicted_hit_tokens": row.predicted_hit_tokens,
        "actual_hit_tokens": row.actual_hit_tokens if reported else None,
        "predicted_hit_rate": round(row.predicted_hit_tokens / prompt, 4) if prompt else None,
        "hit_rate": round(row.actual_hit_tokens / reported, 4) if reported else None,
    }


def merged(rows: Iterable[tuple[Key, Counts]]) -> dict[Key, Counts]:
    """The rows of each key, added up."""
    by_key: defaultdict[Key, list[Counts]] = defaultdict(list)
    for key, row in rows:
        by_key[key].append(row)
    return {key: total(each) for key, each in by_key.items()}


def clients(rows: dict[Application, Counts], most: int) -> Table:
    by_client = merged((client, row) for (client, _), row in rows.items())
    entries = [{"client": client, **counts(row)} for client, row in by_client.items()]
    return sorted(entries, key=lambda entry: -entry["prompt_tokens"])[:most]


def applications(rows: dict[Application, Counts], samples: Sequence[Sample], most: int, show_text: bool) -> Table:
    """By first prefix block, and by name if all prompts with that block give the same one; most prompt tokens first.

    Prompts that begin like no other are one entry for each key.
    """
    names: dict[Application, set[str]] = {}
    texts: dict[Application, bytes] = {}
    for sample in samples:
        if sample.keys:
            names.setdefault((sample.client, sample.keys[0]), set()).add(sample.name)
            texts[sample.client, sample.keys[0]] = sample.text
    listed: dict[tuple[str, str], dict[str, Any]] = {}
    placed: list[tuple[tuple[str, str], Counts]] = []
    named = 0
    for application, row in sorted(rows.items(), key=lambda item: -item[1].prompt_tokens):
        client, first = application
        given = names.get(application, set())
        name = next(iter(given)) if len(given) == 1 else ""
        rare = first == OTHERS or row.requests < 2 or (named >= most and (client, name) not in listed)
        place = (client, "others" if rare else name or identity(first))
        placed.append((place, row))
        if place in listed:
            continue
        named += not rare
        listed[place] = {"id": "others" if rare else identity(first), "client": client, "name": "" if rare else name}
        if show_text and not rare:
            listed[place]["text"] = texts.get(application, b"")[:_EXCERPT_BYTES].decode(errors="replace")
    entries = [{**listed[place], **counts(row)} for place, row in merged(placed).items()]
    return sorted(entries, key=lambda entry: -entry["prompt_tokens"])


def hottest(
    epochs: Iterable[Epoch], samples: Sequence[Sample], most: int, show_text: bool, holders: Holders | None
) -> Table:
    """Prefixes by tokens saved, without prefixes that nearly always continue alike: the longer one stands for both."""
    known: dict[int, Reuse] = {}
    for epoch in epochs:
        for key, reuse in epoch.prefixes.items():
            known[key] = known[key].plus(reuse) if key in known else reuse
    passed: dict[int, int] = {}  # by prefix, the requests of its commonest continuation
    for reuse in known.values():
        passed[reuse.parent] = max(passed.get(reuse.parent, 0), reuse.requests)
    ends = [item for item in known.items() if passed.get(item[0], 0) < _SAME * item[1].requests]
    ends.sort(key=lambda item: item[1].saved_tokens, reverse=True)
    listed = []
    for key, reuse in ends[:most]:
        entry: dict[str, Any] = {
            "id": identity(key),
            "bytes": reuse.size_bytes,
            "tokens": round(reuse.tokens),
            "requests": reuse.requests,
            "saved_tokens": round(reuse.saved_tokens),
            "backends": sorted(reuse.backends if holders is None else holders(key)),
        }
        if show_text:
            entry["text"] = _ending(samples, key)
        listed.append(entry)
    return listed


def _ending(samples: Sequence[Sample], key: int) -> str:
    """The last words of a prefix, which distinguish it from shorter ones."""
    for sample in reversed(samples):
        if key in sample.keys:
            edge = sample.edges[sample.keys.index(key)]
            return sample.text[:edge][-_EXCERPT_BYTES:].decode(errors="replace")
    return ""
