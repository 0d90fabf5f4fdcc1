"""A dispatcher with a relay that plays a script."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from gateway.config import HealthConfig, UpstreamConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.dispatch import Dispatcher, RetryBudget
from gateway.core.errors import (
    BackendError,
)
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind, UpstreamResult, Usage
from gateway.core.routing.estimates import Calibrations, CostModel, OutputLengths
from gateway.core.routing.policy import RoundRobinPolicy
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import turns

Step = UpstreamResult | BackendError | str
WELL = UpstreamResult(200, Usage(100, 7, 48), 1003.5)


def request(**ask: Any) -> InferenceRequest:
    return InferenceRequest("chat", Kind.GENERATE, b"POST", b"/x", Demand("m", streams=True, **ask), "id-1")


class Scene:
    """Backends a, b, c of one slot each, and a relay that plays a script."""

    def __init__(
        self, *script: Step, backends: str = "abc", holds: bool = True, eject_failures: int = 5, **upstream: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        configs = [
            BackendConfig(url=f"http://10.0.0.{number}:1", name=name, max_in_flight=1)
            for number, name in enumerate(backends)
        ]
        health = HealthConfig(eject_failures=eject_failures)
        self.fleet = Fleet(configs, health, clock=loop.time, random=Random(1))
        for backend in self.fleet.backends:
            self.fleet.learned(backend, Facts(models=(ModelCard("m"),)))
            self.fleet.probed(backend, ProbeResult.OK)
        self.doubts: list[str] = []
        self.fleet.on_probe_wanted.append(lambda backend: self.doubts.append(backend.name))
        queue, lengths, calibration = Queue(10, 1000), OutputLengths(), Calibrations(CostModel())
        self.scheduler = Scheduler(
            self.fleet.candidates,
            RoundRobinPolicy(),
            queue=queue,
            lengths=lengths,
            calibrations=calibration,
            settings=SchedulerSettings(),
        )
        self.lease_broker = LeaseBroker(self.scheduler, queue, 60.0, clock=loop.time)
        self.fleet.on_change.append(self.lease_broker.fleet_changed)
        self.metrics, self.record, self.wire = Metrics(), Record("id-1", "chat", 1000.0), FakeWire()
        self.reply = reply_on(self.wire)
        self.script = list(script)
        self.sent: list[str] = []
        self.ranks: list[int | None] = []
        self.tokens = 5000  # that come at once of an answer that begins: more than was reserved
        self.release = asyncio.Event()
        budget = RetryBudget(UpstreamConfig.model_validate(upstream))
        self.dispatcher = Dispatcher(
            self.fleet,
            lease_broker=self.lease_broker,
            send=self.send,
            budget=budget,
            metrics=self.metrics,
            response_headers=True,
            holds=holds,
        )

    # The relay.

    def backend(self, name: str) -> Backend:
        return next(backend for backend in self.fleet.backends if backend.name == name)

    async def send(
        self,
        what: InferenceRequest,
        backend: Backend,
        sink: object,
        first_token: Callable[[], None],
        came: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool,
        last: bool,
    ) -> UpstreamResult:
        self.sent.append(backend.name + ("!" if fresh else ""))
        self.ranks.append(rank)
        assert self.fleet.engines()[0].load.in_flight <= 1
        await turns(2)
        step = self.script.pop(0)
        if step == "begin":
            self.reply.begin(200, b"text/event-stream", b"")
            first_token()
            came(self.tokens)
            step = self.script.pop(0)
        if step == "hang":
            await self.release.wait()
            step = self.script.pop(0)
        if isinstance(step, BackendError):
            raise step
        assert isinstance(step, UpstreamResult)
        return step

    # The test's side.

    async def dispatch(self, what: InferenceRequest | None = None) -> UpstreamResult:
        return await self.dispatcher.dispatch(what or request(), self.reply, self.record)

    async def fails(self, kind: type[Exception], what: InferenceRequest | None = None) -> None:
        with pytest.raises(kind):
            await self.dispatch(what)
        self.check_that_nothing_is_left()

    def check_that_nothing_is_left(self) -> None:
        assert self.lease_broker.waiting == 0
        for engine in self.fleet.engines():
            assert repr(engine.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"
            assert repr(engine.kv) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"

    def attempts(self) -> dict[tuple[str, ...], float]:
        return self.metrics.attempts.values
