"""Where requests went, what the prefix caches saved, and what they could have saved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from loadtest.drive.record import Record
from loadtest.report.concurrency import peak, sweep
from loadtest.report.schema import BackendShare, Routing
from loadtest.report.statistics import distribution_ms
from loadtest.workloads.prompts import NO_GROUP
from loadtest.workloads.spec import WITH_PREFIX, WorkloadKind, WorkloadSpec


def routing(records: Sequence[Record], workload: WorkloadSpec | None) -> Routing:
    """The routing part of the results; empty of backends where nothing named them."""
    by_backend: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.backend is not None:
            by_backend[record.backend].append(record)
    named = sum(len(theirs) for theirs in by_backend.values())
    good = [record for record in records if record.ok]
    return Routing(
        backends=[_share(name, by_backend[name], named) for name in sorted(by_backend)],
        hit_ratio=_ratio(_sum(record.cached_tokens for record in good), _prompts(good, "cached")),
        ideal_hit_ratio=_ideal(good, workload),
        affinity=_affinity(good),
    )


def _share(name: str, records: list[Record], named: int) -> BackendShare:
    good = [record for record in records if record.ok]
    cached = _sum(record.cached_tokens for record in good)
    predicted = _sum(record.predicted_tokens for record in good)
    spans = ((record.sent + (record.queue_seconds or 0.0), record.end) for record in records if record.was_sent)
    ttft = distribution_ms([record.first_token - record.sent for record in good if record.first_token is not None])
    return BackendShare(
        name=name,
        requests=len(records),
        share=len(records) / named,
        succeeded=len(good),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in good),
        predicted_tokens=predicted,
        cached_tokens=cached,
        hit_ratio=_ratio(cached, _prompts(good, "cached")),
        predicted_ratio=_ratio(predicted, _prompts(good, "predicted")),
        peak_in_flight=peak(sweep((start, max(start, end)) for start, end in spans)),
        ttft_p50=ttft.p50 if ttft else None,
    )


def _prompts(records: Iterable[Record], told: str) -> int:
    """Prompt tokens of the requests of which the cached (or predicted) tokens are known."""
    return sum(record.prompt_tokens or 0 for record in records if getattr(record, f"{told}_tokens") is not None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(part: int | None, whole: int) -> float | None:
    return None if part is None or whole == 0 else part / whole


def _ideal(good: Sequence[Record], workload: WorkloadSpec | None) -> float | None:
    """What one cache that forgets nothing would have had; None where the workload does not tell."""
    grouped = [record for record in good if record.group != NO_GROUP]
    if not grouped or workload is None or workload.kind not in WITH_PREFIX:
        return None
    if workload.kind is WorkloadKind.SESSIONS:
        return _ideal_of_sessions(grouped, workload.prefix_tokens)
    repeats = len(grouped) - len({record.group for record in grouped})
    return repeats * workload.prefix_tokens / (len(grouped) * workload.prompt_tokens)


def _ideal_of_sessions(good: Sequence[Record], prefix_tokens: int) -> float | None:
    """A first turn repeats its group's prefix, a later one the whole turn before it with its answer."""
    known = [record for record in good if record.prompt_tokens is not None]
    said = {(r.index, r.turn): (r.prompt_tokens or 0) + (r.completion_tokens or 0) for r in known}
    firsts = [record for record in known if not record.turn]
    repeated = (len(firsts) - len({record.group for record in firsts})) * prefix_tokens
    repeated += sum(said.get((record.index, record.turn - 1), 0) for record in known if record.turn)
    return _ratio(repeated, sum(record.prompt_tokens or 0 for record in known))


def _affinity(good: Sequence[Record]) -> float | None:
    by_group: dict[int, Counter[str]] = defaultdict(Counter)
    for record in good:
        if record.group != NO_GROUP and record.backend is not None:
            by_group[record.group][record.backend] += 1
    total = sum(backends.total() for backends in by_group.values())
    return sum(max(backends.values()) for backends in by_group.values()) / total if total else None
