"""May the figures be believed, and did the run pass? Client-bound runs are failed, not footnoted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadtest.drive.record import CLIENT_LIMIT
from loadtest.report.schema import Check, Figures, Slo, Stall, Streaming, Verdict

_CPU_LIMIT = 0.85
# A loop that is late makes a time between tokens longer by its lag. Timers of the loop are this coarse anyway.
_LAG_SHARE_OF_ITL = 0.5
_NEGLIGIBLE_ITL_LAG_MS = 2.0
_PACKED = 1.1
_WHOLE_RATIO = 0.1
_TOKEN_MISMATCH = 0.10
_FEW_REQUESTS = 100
_LATE_SHARE = 0.01
_BOUND_NAMES = {name: f"SLO: {name.upper()}" for name in ("ttft", "tpot", "e2e")}
_BY_THEMSELVES = set(_BOUND_NAMES.values())


def packed(streaming: Streaming | None) -> bool:
    """Whether times between reads are not times between tokens."""
    return streaming is not None and max(streaming.tokens_per_event, streaming.events_per_read) > _PACKED


def loop_lag_limit(figures: Figures) -> float:
    """The most milliseconds of event loop lag (p99) at which latencies and times between tokens are the server's."""
    limit, itl = figures.client.lag_limit, figures.latency.itl
    return limit if itl is None else min(limit, max(_NEGLIGIBLE_ITL_LAG_MS, _LAG_SHARE_OF_ITL * itl.p50))


def judge(
    figures: Figures,
    max_error_ratio: float,
    *,
    backlog: tuple[float, float] | None,
    ended_early: bool,
    findings: Sequence[str] = (),
) -> Verdict:
    """The verdict on figures that are complete but for it. `backlog`: in flight early and late, if it grew.

    `findings` are what the server does badly, each with a remedy; they fail nothing.
    """
    client = list(_client_checks(figures))
    server = [*_answers(figures, max_error_ratio), *_slo(figures.slo)]
    valid = all(check.passed for check in client)
    # Whoever misses one bound misses all of them together, so that one reason is enough.
    counted = [check for check in server if check.name not in _BY_THEMSELVES]
    return Verdict(
        valid=valid,
        passed=valid and all(check.passed for check in counted),
        reasons=[check.message for check in (*client, *counted) if not check.passed],
        warnings=[*_warnings(figures, backlog, ended_early), *findings],
        ended_early=ended_early,
        overloaded=backlog is not None,
        checks=[*client, *(check if valid else check.model_copy(update={"passed": None}) for check in server)],
    )


def _client_checks(figures: Figures) -> Iterator[Check]:
    """Whether the figures are the server's and not the client's."""
    lost = figures.client.lost
    yield _check("client workers run to the end", not lost, f"{'; '.join(lost)}: the load was not the planned one")
    limit, loop_limit = figures.client.lag_limit, loop_lag_limit(figures)
    of_itl = ", half of ITL p50" if loop_limit < limit else ""
    for worker in figures.client.workers:
        lag, share = worker.loop_lag_p99, worker.cpu_share_p90
        yield _check(
            f"client worker {worker.worker}: event loop lag",
            lag is None or lag <= loop_limit,
            f"client worker {worker.worker}: event loop lag p99 {lag or 0.0:.1f} ms > {loop_limit:.1f} ms{of_itl}; "
            "use more --workers, or cores that nothing else uses",
        )
        yield _check(
            f"client worker {worker.worker}: CPU",
            share is None or share <= _CPU_LIMIT,
            f"client worker {worker.worker}: {share or 0.0:.0%} of a core > {_CPU_LIMIT:.0%}; use more --workers",
        )
    late = figures.client.send_lag
    message = f"requests were sent late: lag p99 {late.p99:.1f} ms > {limit:.1f} ms" if late else ""
    yield _check("client sends in time", late is None or late.p99 <= limit, message)
    dropped, refused = figures.requests.dropped, figures.requests.errors.get(CLIENT_LIMIT, 0)
    message = f"{dropped} requests were never sent: --max-in-flight was reached"
    yield _check("client sends everything", not dropped, message)
    message = f"{refused} requests failed for want of files or ports on the client"
    yield _check("client has files and ports", not refused, message)


def _answers(figures: Figures, max_error_ratio: float) -> Iterator[Check]:
    requests = figures.requests
    yield _check("some request succeeds", requests.succeeded > 0, "no request succeeded")
    finished = requests.succeeded + requests.failed
    ratio = requests.failed / finished if finished else 0.0
    yield _check(
        "errors",
        ratio <= max_error_ratio,
        f"{requests.failed} of {finished} requests failed ({ratio:.2%} > {max_error_ratio:.2%} of --max-error-ratio)",
    )


def _slo(slo: Slo | None) -> Iterator[Check]:
    if slo is None:
        return
    bounds = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2e": slo.e2e_ms}
    for name, attainment in slo.attainments.items():
        message = f"{name.upper()} of at most {bounds[name]:g} ms kept by {attainment:.1%} of offered requests"
        yield _check(_BOUND_NAMES[name], attainment >= slo.wanted, f"{message} < {slo.wanted:.1%}")
    message = f"SLO met by {slo.attainment:.1%} of offered requests < {slo.wanted:.1%}"
    yield _check("SLO", slo.attainment >= slo.wanted, message)
    if slo.gpu_percent is not None:
        found = slo.gpu_measured_percent
        message = f"GPU utilisation {'was not measured' if found is None else f'{found:.0f} %'}"
        yield _check("SLO: GPU", found is not None and found >= slo.gpu_percent, f"{message} < {slo.gpu_percent:g} %")


def _check(name: str, passed: bool, message: str) -> Check:
    return Check(name=name, passed=passed, message="" if passed else message)


def _warnings(figures: Figures, backlog: tuple[float, float] | None, ended_early: bool) -> list[str]:
    requests, tokens, streaming = figures.requests, figures.tokens, figures.streaming
    warnings: list[str] = []
    if ended_early:
        warnings.append(f"ended by hand; {requests.interrupted} requests were in flight and count for nothing")
    if requests.succeeded < _FEW_REQUESTS:
        warnings.append(f"p99 of {requests.succeeded} requests is their maximum; ask for {_FEW_REQUESTS} or more")
    if requests.late > _LATE_SHARE * requests.offered:
        warnings.append(f"{_count(requests.late, 'request was', 'requests were')} sent more than 10 ms late")
    if tokens.without_usage and figures.audio is None:
        warnings.append(
            f"{_count(tokens.without_usage, 'answer', 'answers')} held no usage: token rates and TPOT leave them out"
        )
    if tokens.short_outputs:
        warnings.append(f"{_count(tokens.short_outputs, 'answer was', 'answers were')} shorter than --max-tokens")
    if tokens.counted_per_prompt is not None and tokens.asked_per_prompt:
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
    if backlog:
        warnings.append(
            f"backlog grew while requests came (mean in flight {backlog[0]:.0f}, later {backlog[1]:.0f}): "
            "the rate is above capacity, and latency depends on how long the run is"
        )
    return warnings


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _packing(streaming: Streaming) -> list[str]:
    warnings: list[str] = []
    if packed(streaming):
        many = streaming.tokens_per_event >= streaming.events_per_read
        message = (
            f"{streaming.tokens_per_event:.2f} tokens an event"
            if many
            else (f"{streaming.events_per_read:.2f} events a read")
        )
        warnings.append(f"tokens came packed ({message}), so ITL is not measured; TPOT takes its tokens from usage")
    if streaming.whole_ratio > _WHOLE_RATIO:
        warnings.append(
            f"{streaming.whole_ratio:.0%} of the streamed answers came in one piece: their TTFT is the time of the "
            "whole answer, and they have no TPOT; something on the way collects streams"
        )
    return warnings


def _stall(stalls: list[Stall], *, closed_loop: bool) -> str:
    longest = max(stalls, key=lambda stall: stall.seconds)
    message = (
        f"{len(stalls)} stall{'s' if len(stalls) > 1 else ''}: nothing came for {longest.seconds:.1f} s from second "
        f"{longest.start:.1f} on, with {longest.in_flight} in flight"
    )
    if closed_loop:
        message += "; waiting users send nothing, so percentiles hide what others would have waited: use --rate"
    return message
