"""The dashboard's view of the gateway itself, and of the traffic: rates since the last reading of its counters."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from gateway import BUILD, __version__
from gateway.core.dispatch import RetryBudget
from gateway.core.front.server import Server
from gateway.core.observe.log import LineWriter
from gateway.core.observe.metrics import LAG_BOUNDS, Counter, Metrics
from gateway.core.resources import MemoryBudget, ProcessUse
from gateway.core.supervisor import Supervisor
from gateway.features.page.broadcast import Broadcast

_OUTCOME: Final = 3  # place among the labels of `Metrics.requests`


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the start. `outcomes`: requests by outcome; `lag_counts`: the event loop's lag by its bounds."""

    at_seconds: float
    _: KW_ONLY
    outcomes: Mapping[str, float]
    prompt_tokens: float
    output_tokens: float
    hit_tokens: float  # as reported by the backends
    predicted_tokens: float
    lag_counts: tuple[int, ...]
    lag_seconds: float
    cpu_seconds: float


def totals_of(metrics: Metrics, use: ProcessUse, now: float) -> Totals:
    outcomes: dict[str, float] = {}
    for labels, amount in metrics.requests.values.items():
        outcomes[labels[_OUTCOME]] = outcomes.get(labels[_OUTCOME], 0.0) + amount
    hits = metrics.hit_tokens.values.items()
    counts, (lag_seconds,) = metrics.loop_lag.values.get((), ([], [0.0]))
    return Totals(
        now,
        outcomes=outcomes,
        prompt_tokens=_sum(metrics.prompt_tokens),
        output_tokens=_sum(metrics.completion_tokens),
        hit_tokens=sum(amount for (_, kind), amount in hits if kind == "actual"),
        predicted_tokens=sum(amount for (_, kind), amount in hits if kind == "predicted"),
        lag_counts=tuple(counts),
        lag_seconds=lag_seconds,
        cpu_seconds=use.cpu_seconds,
    )


def _sum(counter: Counter) -> float:
    return sum(counter.values.values())


def traffic_view(before: Totals, after: Totals) -> dict[str, Any]:
    """Rates a second between two looks, and tokens since the start."""
    seconds = max(0.001, after.at_seconds - before.at_seconds)
    outcomes = {name: amount - before.outcomes.get(name, 0.0) for name, amount in after.outcomes.items()}
    return {
        "outcomes": {name: round(amount / seconds, 2) for name, amount in outcomes.items() if amount},
        "prompt_tokens": round((after.prompt_tokens - before.prompt_tokens) / seconds, 1),
        "output_tokens": round((after.output_tokens - before.output_tokens) / seconds, 1),
        "hit_tokens": round((after.hit_tokens - before.hit_tokens) / seconds, 1),
        "since_start": {
            "outcomes": {name: round(amount) for name, amount in after.outcomes.items()},
            "prompt_tokens": round(after.prompt_tokens),
            "output_tokens": round(after.output_tokens),
            "hit_tokens": round(after.hit_tokens),
            "predicted_hit_tokens": round(after.predicted_tokens),
        },
    }


def lag_view(before: Totals, after: Totals) -> dict[str, float | None]:
    """The event loop's lag between two looks, in milliseconds: the mean, and a bound of the largest; None = beyond."""
    earlier = before.lag_counts or (0,) * len(after.lag_counts)
    counts = [now - then for now, then in zip(after.lag_counts, earlier, strict=True)]
    number = sum(counts)
    if not number:
        return {"mean_ms": 0.0, "most_ms": 0.0}
    largest = max(place for place, count in enumerate(counts) if count)
    return {
        "mean_ms": round((after.lag_seconds - before.lag_seconds) / number * 1000, 3),
        "most_ms": LAG_BOUNDS[largest] * 1000 if largest < len(LAG_BOUNDS) else None,
    }


def cpu_share(before: Totals, after: Totals) -> float:
    """Of one core, between two looks."""
    return round((after.cpu_seconds - before.cpu_seconds) / max(0.001, after.at_seconds - before.at_seconds), 4)


def own_gauges(
    up_seconds: float,
    server: Server,
    retries: RetryBudget,
    memory: MemoryBudget,
    supervisor: Supervisor,
    logs: Iterable[LineWriter | None],
    broadcast: Broadcast,
) -> dict[str, Any]:
    """Numbers of the gateway itself, as the dashboard shows them."""
    return {
        "version": __version__,
        "build": BUILD,
        "uptime_seconds": round(up_seconds, 1),
        "clients": server.clients,
        "retries_left": round(retries.left, 1),
        "retries_most": retries.ceiling,
        "held_bytes": memory.used_bytes,
        "held_bytes_limit": memory.limit_bytes,
        "background_errors": sum(supervisor.faults.values()),
        "dropped_lines": sum(log.dropped for log in logs if log is not None),
        "watchers": broadcast.watchers,
        "look_ms": round(broadcast.look_seconds * 1000, 2),
    }
