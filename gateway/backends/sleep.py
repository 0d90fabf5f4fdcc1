"""vLLM's sleep mode: idle backends are put to sleep, and woken when requests wait for their models.

Asleep, an engine has its weights in memory and no KV cache, and its GPU is free for others. Backends without `sleep` in
the configuration are left alone; that they sleep is known from their /metrics. vLLM needs `--enable-sleep-mode` and
VLLM_SERVER_DEV_MODE=1 for this.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Literal, Self

import structlog

from gateway.backends.backend import FALLING_ASLEEP, OFFLOADED, Backend
from gateway.backends.fleet import Clock, Fleet
from gateway.backends.vllm_api import ControlClient, ControlError
from gateway.supervisor import Supervisor

_LOOK_SECONDS = 0.2
_TIMEOUT_SECONDS = 120.0  # of weights on their way from or to the GPU
_AGAIN_SECONDS = 30.0  # after a failure
_PATHS = {"sleep": "/sleep?level=1&mode=wait", "wake": "/wake_up"}
Action = Literal["sleep", "wake"]

log = structlog.get_logger()


def action_for(backend: Backend, waiting: int, idle_seconds: float) -> Action | None:
    """What to do with a backend; `waiting`: requests for its models; `idle_seconds`: since it was last busy."""
    config = backend.config.sleep
    if config is None:
        return None
    if backend.sleep_state:
        return "wake" if waiting and backend.can_wake else None
    is_due = config.idle_seconds is not None and idle_seconds >= config.idle_seconds
    return "sleep" if is_due and not waiting and backend.health.state == "up" and not backend.draining else None


class Sleeper:
    """Puts backends to sleep and wakes them, inside its `async with` block. `waiting` counts a model's requests."""

    def __init__(self, fleet: Fleet, waiting: Callable[[str], int], clock: Clock, supervisor: Supervisor) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._clock = clock
        self._supervisor = supervisor
        self._client = ControlClient(_TIMEOUT_SECONDS, clock)
        self._commands: dict[Backend, asyncio.Task[None]] = {}
        self._busy: dict[Backend, tuple[int, float]] = {}  # requests sent until it was last busy, and when that was
        self._not_before: dict[Backend, float] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._client)
        await self._stack.enter_async_context(self._supervisor.repeating("sleep", self._step, _LOOK_SECONDS))
        self._fleet.on_leave.append(self._forget)
        self._stack.callback(self._fleet.on_leave.remove, self._forget)
        return self

    async def __aexit__(self, *_: object) -> None:
        commands = [*self._commands.values()]
        for command in commands:
            command.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        await self._stack.aclose()

    def _forget(self, backend: Backend) -> None:
        self._busy.pop(backend, None)
        self._not_before.pop(backend, None)

    async def _step(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)
        for backend in self._fleet.backends:
            if backend.config.sleep is not None and backend not in self._commands:
                self._look(backend, self._clock())

    def _look(self, backend: Backend, now: float) -> None:
        waiting = sum(map(self._waiting, backend.context_tokens))
        action = action_for(backend, waiting, now - self._busy_seconds(backend, now))
        if action is not None and now >= self._not_before.get(backend, now):
            command = asyncio.create_task(self._command(backend, action), name="sleep_command")
            self._commands[backend] = command
            command.add_done_callback(lambda _: self._commands.pop(backend))

    def _busy_seconds(self, backend: Backend, now: float) -> float:
        """When it last had requests: of this process, by its report, or of another one that shares it."""
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
            await self._client.command(backend.config, _PATHS[action])
        except ControlError as error:
            self._not_before[backend] = self._clock() + _AGAIN_SECONDS
            if action == "sleep":
                self._fleet.slept(backend, "")
            log.warning("backend_sleep_failed", backend=backend.name, action=action, reason=str(error))
        else:
            self._fleet.slept(backend, OFFLOADED if action == "sleep" else "")
            log.info("backend_sleep", backend=backend.name, action=action)
