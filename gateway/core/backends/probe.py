"""Asks the backends: all the time in three loops for each backend of the fleet, or once for a command (a survey).

The loops are independent: a hanging /metrics delays no probe, a slow list of models delays no scrape. Only /health and
the outcome of requests change which backends get traffic; a failed scrape only ages telemetry.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from random import Random
from typing import Any, Self

import structlog

from gateway.config import Config, HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.fleet import Clock, Fleet
from gateway.core.backends.health import JITTER, ProbeResult, State
from gateway.core.backends.vllm_api import (
    CHAT_PATH,
    METRICS_PATH,
    MODELS_PATH,
    READERS,
    SERVER_INFO_PATH,
    ControlClient,
    ControlError,
)
from gateway.core.supervisor import Supervisor

EAGER_SECONDS = 0.2  # between probes while no backend at all can serve
FASTEST_SECONDS = 0.2  # least time between probes, even if requested more often
_APART_SECONDS = 0.05  # between the first probes of backends that join others: asking them delays no request
_APART_AT_START_SECONDS = 0.002  # between those of others, for any number of them
STALE_INTERVALS = 3  # telemetry older than this many probe intervals is dropped
_LOOKS = 4  # of a survey, at the responding backends
SEVERAL = "several engines answer at one URL, so neither caps nor prefix caches are right: give each engine its own URL"
_REQUIRED = ("/health", MODELS_PATH)

log = structlog.get_logger()


class BackendWatches:
    """Watches all backends of the fleet inside its `async with` block."""

    def __init__(
        self, fleet: Fleet, config: HealthConfig, clock: Clock, *, random: Random, supervisor: Supervisor | None = None
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._random = random
        self._supervisor = supervisor or Supervisor(clock)
        self._client = ControlClient(config.probe_timeout_seconds, clock)
        self._next_due = 0.0  # of the first probe of the next new backend
        self._watches: dict[Backend, BackendWatch] = {}
        self._tasks: dict[Backend, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._client)
        listening: tuple[tuple[list[Any], Callable[..., None]], ...] = (
            (self._fleet.on_change, self._follow_fleet),
            (self._fleet.on_leave, self._leave),
            (self._fleet.on_probe_wanted, self._doubt),
            (self._fleet.on_restart, lambda backend: self._watches[backend].ask_everything()),
        )
        for listeners, listener in listening:
            listeners.append(listener)
            self._stack.callback(listeners.remove, listener)
        self._follow_fleet()
        return self

    async def __aexit__(self, *_: object) -> None:
        ending = [*self._tasks.values()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._stack.aclose()

    def apply(self, config: HealthConfig) -> None:
        """Take over other intervals and timeouts. Each backend is probed again within the new intervals."""
        if config == self._config:
            return
        self._config = config
        self._client.apply(config.probe_timeout_seconds)
        for watch in self._watches.values():
            watch.apply(config)

    def _follow_fleet(self) -> None:
        now = self._clock()
        for backend in [each for each in self._fleet.backends if each not in self._watches]:
            due = max(now, self._next_due)
            self._next_due = due + (_APART_SECONDS if backend.joins_others else _APART_AT_START_SECONDS)
            watch = BackendWatch(
                backend,
                fleet=self._fleet,
                config=self._config,
                client=self._client,
                clock=self._clock,
                random=self._random,
            )
            self._watches[backend] = watch
            running = watch.run(self._supervisor, due - now)
            self._tasks[backend] = asyncio.create_task(running, name="backend_watch")

    def _doubt(self, backend: Backend) -> None:
        if backend in self._watches:  # a request without a slot may end after its backend has left
            self._watches[backend].probe_soon()

    def _leave(self, backend: Backend) -> None:
        del self._watches[backend]
        self._tasks[backend].cancel()
        self._tasks[backend].add_done_callback(lambda _: self._tasks.pop(backend))


@dataclass(eq=False)
class BackendWatch:
    """The three loops that watch one backend."""

    backend: Backend
    _: KW_ONLY
    fleet: Fleet
    config: HealthConfig
    client: ControlClient
    clock: Clock
    random: Random
    _probe_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _facts_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _scrape_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: bool = False  # whether the last probe was answered well
    _in_doubt: bool = False
    _server_info_asked: bool = False
    _logged_state: State = "unknown"
    _logged_several: bool = False
    _logged_probe_error: str | None = None
    _logged_reasons: dict[str, str] = field(default_factory=dict)

    async def run(self, supervisor: Supervisor, pause_seconds: float = 0.0) -> None:
        """Watch the backend, after a pause, until this is cancelled."""
        await asyncio.sleep(pause_seconds)
        async with AsyncExitStack() as stack:
            for step in (self.probe, self.ask_facts, self.scrape):
                repeating = supervisor.repeating("backend_watch", step, self.config.probe_interval_seconds)
                await stack.enter_async_context(repeating)
            await asyncio.Event().wait()

    def apply(self, config: HealthConfig) -> None:
        """Take over other intervals: probes due later than these come at a random time within them."""
        loop, before, self.config = asyncio.get_running_loop(), self.config, config
        for event, was, seconds in (
            (self._probe_wanted, before.probe_interval_seconds, config.probe_interval_seconds),
            (self._scrape_wanted, before.probe_interval_seconds, config.probe_interval_seconds),
            (self._facts_wanted, before.refresh_seconds, config.refresh_seconds),
        ):
            if seconds < was:
                loop.call_later(self.random.uniform(0.0, seconds), event.set)

    def probe_soon(self) -> None:
        """Probe soon and, if that is answered, read the models."""
        self._probe_wanted.set()
        self._in_doubt = True

    def ask_everything(self) -> None:
        """Read all facts and metrics soon: another process answers."""
        self._server_info_asked = False
        self._facts_wanted.set()
        self._scrape_wanted.set()

    async def probe(self) -> None:
        started = self.clock()
        probe, reason = await self.client.probe(self.backend.config)
        if probe is ProbeResult.UNSENT:
            self._log_reason("/health", "the gateway has reached its limit of open files (nofile)")
            await asyncio.sleep(self._jittered(self.config.probe_interval_seconds))
            return
        self._log_reason("/health", "")
        answers = probe is ProbeResult.OK
        health = self.backend.health
        if answers and (health.state != "up" or health.gone):
            # Before it gets a request for a model that it has unloaded.
            await self._ask(MODELS_PATH)
        if answers and not self._answers:
            self.ask_everything()
        if answers and self._in_doubt:
            self._in_doubt = False
            self._facts_wanted.set()
        self._answers = answers
        self.fleet.probed(self.backend, probe, reason)
        self._log_state(probe)
        await self._rest_until(started + self._pause_seconds(probe))
        await asyncio.sleep(max(0.0, started + FASTEST_SECONDS - self.clock()))

    async def ask_facts(self) -> None:
        """Read models, version and settings when it is time or wanted."""
        await _wait(self._facts_wanted, self._jittered(self.config.refresh_seconds))
        if not self._answers:
            return
        paths = [path for path in READERS if path != SERVER_INFO_PATH or not self._server_info_asked]
        self._server_info_asked = True  # its answer is constant during the life of the process
        await asyncio.gather(*map(self._ask, paths))
        await asyncio.sleep(FASTEST_SECONDS)

    async def scrape(self) -> None:
        """Read /metrics when due or requested, and drop values that are too old."""
        await _wait(self._scrape_wanted, self._jittered(self.config.probe_interval_seconds))
        if self._answers:
            await self._ask(METRICS_PATH)
        telemetry, oldest = self.backend.telemetry, self.clock() - STALE_INTERVALS * self.config.probe_interval_seconds
        if telemetry is not None and telemetry.at_seconds < oldest:
            self.fleet.measured(self.backend, None)

    async def _ask(self, path: str) -> None:
        """Learn from a path's answer; without one, facts stay unchanged."""
        backend, facts, telemetry, reason = self.backend, dict[str, Any](), None, ""
        missing = frozenset(backend.missing)
        try:
            facts, telemetry = await self.client.read(backend.config, path)
        except ControlError as error:
            if error.status != 404 or path in (MODELS_PATH, METRICS_PATH):  # older versions lack the others
                reason = str(error)
            if path == SERVER_INFO_PATH:  # the known facts may be of a former process
                facts = {"max_num_seqs": None, "can_admin": False}
        self.fleet.learned(backend, replace(backend.facts, **facts))
        if "models" in facts:
            self.fleet.list_read(backend, missing)
        if telemetry is not None:
            self.fleet.measured(backend, telemetry)
        self._log_reason(path, reason)
        if backend.restarts.several != self._logged_several:
            self._logged_several = backend.restarts.several
            write = log.warning if self._logged_several else log.info
            write("several_engines" if self._logged_several else "one_engine", backend=backend.name, hint=SEVERAL)

    def _pause_seconds(self, probe: ProbeResult) -> float:
        """From the start of one probe to the next; shorter where the next one decides something."""
        state, interval = self.backend.health.state, self.config.probe_interval_seconds
        if not self.fleet.ready and (state != "up" or probe is ProbeResult.REFUSED):
            interval = min(interval, max(EAGER_SECONDS, len(self.fleet.backends) * _APART_AT_START_SECONDS))
        elif (probe is ProbeResult.REFUSED and state == "up") or (probe is ProbeResult.OK and state == "down"):
            interval /= 4
        return self._jittered(interval)

    async def _rest_until(self, due: float) -> None:
        """Wait for the next probe, a request for it, or the end of an ejection, the earliest of these."""
        while (left := due - self.clock()) > 0:
            until_return = self.backend.health.ejected_until - self.clock()
            if await _wait(self._probe_wanted, min(left, until_return) if until_return > 0 else left):
                return
            self.fleet.tick(self.backend)

    def _jittered(self, seconds: float) -> float:
        return seconds * self.random.uniform(1 - JITTER, 1 + JITTER)

    def _log_state(self, probe: ProbeResult) -> None:
        state, was, reason = self.backend.health.state, self._logged_state, self.backend.health.probe_error
        if state != was:
            self._logged_state = state
            write = log.info if state == "up" else log.warning
            write("backend_state", backend=self.backend.name, state=state, was=was, probe=probe.value, reason=reason)
        elif state == "down" and reason and reason != self._logged_probe_error:
            log.warning("backend_unreachable", backend=self.backend.name, reason=reason)
        self._logged_probe_error = reason

    def _log_reason(self, path: str, reason: str) -> None:
        """Log why a request failed, once for each reason; at debug level if the path is optional."""
        if reason and reason != self._logged_reasons.get(path):
            write = log.warning if path in _REQUIRED else log.debug
            write("backend_question_failed", backend=self.backend.name, reason=reason)
        self._logged_reasons[path] = reason


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event was set within the time; it is cleared."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


@dataclass
class Answers:
    """The answers of one backend, which has learned the facts in them; `problems` maps a path to its error."""

    backend: Backend
    _: KW_ONLY
    probe: ProbeResult = ProbeResult.OK
    probe_error: str = ""  # why the probe did not succeed
    is_vllm: bool = False
    has_several: bool = False  # several processes answered at its URL
    generates: bool | None = None  # False = its models only embed, score or classify; None = not known
    problems: dict[str, ControlError] = field(default_factory=dict)

    @property
    def is_reachable(self) -> bool:
        return not (self.probe.is_silent or self.probe in (ProbeResult.REFUSED, ProbeResult.UNSENT))

    @property
    def is_engine(self) -> bool:
        """Whether it appears to serve models like vLLM: without its key, models are not listed."""
        models = self.problems.get(MODELS_PATH)
        is_locked = models is not None and models.status in (401, 403)
        return self.is_reachable and (self.is_vllm or bool(self.backend.facts.models) or is_locked)

    async def query(self, client: ControlClient) -> None:
        self.probe, self.probe_error = await client.probe(self.backend.config)
        if self.is_reachable:
            await asyncio.gather(*(self._ask(client, path) for path in (METRICS_PATH, *READERS)))
            for _ in range(_LOOKS if self.is_vllm else 0):
                before = self.backend.facts.process_start_seconds
                await self._ask(client, METRICS_PATH)
                self.has_several |= before != self.backend.facts.process_start_seconds
            self.generates = await client.offers(self.backend.config, CHAT_PATH)

    async def _ask(self, client: ControlClient, path: str) -> None:
        try:
            facts, telemetry = await client.read(self.backend.config, path)
            self.backend.learn(replace(self.backend.facts, **facts))
            self.is_vllm |= telemetry is not None
        except ControlError as error:
            self.problems[path] = error


async def survey(config: Config) -> list[Answers]:
    found = [
        Answers(Backend(index, each, health=config.health, random=Random(0)))
        for index, each in enumerate(config.backends)
    ]
    async with ControlClient(config.health.probe_timeout_seconds, time.monotonic) as client:
        await asyncio.gather(*(answers.query(client) for answers in found))
    return found
