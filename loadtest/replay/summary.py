"""The result of one replay, and a comparison of policies over many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.scenario import Scenario
from loadtest.report.statistics import percentile

WARM_UP_SHARE = 0.1
_VIOLATION_FLOOR = 0.01  # added to both sides of a ratio of violations: none against few is no infinite gain


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles; seconds."""

    mean: float
    p50: float
    p90: float
    _: KW_ONLY
    p99: float


JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class JoinFigures:
    """The minute after engines joined: requests that arrived in it, and the ones sent to the new engines."""

    ttft_before: Percentiles  # of requests that arrived in the minute before
    ttft: Percentiles
    _: KW_ONLY
    ttft_new: Percentiles
    share_new: float  # of the requests
    hit_ratio: float  # of their prompt tokens
    hit_ratio_new: float


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy in one scenario; shares are of the requests that count."""

    requests: int
    _: KW_ONLY
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    goodput: float  # share that kept both bounds
    ttft_violations: float
    tpot_violations: float
    hit_ratio: float  # of prompt tokens
    preemptions: int
    prefill_imbalance: float  # prompt tokens computed by the busiest engine, against the mean
    virtual_seconds: float
    cpu_seconds: float
    recomputed_tokens: int = 0  # that preempted sequences computed again, of all requests
    goodput_per_second: float = 0.0  # requests that kept both bounds
    output_tokens_per_second: float = 0.0  # over the whole replay, all engines together
    mean_running: float = 0.0  # sequences in an engine's batch, over the whole replay
    most_waiting: int = 0  # in one engine: sequences without a place in the step
    waited_p99_seconds: float = 0.0  # in the gateway, before a request is sent
    join: JoinFigures | None = None  # if engines joined

    @property
    def violations(self) -> float:
        return 1.0 - self.goodput


def figures_of(
    requests: Sequence[ReplayRequest],
    scenario: Scenario,
    engines: Sequence[ReplayEngine],
    cpu_seconds: float,
    join_seconds: float = math.inf,
) -> PolicyFigures:
    """Figures of a finished replay. The first tenth to arrive found empty caches and counts for nothing."""
    ordered = sorted(requests, key=lambda request: (request.arrival_seconds, request.number))
    counted = ordered[int(len(ordered) * WARM_UP_SHARE) :]
    bounds = scenario.bounds
    late = [
        request.ttft_seconds
        > bounds.ttft_seconds + bounds.ttft_prefills * scenario.cold_prefill_seconds(request.prompt_tokens)
        for request in counted
    ]
    slow = [(request.tpot_seconds or 0.0) > bounds.tpot_seconds for request in counted]
    computed = [0] * len(engines)
    for request in counted:
        computed[request.engine] += request.prompt_tokens - request.cached_tokens
    good = sum(not (a or b) for a, b in zip(late, slow, strict=True))
    virtual_seconds = max(request.finished_seconds for request in requests)
    return PolicyFigures(
        requests=len(counted),
        ttft=_spread(request.ttft_seconds for request in counted),
        tpot=_spread(tpot for request in counted if (tpot := request.tpot_seconds) is not None),
        e2e=_spread(request.e2e_seconds for request in counted),
        goodput=good / len(counted),
        ttft_violations=sum(late) / len(counted),
        tpot_violations=sum(slow) / len(counted),
        hit_ratio=_hit_ratio(counted),
        preemptions=sum(request.preemptions for request in counted),
        prefill_imbalance=max(computed) * len(computed) / max(1, sum(computed)),
        virtual_seconds=virtual_seconds,
        cpu_seconds=cpu_seconds,
        recomputed_tokens=sum(request.recomputed_tokens for request in counted),
        goodput_per_second=good / max(1e-9, virtual_seconds - counted[0].arrival_seconds),
        output_tokens_per_second=sum(request.output_tokens for request in requests) / virtual_seconds,
        mean_running=sum(engine.sequence_seconds for engine in engines) / (len(engines) * virtual_seconds),
        most_waiting=max(engine.peak_waiting for engine in engines),
        waited_p99_seconds=percentile(
            sorted(request.sent_seconds - request.arrival_seconds for request in counted), 99
        ),
        join=None if join_seconds == math.inf else _join_figures(requests, scenario.engines, join_seconds),
    )


def _join_figures(requests: Sequence[ReplayRequest], first_new: int, join_seconds: float) -> JoinFigures:
    since = [(request.arrival_seconds - join_seconds, request) for request in requests]
    before = [request for seconds, request in since if -JOIN_SECONDS <= seconds < 0]
    after = [request for seconds, request in since if 0 <= seconds < JOIN_SECONDS]
    new = [request for request in after if request.engine >= first_new]
    return JoinFigures(
        ttft_before=_spread(request.ttft_seconds for request in before),
        ttft=_spread(request.ttft_seconds for request in after),
        ttft_new=_spread(request.ttft_seconds for request in new),
        share_new=len(new) / max(1, len(after)),
        hit_ratio=_hit_ratio(after),
        hit_ratio_new=_hit_ratio(new),
    )


def _hit_ratio(requests: Sequence[ReplayRequest]) -> float:
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return sum(request.cached_tokens for request in requests) / max(1, prompt_tokens)


def _spread(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return Percentiles(0.0, 0.0, 0.0, p99=0.0)
    mean = math.fsum(ordered) / len(ordered)
    return Percentiles(mean, percentile(ordered, 50), percentile(ordered, 90), p99=percentile(ordered, 99))


@dataclass(frozen=True, slots=True)
class Ratios:
    """Geometric means, over scenarios, of a policy's figures against the baseline's; below 1 is better."""

    ttft: float
    _: KW_ONLY
    ttft_p50: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    e2e: float
    e2e_p99: float
    violations: float


def ratios(pairs: Sequence[tuple[PolicyFigures, PolicyFigures]]) -> Ratios:
    """Of (policy's, baseline's) figures, one pair a scenario."""
    return Ratios(
        ttft=_geometric((a.ttft.mean, b.ttft.mean) for a, b in pairs),
        ttft_p50=_geometric((a.ttft.p50, b.ttft.p50) for a, b in pairs),
        ttft_p99=_geometric((a.ttft.p99, b.ttft.p99) for a, b in pairs),
        tpot=_geometric((a.tpot.mean, b.tpot.mean) for a, b in pairs),
        tpot_p99=_geometric((a.tpot.p99, b.tpot.p99) for a, b in pairs),
        e2e=_geometric((a.e2e.mean, b.e2e.mean) for a, b in pairs),
        e2e_p99=_geometric((a.e2e.p99, b.e2e.p99) for a, b in pairs),
        violations=_geometric((a.violations + _VIOLATION_FLOOR, b.violations + _VIOLATION_FLOOR) for a, b in pairs),
    )


def _geometric(pairs: Iterable[tuple[float, float]]) -> float:
    logs = [math.log(value / base) for value, base in pairs if value > 0 and base > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0
