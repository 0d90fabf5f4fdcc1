"""What a run of the restart bench shows, and which bars it misses. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from loadtest.report.statistics import percentile
from tests.bench.restarts.load import Sent
from tests.bench.restarts.requests import CHATS
from tests.bench.restarts.run import Measured, Restart

MOST_POINTS = 2.0  # between the hit rates before and after
ENOUGH_SECONDS = 30.0  # shorter windows are not judged
_MEBIBYTE = 1048576
_NEAR_SECONDS = (0.5, 1.5)  # before a restart's begin, after its end
_SHOWN = 20


def within(sent: Iterable[Sent], begins: float, seconds: float) -> list[Sent]:
    """The requests that were due in a window."""
    return [each for each in sent if begins <= each.due < begins + seconds]


def hit_rate(sent: Iterable[Sent]) -> float:
    """The share of prompt tokens that the engines had cached, in percent; 0 if none was reported."""
    told = [each for each in sent if each.prompt_tokens]
    tokens = sum(each.prompt_tokens for each in told)
    return 100 * sum(each.cached_tokens for each in told) / tokens if tokens else 0.0


def is_near(sent: Sent, restarts: Sequence[Restart]) -> bool:
    """Whether a request was sent in the seconds around a restart."""
    before, after = _NEAR_SECONDS
    return any(each.begun - before <= sent.begun <= each.ended + after for each in restarts)


def problems(measured: Measured) -> list[str]:
    """The bars that were missed; empty = none."""
    failed = [each for each in measured.sent if each.error]
    found = [f"{len(failed)} of {len(measured.sent)} requests failed"] if failed else []
    for name, peak, cap in measured.peaks:
        if peak > cap:
            found.append(f"{name} had {peak} sequences at once; its cap is {cap}")
    before, after = hit_rates(measured)
    if measured.options.window_seconds >= ENOUGH_SECONDS and abs(after - before) > MOST_POINTS:
        found.append(f"the hit rate was {before:.1f} % before the restarts, {after:.1f} % after")
    if not before:
        found.append("no request was answered before the restarts")
    if measured.last_ended_seconds is None:
        found.append("a process that was replaced did not end after its last answer")
    return found


def hit_rates(measured: Measured) -> tuple[float, float]:
    """Before the first and after the last restart, in percent."""
    seconds = measured.options.window_seconds
    return (
        hit_rate(within(measured.sent, measured.before, seconds)),
        hit_rate(within(measured.sent, measured.after, seconds)),
    )


def failures(measured: Measured) -> list[str]:
    """The first requests that failed, each with what its client saw and how long after which restart it began."""
    lines = []
    for each in [each for each in measured.sent if each.error][:_SHOWN]:
        number = sum(restart.begun <= each.begun for restart in measured.restarts)
        when = "before the restarts"
        if number:
            when = f"begun {each.begun - measured.restarts[number - 1].ended:+.2f} s from the end of restart {number}"
        lines.append(f"{each.kind}: {each.error}; {when}, ended after {each.ended - each.begun:.2f} s")
    return lines


def table(measured: Measured) -> str:
    """In Markdown."""
    rows = {**_traffic(measured), **_engines(measured), **_restarts(measured)}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _traffic(measured: Measured) -> dict[str, str]:
    sent = measured.sent
    seconds = max(each.due for each in sent) - min(each.due for each in sent)
    kinds = Counter(each.kind for each in sent)
    chats = [each for each in sent if each.kind in CHATS]
    long = [each.ended - each.begun for each in sent if each.kind == "long stream"]
    queued = sum(each.queue_ms >= 1 for each in chats) / max(1, len(chats))
    new = sum(each.connect_seconds is not None for each in sent) / len(sent)
    late = [each.begun - each.due for each in sent]
    return {
        "requests": f"{len(sent):,} in {seconds:.0f} s ({len(sent) / seconds:.0f}/s)",
        "of them": ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()),
        "failed": str(sum(bool(each.error) for each in sent)),
        "on new connections": f"{new:.0%}",
        "chats that waited in the queue": f"{queued:.0%}",
        "longest stream": f"{max(long, default=0.0):.0f} s",
        "load behind its schedule, p99": f"{_ms(late, 99)} ms",
    }


def _engines(measured: Measured) -> dict[str, str]:
    before, after = hit_rates(measured)
    seconds = measured.options.window_seconds
    rows = {f"most sequences at once, {name}": f"{peak} (cap {cap})" for name, peak, cap in measured.peaks}
    rows[f"hit rate, {seconds:g} s before the first restart"] = f"{before:.1f} %"
    rows[f"hit rate, {seconds:g} s after the last restart"] = f"{after:.1f} %"
    if measured.cold is not None:
        first = within(measured.sent_cold, measured.cold, seconds)
        rows[f"hit rate, {seconds:g} s after a start without state"] = f"{hit_rate(first):.1f} %"
    parts = [within(measured.sent, measured.after, 10), within(measured.sent_cold, measured.cold or 0, 10)]
    rows["the same, first 10 s after the last restart, without state"] = ", ".join(
        f"{hit_rate(part):.1f} %" for part in parts if part
    )
    return rows


def _restarts(measured: Measured) -> dict[str, str]:
    restarts = measured.restarts
    ends = measured.after + measured.options.window_seconds
    looked = within(measured.sent, measured.before, ends - measured.before)
    near = [each for each in looked if is_near(each, restarts)]
    apart = [each for each in looked if not is_near(each, restarts)]
    took = [each.ended - each.begun for each in restarts]
    rss = [each.rss_bytes // _MEBIBYTE for each in restarts]
    ended = measured.last_ended_seconds
    return {
        "restarts": f"{len(restarts)}, {measured.options.seconds_between:g} s apart",
        "a restart took": f"{_mean(took):.1f} s (longest {max(took, default=0.0):.1f} s)",
        "longest connect, around restarts and apart from them": f"{_connect(near)} ms, {_connect(apart)} ms",
        "TTFT of short chats, p50": f"{_ttft(near, 50)} ms, {_ttft(apart, 50)} ms",
        "TTFT of short chats, p99": f"{_ttft(near, 99)} ms, {_ttft(apart, 99)} ms",
        "longest TTFT of short chats": f"{_ttft(near, 100)} ms, {_ttft(apart, 100)} ms",
        "most processes at the same time": str(measured.most_alive),
        "until only one was left, after the last answer": "never" if ended is None else f"{ended:.1f} s",
        "RSS of the first, the last process": f"{rss[0] if rss else 0} MiB, {measured.last_rss_bytes // _MEBIBYTE} MiB",
        "warnings and errors in the log": str(len(measured.troubles)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _connect(sent: Iterable[Sent]) -> str:
    return _ms([each.connect_seconds for each in sent if each.connect_seconds is not None], 100)


def _ttft(sent: Iterable[Sent], percent: float) -> str:
    return _ms([each.first_byte_seconds for each in sent if each.kind in CHATS], percent)


def _ms(seconds: Sequence[float], percent: float) -> str:
    return f"{percentile(sorted(seconds), percent) * 1000:,.0f}" if seconds else "none"
