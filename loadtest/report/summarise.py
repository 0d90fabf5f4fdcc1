"""Computes a run's results from its records: figures, routing, prefix-cache savings. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from loadtest.drive.plan import Plan
from loadtest.drive.record import DROPPED, INTERRUPTED, ITL_TICKS_PER_SECOND, OK, Harvest, Record, WorkerHealth
from loadtest.report.bootstrap import latency_intervals, rate_intervals
from loadtest.report.diagnosis import diagnose, gpu_percent, prompt_of
from loadtest.report.schema import (
    DEFINITIONS,
    AudioFigures,
    BackendShare,
    Bounds,
    ClientLoad,
    Concurrency,
    Environment,
    Figures,
    Interval,
    Latency,
    PartFigures,
    Requests,
    Results,
    Routing,
    Samples,
    Slo,
    Stall,
    Streaming,
    Throughput,
    Tokens,
    WorkerLoad,
)
from loadtest.report.statistics import distribution_ms, distribution_of_ticks_ms, percentile
from loadtest.report.timeline import (
    Level,
    backlog,
    mean,
    peak,
    requests_per_second,
    stalls,
    steady_window,
    sweep,
    throughput,
    timeline,
    whole_window,
)
from loadtest.report.verdict import judge, packed
from loadtest.workloads.prompts import NO_GROUP, WITH_PREFIX, WorkloadKind, WorkloadSpec


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


def _prompts(records: Iterable[Record], kind: str) -> int:
    """Prompt tokens of the requests of which the cached (or predicted) tokens are known."""
    return sum(record.prompt_tokens or 0 for record in records if getattr(record, f"{kind}_tokens") is not None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(part: int | None, whole: int) -> float | None:
    return None if part is None or whole == 0 else part / whole


def _ideal(good: Sequence[Record], workload: WorkloadSpec | None) -> float | None:
    """What one cache without evictions would have hit; None where the workload does not define it."""
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


_LATE_SECONDS = 0.010
_NEGLIGIBLE_LAG_MS = 10.0
_LAG_SHARE_OF_LATENCY = 0.10
# However long the queue in front of the first token is, a loop this late misses the times between tokens.
_MOST_LAG_MS = 50.0
_LONG_TOKENS = 4


def summarise(
    plan: Plan,
    harvest: Harvest,
    bounds: Bounds,
    environment: Environment,
    metrics_delta: Mapping[str, float],
    samples: Samples | None = None,
) -> Results:
    """All figures of a run and the verdict on it."""
    records = harvest.records
    good = [record for record in records if record.ok]
    levels = sweep((record.sent, record.end) for record in records if record.was_sent)
    window = whole_window(records) if records else (0.0, 0.0)
    steady = steady_window(records, levels, plan.concurrency, plan.ramp_seconds or 0.0)
    streaming = _streaming(good)
    latency = _latency(good, {} if packed(streaming) else harvest.itl_ticks)
    overall = throughput(records, window)
    steady_part = throughput(records, steady) if steady else None
    stalled = stalls(records)
    figures = Figures(
        definitions=dict(DEFINITIONS),
        environment=environment,
        plan=plan.model_dump(mode="json"),
        requests=_requests(records),
        overall=overall,
        steady=steady_part,
        tokens=_tokens(good, plan),
        latency=latency,
        streaming=streaming,
        stalls=stalled,
        concurrency=Concurrency(peak=peak(levels), mean=mean(levels)),
        routing=routing(records, None if plan.mix else plan.workload),
        parts=_parts(records),
        audio=_audio(good, steady_part or overall),
        slo=_slo(records, bounds, steady_part or overall, samples),
        intervals=_intervals(records, bounds, window, rates=steady_part or overall, plan=plan),
        client=_client(harvest, latency),
        metrics_delta=dict(metrics_delta),
        timeline=timeline(records, levels) if records else [],
        samples=samples,
    )
    piled_up = _backlog(plan, records, levels, stalled)
    verdict = judge(
        figures,
        bounds.max_error_ratio,
        backlog=piled_up,
        ended_early=harvest.stopped_early,
        findings=diagnose(figures, [prompt_of(record) for record in good if record.first_token is not None]),
    )
    return Results(**dict(figures), verdict=verdict)


def _requests(records: Sequence[Record]) -> Requests:
    outcomes = Counter(record.outcome for record in records)
    examples: dict[str, str] = {}
    for record in records:
        if record.detail is not None:
            examples.setdefault(record.outcome, record.detail)
    kinds = {kind: count for kind, count in outcomes.most_common() if kind not in (OK, DROPPED, INTERRUPTED)}
    return Requests(
        offered=len(records),
        succeeded=outcomes[OK],
        failed=sum(kinds.values()),
        dropped=outcomes[DROPPED],
        interrupted=outcomes[INTERRUPTED],
        late=sum(record.sent - record.intended > _LATE_SECONDS for record in records),
        errors=kinds,
        error_examples=examples,
    )


def _tokens(good: Sequence[Record], plan: Plan) -> Tokens:
    counted = [record.prompt_tokens for record in good if record.prompt_tokens is not None]
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    outputs = [(record, count) for record in good if (count := record.completion_tokens) is not None]
    return Tokens(
        prompt=sum(counted),
        completion=sum(count for _, count in outputs),
        cached=sum(cached) if cached else None,
        asked_per_prompt=_asked(good) or plan.workload.prompt_tokens,
        counted_per_prompt=sum(counted) / len(counted) if counted else None,
        without_usage=len(good) - len(counted),
        short_outputs=sum(count < record.asked_tokens for record, count in outputs) if plan.ignore_eos else 0,
    )


def _asked(good: Sequence[Record]) -> int:
    asked = [record.asked_prompt_tokens for record in good if record.prompt_tokens is not None]
    return round(sum(asked) / len(asked)) if asked else 0


def _parts(records: Sequence[Record]) -> list[PartFigures]:
    """Each part of a mix by itself; times between tokens are not split."""
    by_part: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.part is not None:
            by_part[record.part].append(record)
    return [
        PartFigures(name=name, requests=_requests(theirs), latency=_latency([r for r in theirs if r.ok], {}))
        for name, theirs in sorted(by_part.items())
    ]


def _audio(good: Sequence[Record], rates: Throughput) -> AudioFigures | None:
    heard = [(record, seconds) for record in good if (seconds := record.audio_seconds) is not None]
    if not heard:
        return None
    ended = sum(seconds for record, seconds in heard if rates.start <= record.end <= rates.end)
    speeds = [seconds / max(record.end - record.due, 1e-9) for record, seconds in heard]
    return AudioFigures(
        seconds=sum(seconds for _, seconds in heard),
        seconds_per_second=ended / max(rates.end - rates.start, 1e-9),
        request_seconds_per_second=percentile(sorted(speeds), 50),
    )


def _latency(good: Sequence[Record], itl_ticks: Mapping[int, int]) -> Latency:
    streamed = [(record, record.first_token) for record in good if record.first_token is not None]
    return Latency(
        ttft_from_intended=distribution_ms([first - record.due for record, first in streamed]),
        ttft=distribution_ms([first - record.sent for record, first in streamed]),
        e2e_from_intended=distribution_ms([record.end - record.due for record in good]),
        e2e=distribution_ms([record.end - record.sent for record in good]),
        tpot=distribution_ms([tpot for record in good if (tpot := record.tpot_seconds) is not None]),
        itl=distribution_of_ticks_ms(itl_ticks, ITL_TICKS_PER_SECOND),
        gateway_queue=distribution_ms([r.queue_seconds for r in good if r.queue_seconds is not None]),
    )


def _streaming(good: Sequence[Record]) -> Streaming | None:
    counted = [record for record in good if record.events and record.completion_tokens]
    if not counted:
        return None
    events = sum(record.events for record in counted)
    long = [record for record in counted if (record.completion_tokens or 0) >= _LONG_TOKENS]
    return Streaming(
        tokens_per_event=sum(record.completion_tokens or 0 for record in counted) / events,
        events_per_read=events / sum(record.reads for record in counted),
        whole_ratio=sum(record.reads == 1 for record in long) / len(long) if long else 0.0,
    )


def _intervals(
    records: Sequence[Record], bounds: Bounds, whole: tuple[float, float], rates: Throughput, plan: Plan
) -> dict[str, Interval]:
    """Each of the stretch that its figure is of. The same run has the same intervals whenever they are computed."""
    if not records:
        return {}
    random = np.random.default_rng(plan.seed)
    good = [record for record in records if record.ok]
    within = None if bounds.are_none() else [record for record in good if _within(record, bounds)]
    found = latency_intervals(good, whole, random) | rate_intervals(good, within, (rates.start, rates.end), random)
    tokens = found.get("output_tokens_per_second")
    if tokens is not None and plan.concurrency is not None:
        found["output_tokens_per_second_per_user"] = tokens[0] / plan.concurrency, tokens[1] / plan.concurrency
    return found


def _slo(records: Sequence[Record], bounds: Bounds, rates: Throughput, samples: Samples | None) -> Slo | None:
    """Goodput is of the same stretch as requests/s; attainment is of all requests of the run."""
    if bounds.are_none():
        return None
    offered = [record for record in records if record.outcome != INTERRUPTED]
    good = [record for record in offered if _within(record, bounds)]
    met = len(good)
    attainment = met / len(offered) if offered else 0.0
    busy = gpu_percent(samples, rates)
    return Slo(
        ttft_ms=bounds.ttft_ms,
        tpot_ms=bounds.tpot_ms,
        e2e_ms=bounds.e2e_ms,
        wanted=bounds.attainment,
        met=met,
        offered=len(offered),
        attainment=attainment,
        goodput_per_second=requests_per_second(good, (rates.start, rates.end)),
        gpu_percent=bounds.gpu_percent,
        gpu_measured_percent=busy,
        passed=attainment >= bounds.attainment and (bounds.gpu_percent is None or (busy or 0.0) >= bounds.gpu_percent),
        attainments={
            name.removesuffix("_ms"): sum(_within(record, alone) for record in offered) / max(1, len(offered))
            for name, alone in bounds.one_by_one()
        },
    )


def _within(record: Record, bounds: Bounds) -> bool:
    """Time to first token counts from the intended send; without a stream the whole answer is the first token."""
    if not record.ok:
        return False
    first = record.end if record.first_token is None else record.first_token
    if bounds.ttft_ms is not None and (first - record.due) * 1e3 > bounds.ttft_ms:
        return False
    if bounds.e2e_ms is not None and (record.end - record.due) * 1e3 > bounds.e2e_ms:
        return False
    return bounds.tpot_ms is None or _keeps_tpot(record, bounds.tpot_ms)


def _keeps_tpot(record: Record, bound_ms: float) -> bool:
    """An answer of one token at most has nothing to bound; a longer one keeps a bound only if it was measured."""
    tokens = record.asked_tokens if record.completion_tokens is None else record.completion_tokens
    tpot = record.tpot_seconds
    return tokens < 2 if tpot is None else tpot * 1e3 <= bound_ms


def _client(harvest: Harvest, latency: Latency) -> ClientLoad:
    headline = latency.ttft or latency.e2e
    return ClientLoad(
        workers=[_worker(health) for health in harvest.healths],
        send_lag=distribution_ms([max(0.0, r.sent - r.intended) for r in harvest.records if r.was_sent]),
        lag_limit=min(
            max(_NEGLIGIBLE_LAG_MS, _LAG_SHARE_OF_LATENCY * (headline.p50 if headline else 0.0)), _MOST_LAG_MS
        ),
        lost=harvest.lost,
    )


def _worker(health: WorkerHealth) -> WorkerLoad:
    lag = distribution_ms(health.loop_lags_seconds)
    shares = sorted(health.cpu_shares)
    return WorkerLoad(
        worker=health.worker,
        loop_lag_p50=lag.p50 if lag else None,
        loop_lag_p99=lag.p99 if lag else None,
        loop_lag_max=lag.max if lag else None,
        cpu_share=sum(shares) / len(shares) if shares else None,
        cpu_share_p90=percentile(shares, 90) if shares else None,
    )


def _backlog(
    plan: Plan, records: Sequence[Record], levels: list[Level], stalled: Sequence[Stall]
) -> tuple[float, float] | None:
    """Open loop at one rate: the mean in flight, and that at the end, where requests piled up."""
    if plan.rate_per_second is None or plan.ramp_seconds is not None or len(records) < 8:
        return None
    dues = [record.due for record in records]
    return backlog(min(dues), max(dues), levels, stalled)
