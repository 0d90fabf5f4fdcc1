"""Builds the page's messages: a full snapshot for a new watcher, then one delta a second. Pure, except for clocks.

It keeps the last sums, from which the next message computes rates, and ten minutes of points for charts. Both are kept
only while the page has watchers.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Any, Final

from gateway.config import Config
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Fleet
from gateway.core.observe.log import RecentRequests
from gateway.core.observe.metrics import Metrics
from gateway.core.request import Demand
from gateway.core.resources import ProcessUse
from gateway.core.routing.policy import EngineVerdict
from gateway.core.scheduling.wait_queue import Queue
from gateway.features.page.fleet_view import HitRates, fleet_view
from gateway.features.page.gateway_view import Totals, cpu_share, lag_view, totals_of, traffic_view
from gateway.features.page.queue_view import QueueRules, offline_view, queue_view
from gateway.features.page.timeline import Timeline

MOST_POINTS: Final = 600
COLUMNS: Final = (
    *("time", "completed", "failed", "prompt_tokens", "output_tokens", "hit_tokens", "in_flight", "slots", "waiting"),
    *("kv_reserved", "kv_tokens", "lag_ms", "cpu", "memory_mb"),
)


@dataclass(frozen=True, slots=True)
class Sources:
    """The owners of the shown data, and functions that read them.

    `offline_counts`: lines of batches that wait and sequences in flight, of each model that has any; `settle`: passes
    on pending records; `describer`: makes the documents of backends, as on /admin/backends; `trust`: in the hits
    predicted for an engine; `gauges`: numbers of the gateway itself.
    """

    fleet: Fleet
    _: KW_ONLY
    queue: Queue
    offline_counts: Callable[[], Mapping[str, tuple[int, int]]]
    metrics: Metrics
    recent: RecentRequests
    timeline: Timeline
    settle: Callable[[], None]
    describer: Callable[[], Callable[[Backend], Mapping[str, Any]]]
    trust: Callable[[int], float]
    explain: Callable[[Demand, frozenset[str]], list[EngineVerdict]]
    config: Callable[[], Config]
    gauges: Callable[[], dict[str, Any]]
    use: Callable[[], ProcessUse]
    clock: Callable[[], float]
    offset_seconds: Callable[[], float]  # from that clock to Unix time


class LiveView:
    """Call `begin`, then `full` and `tick` any number of times, then `end`."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._points: deque[list[float]] = deque(maxlen=MOST_POINTS)
        self._hit_rates = HitRates()
        self._before: Totals | None = None
        self._state: dict[str, Any] = {}
        self._requests = self._events = 0  # that have been sent

    def begin(self) -> None:
        """Somebody begins to watch: take the first look."""
        self._hit_rates = HitRates()
        self._requests = 0
        self._look()

    def end(self) -> None:
        """The last watcher has left: discard its data."""
        self._points.clear()
        self._before, self._state = None, {}

    def full(self) -> dict[str, Any]:
        """The full state. Changes since the last tick are in the next one as well."""
        sources = self._sources
        recent, timeline, config = sources.recent, sources.timeline, sources.config()
        rows, events = recent.rows(), timeline.since(0, sources.offset_seconds())
        return self._state | {
            "requests": {"from": recent.count - len(rows), "rows": rows},
            "failed": recent.failed_rows(),
            "events": {"from": timeline.happened - len(events), "rows": events},
            "history": {"columns": COLUMNS, "points": list(self._points)},
            "settings": {
                "policy": config.routing.policy,
                "port": config.server.port,
                "tls": config.server.tls is not None,
                "client_certificates": bool(config.server.tls and config.server.tls.client_ca),
                "keys": bool(config.auth.keys),
                "prefix_report": config.prefix_report.enabled,
                "aliases": list(config.models.aliases),
            },
        }

    def tick(self) -> dict[str, Any]:
        """The changes since the last tick, and the current state."""
        sources, requests, events = self._sources, self._requests, self._events
        self._look()
        rows = sources.recent.rows(requests)
        shown = sources.timeline.since(events, sources.offset_seconds())
        return self._state | {
            "requests": {"from": sources.recent.count - len(rows), "rows": rows},
            "events": {"from": sources.timeline.happened - len(shown), "rows": shown},
            "point": self._points[-1],
        }

    def _look(self) -> None:
        sources = self._sources
        sources.settle()
        sources.timeline.look()
        now, fleet, use = sources.clock(), sources.fleet, sources.use()
        backends = (*fleet.backends, *fleet.leaving)
        self._hit_rates.fade([backend.name for backend in backends])
        for record in sources.recent.since(self._requests):
            self._hit_rates.add(record.backend, record.prompt_tokens, record.actual_hit_tokens)
        totals = totals_of(sources.metrics, use, now)
        before = self._before or totals
        tiles = fleet_view(backends, sources.describer(), self._hit_rates, trust=sources.trust, now=now)
        queue = queue_view(sources.queue, sources.explain, fleet.why_none, rules=_rules(sources.config()), now=now)
        queue["offline"] = offline_view(sources.offline_counts())
        gateway = sources.gauges() | {
            "lag": lag_view(before, totals),
            "cpu": cpu_share(before, totals),
            "memory_bytes": use.memory_bytes,
        }
        self._state = {
            "time": round(now + sources.offset_seconds(), 3),
            "fleet": tiles,
            "queue": queue,
            "traffic": traffic_view(before, totals),
            "gateway": gateway,
        }
        if self._before is not None:
            self._points.append(self._point())
        self._before = totals
        self._requests, self._events = sources.recent.count, sources.timeline.happened

    def _point(self) -> list[float]:
        state = self._state
        traffic, gateway, tiles = state["traffic"], state["gateway"], state["fleet"]["tiles"]
        completed = traffic["outcomes"].get("completed", 0.0)
        return [
            state["time"],
            completed,
            round(sum(traffic["outcomes"].values()) - completed, 2),
            traffic["prompt_tokens"],
            traffic["output_tokens"],
            traffic["hit_tokens"],
            sum(tile["in_flight"] for tile in tiles),
            sum(tile["slots"] for tile in tiles if tile["state"] == "up" and not tile["draining"]),
            state["queue"]["waiting"],
            sum(tile["kv_reserved"] for tile in tiles),
            sum(tile["kv_tokens"] or 0 for tile in tiles),
            gateway["lag"]["mean_ms"],
            gateway["cpu"],
            round(gateway["memory_bytes"] / 1e6, 1),
        ]


def _rules(config: Config) -> QueueRules:
    admission, routing = config.admission, config.routing
    window_seconds = inf if routing.prefill_window_seconds is None else routing.prefill_window_seconds
    return QueueRules(
        admission.max_queued_requests,
        admission.kv_headroom,
        window_seconds,
        starvation_seconds=routing.starvation_seconds,
    )
