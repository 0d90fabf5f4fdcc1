"""Turns what a run brought in into its results. Pure: records in, figures out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from loadtest.drive.driver import ITL_TICKS_PER_SECOND
from loadtest.drive.fleet import Harvest
from loadtest.drive.health import WorkerHealth
from loadtest.drive.plan import Plan
from loadtest.drive.record import DROPPED, INTERRUPTED, OK, Record
from loadtest.report.backlog import backlog
from loadtest.report.concurrency import Level, mean, peak, sweep
from loadtest.report.definitions import DEFINITIONS
from loadtest.report.routing import routing
from loadtest.report.schema import (
    ClientLoad,
    Concurrency,
    Environment,
    Figures,
    Latency,
    PartFigures,
    Requests,
    Results,
    Samples,
    Slo,
    Stall,
    Streaming,
    Throughput,
    Tokens,
    WorkerLoad,
)
from loadtest.report.stalls import stalls
from loadtest.report.statistics import distribution_ms, distribution_of_ticks_ms, percentile
from loadtest.report.timeline import timeline
from loadtest.report.verdict import judge, packed
from loadtest.report.window import requests_per_second, steady_window, throughput, whole_window

_LATE_SECONDS = 0.010
_NEGLIGIBLE_LAG_MS = 10.0
_LAG_SHARE_OF_LATENCY = 0.10
# However long the queue in front of the first token is, a loop this late misses the times between tokens.
_MOST_LAG_MS = 50.0
_LONG_TOKENS = 4


class Bounds(BaseModel):
    """What a run must keep to for it to pass."""

    model_config = ConfigDict(frozen=True)

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment: float = 0.95
    max_error_ratio: float = 0.0

    def one_by_one(self) -> Iterator[tuple[str, Bounds]]:
        """Each latency's bound, and bounds that hold nothing else."""
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            if getattr(self, name) is not None:
                yield name, Bounds(**{name: getattr(self, name)})


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
        slo=_slo(records, bounds, steady_part or overall),
        client=_client(harvest, latency),
        metrics_delta=dict(metrics_delta),
        timeline=timeline(records, levels) if records else [],
        samples=samples,
    )
    piled_up = _backlog(plan, records, levels, stalled)
    verdict = judge(figures, bounds.max_error_ratio, backlog=piled_up, ended_early=harvest.stopped_early)
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
    """Each part of a mix by itself; times between tokens are not told apart."""
    by_part: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.part is not None:
            by_part[record.part].append(record)
    return [
        PartFigures(name=name, requests=_requests(theirs), latency=_latency([r for r in theirs if r.ok], {}))
        for name, theirs in sorted(by_part.items())
    ]


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
    told = [record for record in good if record.events and record.completion_tokens]
    if not told:
        return None
    events = sum(record.events for record in told)
    long = [record for record in told if (record.completion_tokens or 0) >= _LONG_TOKENS]
    return Streaming(
        tokens_per_event=sum(record.completion_tokens or 0 for record in told) / events,
        events_per_read=events / sum(record.reads for record in told),
        whole_ratio=sum(record.reads == 1 for record in long) / len(long) if long else 0.0,
    )


def _slo(records: Sequence[Record], bounds: Bounds, rates: Throughput) -> Slo | None:
    """Goodput is of the same stretch as requests/s; attainment is of all requests of the run."""
    if bounds.ttft_ms is None and bounds.tpot_ms is None and bounds.e2e_ms is None:
        return None
    offered = [record for record in records if record.outcome != INTERRUPTED]
    good = [record for record in offered if _within(record, bounds)]
    met = len(good)
    attainment = met / len(offered) if offered else 0.0
    return Slo(
        ttft_ms=bounds.ttft_ms,
        tpot_ms=bounds.tpot_ms,
        e2e_ms=bounds.e2e_ms,
        wanted=bounds.attainment,
        met=met,
        offered=len(offered),
        attainment=attainment,
        goodput_per_second=requests_per_second(good, (rates.start, rates.end)),
        passed=attainment >= bounds.attainment,
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
