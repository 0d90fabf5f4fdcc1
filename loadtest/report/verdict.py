"""May the figures be believed, and did the run pass? Client-bound runs are failed, not footnoted."""

from __future__ import annotations

from loadtest.drive.record import CLIENT_LIMIT
from loadtest.report.schema import Figures, Stall, Streaming, Verdict

_CPU_LIMIT = 0.85
_PACKED = 1.1
_WHOLE_RATIO = 0.1
_TOKEN_MISMATCH = 0.10
_FEW_REQUESTS = 100
_BACKLOG_GROWTH = 1.5
_BACKLOG_REQUESTS = 5
_LATE_SHARE = 0.01


def packed(streaming: Streaming | None) -> bool:
    """Whether times between reads are not times between tokens."""
    return streaming is not None and max(streaming.tokens_per_event, streaming.events_per_read) > _PACKED


def judge(
    figures: Figures, max_error_ratio: float, *, backlog: tuple[float, float] | None, ended_early: bool
) -> Verdict:
    """The verdict on figures that are complete but for it."""
    invalid = _client_limits(figures)
    failed = _failures(figures, max_error_ratio)
    return Verdict(
        valid=not invalid,
        passed=not invalid and not failed,
        reasons=invalid + failed,
        warnings=_warnings(figures, backlog, ended_early),
        ended_early=ended_early,
    )


def _client_limits(figures: Figures) -> list[str]:
    """Why the figures would be the client's and not the server's."""
    reasons: list[str] = []
    limit = figures.client.lag_limit
    for worker in figures.client.workers:
        if worker.loop_lag_p99 is not None and worker.loop_lag_p99 > limit:
            reasons.append(
                f"client worker {worker.worker}: event loop lag p99 {worker.loop_lag_p99:.1f} ms > {limit:.1f} ms; "
                "use more --workers, or cores that nothing else uses"
            )
        if worker.cpu_share_p90 is not None and worker.cpu_share_p90 > _CPU_LIMIT:
            share = f"{worker.cpu_share_p90:.0%} of a core > {_CPU_LIMIT:.0%}"
            reasons.append(f"client worker {worker.worker}: {share}; use more --workers")
    lag = figures.client.send_lag
    if lag is not None and lag.p99 > limit:
        reasons.append(f"requests were sent late: lag p99 {lag.p99:.1f} ms > {limit:.1f} ms")
    if figures.requests.dropped:
        reasons.append(f"{figures.requests.dropped} requests were never sent: --max-in-flight was reached")
    if refused := figures.requests.errors.get(CLIENT_LIMIT):
        reasons.append(f"{refused} requests failed for want of files or ports on the client")
    return reasons


def _failures(figures: Figures, max_error_ratio: float) -> list[str]:
    requests = figures.requests
    reasons: list[str] = []
    if not requests.succeeded:
        reasons.append("no request succeeded")
    finished = requests.succeeded + requests.failed
    if finished and requests.failed / finished > max_error_ratio:
        reasons.append(
            f"{requests.failed} of {finished} requests failed "
            f"({requests.failed / finished:.2%} > {max_error_ratio:.2%} of --max-error-ratio)"
        )
    if figures.slo is not None and not figures.slo.passed:
        reasons.append(f"SLO met by {figures.slo.attainment:.1%} of offered requests < {figures.slo.wanted:.1%}")
    return reasons


def _warnings(figures: Figures, backlog: tuple[float, float] | None, ended_early: bool) -> list[str]:
    requests, tokens, streaming = figures.requests, figures.tokens, figures.streaming
    warnings: list[str] = []
    if ended_early:
        warnings.append(f"ended by hand; {requests.interrupted} requests were in flight and count for nothing")
    if requests.succeeded < _FEW_REQUESTS:
        warnings.append(f"p99 of {requests.succeeded} requests is their maximum; ask for {_FEW_REQUESTS} or more")
    if requests.late > _LATE_SHARE * requests.offered:
        warnings.append(f"{requests.late} requests were sent more than 10 ms late")
    if tokens.without_usage:
        warnings.append(f"{tokens.without_usage} answers held no usage: token rates and TPOT leave them out")
    if tokens.short_outputs:
        warnings.append(f"{tokens.short_outputs} answers were shorter than --max-tokens")
    if tokens.counted_per_prompt is not None:
        off = tokens.counted_per_prompt / tokens.asked_per_prompt - 1
        if abs(off) > _TOKEN_MISMATCH:
            warnings.append(
                f"prompts have {tokens.counted_per_prompt:.0f} tokens, {tokens.asked_per_prompt} were asked for "
                f"({off:+.0%}); set --bytes-per-token"
            )
    if streaming is not None:
        warnings += _packing(streaming)
    if figures.stalls:
        warnings.append(_stall(figures.stalls, closed_loop=figures.plan.get("concurrency") is not None))
    if backlog and backlog[1] > max(_BACKLOG_GROWTH * backlog[0], backlog[0] + _BACKLOG_REQUESTS):
        warnings.append(
            f"backlog grew while requests came (mean in flight {backlog[0]:.0f}, later {backlog[1]:.0f}): "
            "the rate is above capacity, and latency depends on how long the run is"
        )
    return warnings


def _packing(streaming: Streaming) -> list[str]:
    warnings: list[str] = []
    if packed(streaming):
        many = streaming.tokens_per_event >= streaming.events_per_read
        told = (
            f"{streaming.tokens_per_event:.2f} tokens an event"
            if many
            else (f"{streaming.events_per_read:.2f} events a read")
        )
        warnings.append(f"tokens came packed ({told}), so ITL is not measured; TPOT takes its tokens from usage")
    if streaming.whole_ratio > _WHOLE_RATIO:
        warnings.append(
            f"{streaming.whole_ratio:.0%} of the streamed answers came in one piece: their TTFT is the time of the "
            "whole answer, and they have no TPOT; something on the way collects streams"
        )
    return warnings


def _stall(stalls: list[Stall], *, closed_loop: bool) -> str:
    longest = max(stalls, key=lambda stall: stall.seconds)
    told = (
        f"{len(stalls)} stall{'s' if len(stalls) > 1 else ''}: nothing came for {longest.seconds:.1f} s from second "
        f"{longest.start:.1f} on, with {longest.in_flight} in flight"
    )
    if closed_loop:
        told += "; users who wait send nothing, so percentiles hide what others would have waited: use --rate"
    return told
