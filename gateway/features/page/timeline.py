"""The history of the fleet: states of backends, falls of their limits, restarts, reloads. A bounded list of events.

The fleet notifies it of changes, which are rare. It compares with the last seen state of each backend.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from gateway.core.backends.backend import Backend
from gateway.core.backends.concurrency_limit import LimitChange

_MOST_EVENTS: Final = 500
_BAD_STATES = ("down", "ejected")


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One event. `kind`: joined, left, draining, a state, limit, restarted or reloaded; `subject`: a backend, or empty.

    `is_bad`: it takes capacity away.
    """

    at_seconds: float
    kind: str
    subject: str
    _: KW_ONLY
    detail: str
    is_bad: bool = False


class Timeline:
    """Collects events. `backends`: the current ones; `reason`: the cause of a backend's state, for operators."""

    def __init__(
        self, backends: Callable[[], Sequence[Backend]], reason: Callable[[Backend], str], clock: Callable[[], float]
    ) -> None:
        self._backends = backends
        self._reason = reason
        self._clock = clock
        self._history: deque[TimelineEvent] = deque(maxlen=_MOST_EVENTS)
        self._states: dict[str, str] = {each.name: _state(each) for each in backends()}
        self.happened = 0  # of all events since the start

    def look(self) -> None:
        """Compare the backends with their last seen states. Call it when the fleet has changed, and every few seconds:
        a change that moves no requests is not notified."""
        seen: dict[str, str] = {}
        for backend in self._backends():
            state = seen[backend.name] = _state(backend)
            before = self._states.get(backend.name)
            if before is None:
                self._add("joined", backend.name, backend.config.url)
            elif state != before:
                since_seconds = backend.state_since_seconds
                self._add(state, backend.name, self._reason(backend), since_seconds, is_bad=state in _BAD_STATES)
        for name in self._states.keys() - seen.keys():
            self._add("left", name, "")
        self._states = seen

    def limit_moved(self, backend: Backend, change: LimitChange | None) -> None:
        """A limit has changed; growth is usual, and not an event."""
        if change is not None and change.after < change.before:
            self._add("limit", backend.name, f"{change.before} to {change.after}: {change.reason.value}", is_bad=True)

    def restarted(self, backend: Backend) -> None:
        """Another process answers at the backend's address."""
        self._add("restarted", backend.name, "another process answers, with an empty cache")

    def reloaded(self) -> None:
        """The configuration was read again, and another one is in force."""
        self._add("reloaded", "", "another configuration is in force")

    def since(self, count: int, offset_seconds: float) -> list[dict[str, Any]]:
        """Kept events after the first `count`, oldest first. `offset_seconds`: from the clock to Unix time."""
        fresh = min(self.happened - count, len(self._history))
        events = list(self._history)[len(self._history) - fresh :] if fresh > 0 else []
        return [
            {
                "time": round(event.at_seconds + offset_seconds, 3),
                "kind": event.kind,
                "subject": event.subject,
                "detail": event.detail,
                "bad": event.is_bad,
            }
            for event in events
        ]

    def _add(
        self, kind: str, subject: str, detail: str, at_seconds: float | None = None, *, is_bad: bool = False
    ) -> None:
        self.happened += 1
        at_seconds = self._clock() if at_seconds is None else at_seconds
        self._history.append(TimelineEvent(at_seconds, kind, subject, detail=detail, is_bad=is_bad))


def _state(backend: Backend) -> str:
    return "draining" if backend.draining else backend.health.state
