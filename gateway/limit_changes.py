"""Joins the backends' adaptive limits to the rest: what was sent, the pace of streams, the line, metrics, the log."""

from collections.abc import Callable

import structlog

from gateway.admission.gate import Gate
from gateway.admission.limiter import LimitChange
from gateway.admission.placement import Placement
from gateway.backends.backend import Backend
from gateway.backends.registry import Fleet, Sent
from gateway.observe.log_throttle import LogThrottle
from gateway.observe.metrics import Counter
from gateway.observe.record import Record

_TOKENS_OF_A_PACE = 8  # shorter streams tell little


class LimitChanges:
    """Listens to the fleet, and to requests that have ended."""

    def __init__(
        self, fleet: Fleet, placement: Placement, gate: Gate, count: Counter, clock: Callable[[], float]
    ) -> None:
        self._backends = {backend.name: backend for backend in fleet.backends}
        self._placement = placement
        self._gate = gate
        self._count = count
        self._quiet = LogThrottle(clock)
        self._log = structlog.get_logger("gateway")
        fleet.sent_to = self._sent_to
        fleet.on_limit.append(self._moved)

    def finished(self, record: Record) -> None:
        """A request ended: a stream that its client took as fast as it came tells the engine's pace."""
        first, usage, ask = record.first_byte_seconds, record.usage, record.ask
        if not record.streams or record.held_up or first is None or usage is None or ask is None:
            return
        tokens = usage.completion_tokens / max(1, ask.sequences)
        backend = self._backends.get(record.backend)
        if backend is not None and tokens >= _TOKENS_OF_A_PACE:
            tpot = (record.ended_seconds - first) / (tokens - 1)
            backend.limiter.streamed(tpot, first, record.ended_seconds)

    def _sent_to(self, backend: Backend) -> Sent:
        return Sent(*self._placement.sent_to(backend.name))

    def _moved(self, backend: Backend, move: LimitChange) -> None:
        self._gate.limits_moved()
        self._count.add((backend.name, move.reason.value))
        if move.after <= move.before and self._quiet.tells(backend.name):
            self._log.warning(
                "limit_fell", backend=backend.name, reason=move.reason.value, before=move.before, after=move.after
            )
