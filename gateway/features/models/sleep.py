"""vLLM's sleep mode: idle backends are put to sleep, and woken when requests wait for their models.

Asleep, an engine has its weights in memory and no KV cache, and its GPU is free for others. Backends without `sleep` in
the configuration are left alone; that they sleep is known from their /metrics. vLLM needs `--enable-sleep-mode` and
VLLM_SERVER_DEV_MODE=1 for this.
"""

from collections.abc import Callable
from typing import Literal

import structlog

from gateway.core.backends.backend import FALLING_ASLEEP, OFFLOADED, Backend
from gateway.core.backends.fleet import Clock, Fleet
from gateway.core.backends.vllm_api import ControlError
from gateway.core.supervisor import Supervisor
from gateway.features.models.commands import Commands

_PATHS = {"sleep": "/sleep?level=1&mode=wait", "wake": "/wake_up"}
Action = Literal["sleep", "wake"]

log = structlog.get_logger()


def action_for(backend: Backend, waiting: int, idle_seconds: float) -> Action | None:
    """The next action for a backend; `waiting`: requests for its models; `idle_seconds`: since it was last busy."""
    config = backend.config.sleep
    if config is None:
        return None
    if backend.sleep_state:
        return "wake" if waiting and backend.can_wake else None
    is_due = config.idle_seconds is not None and idle_seconds >= config.idle_seconds
    return "sleep" if is_due and not waiting and backend.health.state == "up" and not backend.draining else None


class Sleeper:
    """Puts backends to sleep and wakes them, inside the `async with` block of `commands`. `waiting` counts a model's
    requests."""

    def __init__(self, fleet: Fleet, waiting: Callable[[str], int], clock: Clock, *, supervisor: Supervisor) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._clock = clock
        self._busy: dict[Backend, tuple[int, float]] = {}  # requests sent until it was last busy, and when that was
        self.commands = Commands("sleep", self._look_at_all, clock, supervisor=supervisor)  # one for each backend
        fleet.on_leave.append(self._forget)

    def _forget(self, backend: Backend) -> None:
        self._busy.pop(backend, None)
        self.commands.forget(backend)

    def _look_at_all(self) -> None:
        for backend in self._fleet.backends:
            if backend.config.sleep is not None and backend not in self.commands:
                self._look(backend, self._clock())

    def _look(self, backend: Backend, now: float) -> None:
        waiting = sum(map(self._waiting, backend.context_tokens))
        action = action_for(backend, waiting, now - self._busy_seconds(backend, now))
        if action is not None and self.commands.may_run(backend):
            self.commands.start(backend, self._command(backend, action))

    def _busy_seconds(self, backend: Backend, now: float) -> float:
        """The time of its last requests: of this process, by its report, or of another process that shares it."""
        sent, telemetry = sum(engine.placed for engine in backend.all_engines), backend.telemetry
        reported = telemetry is not None and telemetry.running + telemetry.waiting > 0
        is_shared = any(engine.is_shared for engine in backend.engines)
        known = self._busy.get(backend)
        if known is None or known[0] != sent or backend.in_flight or reported or is_shared or backend.sleep_state:
            known = self._busy[backend] = sent, now
        return known[1]

    async def _command(self, backend: Backend, action: Action) -> None:
        """Send it to sleep or wake it. From before its sleep on, it gets no requests."""
        if action == "sleep":
            self._fleet.slept(backend, FALLING_ASLEEP)
        try:
            await self.commands.send(backend, _PATHS[action])
        except ControlError as error:
            self.commands.failed(backend)
            if action == "sleep":
                self._fleet.slept(backend, "")
            log.warning("backend_sleep_failed", backend=backend.name, action=action, reason=str(error))
        else:
            self._fleet.slept(backend, OFFLOADED if action == "sleep" else "")
            log.info("backend_sleep", backend=backend.name, action=action)
