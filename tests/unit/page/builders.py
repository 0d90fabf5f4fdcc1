"""A gateway that is put together and not started, and records of requests, for tests of the dashboard."""

from typing import Any

from gateway.app import Gateway
from gateway.config.file import parse
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.health import ProbeResult
from gateway.core.observe.record import Record
from gateway.core.request import Demand, Usage


def record(request_id: str = "id", outcome: str = "completed", **more: Any) -> Record:
    """A request that took a second, of 100 prompt tokens, 80 of them from the cache, on backend a."""
    made = Record(request_id, "chat", 10.0, 500, more.get("client", ""))
    made.parsed(Demand("m", streams=True, tenant=more.get("tenant", "")), more.get("model", "m"))
    if outcome == "completed":
        made.placed(more.get("model", "m"), more.get("backend", "a"), 0.25, 90)
        for _ in range(more.get("attempts", 1)):
            made.attempted(10.5, 7)
        made.answered(Usage(100, 7, more.get("hit", 80)), None, 0, client_was_slow=False)
    made.ended(outcome, 200 if outcome == "completed" else 503, 11.0, more.get("error", ""))
    return made


class House:
    """A gateway with backends of four slots each, which are up, under a clock that the test turns."""

    def __init__(self, backends: int = 2, served: tuple[str, ...] = ("m",), **sections: Any) -> None:
        self.now = 1000.0
        listed = [
            {"url": f"http://10.0.{number // 250}.{number % 250}:1", "name": f"gpu-{number}", "max_in_flight": 4}
            for number in range(backends)
        ]
        self.gateway = Gateway(parse({"backends": listed, **sections}), None, clock=lambda: self.now)
        for backend in self.gateway.core.fleet.backends:
            facts = Facts(
                version="0.33.0", kv_cache_tokens=10_000, kv_event_sources=(), models=tuple(map(ModelCard, served))
            )
            self.gateway.core.fleet.learned(backend, facts)
            self.gateway.core.fleet.probed(backend, ProbeResult.OK)

    def place(self, count: int = 1, **ask: Any) -> None:
        """So many requests arrive; they are bound, or wait."""
        for _ in range(count):
            demand = Demand(**({"model": "m", "prompt_tokens": 100, "streams": True, "size_bytes": 10} | ask))
            self.gateway.core.scheduler.place(demand, self.now)
