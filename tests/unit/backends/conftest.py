"""A fleet under a clock that the test turns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from gateway.config import HealthConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import Blame, ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.errors import ConnectFailed


@dataclass
class ManualClock:
    """Monotonic seconds that pass only by a test's action."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def refused() -> ConnectFailed:
    """What the relay raises when nothing listens."""
    error = ConnectFailed("no connection")
    error.__cause__ = ConnectionRefusedError()
    return error


def peers(served_seconds: float, erred_seconds: float) -> list[Blame]:
    """Of one other backend, which last served a request and gave an error answer then."""
    blame = Blame()
    blame.served_seconds, blame.erred_seconds = served_seconds, erred_seconds
    return [blame]


@dataclass
class Scene:
    """A fleet and what its listeners received."""

    clock: ManualClock
    fleet: Fleet
    changes: list[dict[str, int]] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def serving(self, model: str = "m") -> str:
        found = self.fleet.serving(model)
        return "never listed" if found is None else "".join(backend.name for backend in found)

    def probe(self, backend: Backend, probe: ProbeResult, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += 2.0
            self.fleet.probed(backend, probe)


MakeScene = Callable[..., Scene]


@pytest.fixture
def scene() -> MakeScene:
    def make(count: int = 4, up: bool = True, models: tuple[str, ...] = ("m",), **health: float) -> Scene:
        clock = ManualClock()
        configs = [BackendConfig(url=f"http://10.0.0.{n}:8000", name="abcdefgh"[n]) for n in range(count)]
        fleet = Fleet(configs, HealthConfig.model_validate(health), clock=clock, random=Random(1))
        made = Scene(clock, fleet)
        if up:
            for backend in fleet.backends:
                fleet.learned(backend, Facts(models=tuple(ModelCard(model) for model in models)))
                fleet.probed(backend, ProbeResult.OK)
        fleet.on_change.append(lambda: made.changes.append({}))
        fleet.on_restart.append(lambda backend: made.restarts.append(backend.name))
        fleet.on_limit.append(lambda backend, _: made.limits.append(backend.name))
        fleet.on_probe_wanted.append(lambda backend: made.doubts.append(backend.name))
        return made

    return make
