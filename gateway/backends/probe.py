"""Keeps the fleet's facts fresh: probes, scrapes and queries, in three loops for each backend.

The loops are independent: a hanging /metrics delays no probe, a slow list of models delays no scrape. Only /health and
the outcome of requests change which backends get traffic; a failed scrape only ages telemetry.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Any, Self

import structlog

from gateway.backends import vllm_api
from gateway.backends.backend import Backend
from gateway.backends.facts import Facts
from gateway.backends.fleet import Clock, Fleet
from gateway.backends.health import PROBE_WORDS, ProbeResult, State
from gateway.backends.vllm_api import ControlClient, ControlError
from gateway.backends.vllm_metrics import Scrape, with_scrape
from gateway.config import HealthConfig
from gateway.supervisor import Supervisor

JITTER = 0.1
EAGER_SECONDS = 0.2  # between probes while no backend at all can serve
FASTEST_SECONDS = 0.2  # least time between probes, however often one is requested
STALE_INTERVALS = 3  # telemetry older than this many probe intervals is dropped
SERVER_INFO_TIMEOUT_SECONDS = 15.0  # the first call makes the server collect its environment
_REQUIRED = ("/health", vllm_api.MODELS_PATH)

log = structlog.get_logger()


class Watch:
    """Watches a fleet inside its `async with` block."""

    def __init__(
        self,
        fleet: Fleet,
        config: HealthConfig,
        *,
        clock: Clock,
        random: Random,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._fleet = fleet
        self._supervisor = supervisor or Supervisor(clock)
        self._pause_seconds = config.probe_interval_seconds
        self._stack = AsyncExitStack()
        self._client = ControlClient(config.probe_timeout_seconds, clock)
        self._watches = {
            backend: BackendWatch(backend, fleet, config, self._client, clock, random) for backend in fleet.backends
        }

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._client)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._fleet.on_probe_wanted.append(self._probe_soon)
            stack.callback(self._fleet.on_probe_wanted.remove, self._probe_soon)
            self._fleet.on_restart.append(self._ask_everything)
            stack.callback(self._fleet.on_restart.remove, self._ask_everything)
            for watch in self._watches.values():
                for step in (watch.probe, watch.ask_facts, watch.scrape):
                    work = self._supervisor.repeat("backend_watch", step, self._pause_seconds)
                    stack.callback(group.create_task(work).cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _probe_soon(self, backend: Backend) -> None:
        self._watches[backend].probe_soon()

    def _ask_everything(self, backend: Backend) -> None:
        self._watches[backend].ask_everything()


class BackendWatch:
    """The three loops that watch one backend."""

    def __init__(
        self,
        backend: Backend,
        fleet: Fleet,
        config: HealthConfig,
        client: ControlClient,
        clock: Clock,
        random: Random,
    ) -> None:
        self._backend = backend
        self._fleet = fleet
        self._config = config
        self._client = client
        self._clock = clock
        self._random = random
        self._probe_wanted = asyncio.Event()
        self._facts_wanted = asyncio.Event()
        self._scrape_wanted = asyncio.Event()
        self._answers = False  # whether the last probe was answered well
        self._in_doubt = False
        self._server_info_asked = False
        self._logged_state: State = "unknown"
        self._logged_probe_error: str | None = None
        self._logged_reasons: dict[str, str] = {}

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
        started = self._clock()
        reasons: list[str] = []
        probe = await self._client.probe(self._backend, reasons.append)
        if probe is ProbeResult.UNSENT:
            self._log_reason("/health", PROBE_WORDS[probe])
            await asyncio.sleep(self._jittered(self._config.probe_interval_seconds))
            return
        self._log_reason("/health", "")
        answers = probe is ProbeResult.OK
        health = self._backend.health
        if answers and (health.state != "up" or health.gone):
            # Before it gets a request for a model that it no longer has.
            await self._ask(vllm_api.MODELS_PATH, vllm_api.with_models)
        if answers and not self._answers:
            self.ask_everything()
        if answers and self._in_doubt:
            self._in_doubt = False
            self._facts_wanted.set()
        self._answers = answers
        self._fleet.probed(self._backend, probe, "".join(reasons))
        self._log_state(probe)
        await self._rest_until(started + self._pause_seconds(probe))
        await asyncio.sleep(max(0.0, started + FASTEST_SECONDS - self._clock()))

    async def ask_facts(self) -> None:
        """Read models, version and settings when it is time or wanted."""
        await _wait(self._facts_wanted, self._jittered(self._config.refresh_seconds))
        if not self._answers:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask(vllm_api.MODELS_PATH, vllm_api.with_models))
            group.create_task(self._ask(vllm_api.VERSION_PATH, vllm_api.with_version))
            group.create_task(self._ask(vllm_api.KV_EVENT_SOURCES_PATH, vllm_api.with_kv_event_sources))
            if not self._server_info_asked:  # its answer stays the same as long as the process lives
                self._server_info_asked = True
                group.create_task(
                    self._ask(vllm_api.SERVER_INFO_PATH, vllm_api.with_server_info, SERVER_INFO_TIMEOUT_SECONDS)
                )
        await asyncio.sleep(FASTEST_SECONDS)

    async def scrape(self) -> None:
        """Read /metrics when it is time or wanted, and drop what is too old."""
        await _wait(self._scrape_wanted, self._jittered(self._config.probe_interval_seconds))
        backend = self._backend
        if self._answers:
            try:
                self._take(await self._client.scrape(backend))
            except ControlError as error:
                self._log_reason("/metrics", str(error))
        oldest = self._clock() - STALE_INTERVALS * self._config.probe_interval_seconds
        if backend.telemetry is not None and backend.telemetry.at_seconds < oldest:
            self._fleet.measured(backend, None)

    def _take(self, scrape: Scrape) -> None:
        self._log_reason("/metrics", "")
        if scrape.telemetry is None:
            return  # a page without vLLM's metrics
        self._fleet.learned(self._backend, with_scrape(self._backend.facts, scrape))
        self._fleet.measured(self._backend, scrape.telemetry)

    async def _ask(self, path: str, take: Callable[[Facts, Any], Facts], timeout_seconds: float | None = None) -> None:
        """Learn what a path answers; without an answer, facts stay as they were."""
        try:
            document = await self._client.ask(self._backend, path, timeout_seconds)
            self._fleet.learned(self._backend, take(self._backend.facts, document))
            if path == vllm_api.MODELS_PATH:
                self._fleet.list_read(self._backend)
            self._log_reason(path, "")
        except (ControlError, ValueError) as error:
            is_optional = isinstance(error, ControlError) and error.status == 404 and path != vllm_api.MODELS_PATH
            self._log_reason(path, "" if is_optional else str(error))
            if path == vllm_api.SERVER_INFO_PATH:  # it may be of a former process
                self._fleet.learned(self._backend, vllm_api.without_server_info(self._backend.facts))

    def _pause_seconds(self, probe: ProbeResult) -> float:
        """From the start of one probe to the next; shorter where the next one decides something."""
        state, interval = self._backend.health.state, self._config.probe_interval_seconds
        if not self._fleet.ready and (state != "up" or probe is ProbeResult.REFUSED):
            interval = min(interval, EAGER_SECONDS)
        elif (probe is ProbeResult.REFUSED and state == "up") or (probe is ProbeResult.OK and state == "down"):
            interval /= 4
        return self._jittered(interval)

    async def _rest_until(self, due: float) -> None:
        """Wait for the next probe, a wish for one, or the end of an ejection, whichever is first."""
        while (left := due - self._clock()) > 0:
            until_return = self._backend.health.ejected_until - self._clock()
            if await _wait(self._probe_wanted, min(left, until_return) if until_return > 0 else left):
                return
            self._fleet.tick(self._backend)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(1 - JITTER, 1 + JITTER)

    def _log_state(self, probe: ProbeResult) -> None:
        state, was, reason = self._backend.health.state, self._logged_state, self._backend.probe_error
        if state != was:
            self._logged_state = state
            write = log.info if state == "up" else log.warning
            write("backend_state", backend=self._backend.name, state=state, was=was, probe=probe.value, reason=reason)
        elif state == "down" and reason and reason != self._logged_probe_error:
            log.warning("backend_unreachable", backend=self._backend.name, reason=reason)
        self._logged_probe_error = reason

    def _log_reason(self, path: str, reason: str) -> None:
        """Log why a request failed, once for each reason; at debug level if the path is optional."""
        if reason and reason != self._logged_reasons.get(path):
            write = log.warning if path in _REQUIRED else log.debug
            write("backend_question_failed", backend=self._backend.name, reason=reason)
        self._logged_reasons[path] = reason


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within the time; it is cleared."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True
