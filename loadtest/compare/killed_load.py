"""The load under which an engine goes: steady, open loop, streams and whole answers in equal parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadtest.compare.killed_run import Outage
from loadtest.compare.killed_schema import Fault
from loadtest.drive.plan import MixPart, Plan
from loadtest.servers.engines import Kind
from loadtest.workloads.body import Endpoint
from loadtest.workloads.spec import WorkloadSpec

_WARMUPS = 8


@dataclass(frozen=True)
class KilledLoad:
    """How much, for how long. The engine is away for the middle third."""

    rate_per_second: float
    seconds: float
    max_tokens: int
    prefix_tokens: int = 128
    tail_tokens: int = 32
    groups: int = 16

    @property
    def patience_seconds(self) -> float:
        """Shorter than the engine is away, as the clients of an engine that never comes back have to be."""
        return self.seconds / 6

    def outage(self, engine: int, fault: Fault) -> Outage:
        return Outage(engine, fault, self.seconds / 3, self.seconds * 2 / 3, self.patience_seconds / 5)

    def plan(self, url: str, endpoint: Endpoint, model: str, seed: int) -> Plan:
        """As it is sent; the same requests at the same times for the same seed."""
        workload = WorkloadSpec(
            groups=self.groups, prefix_tokens=self.prefix_tokens, tail_tokens=self.tail_tokens,
            max_tokens=self.max_tokens, output_spread=0.5, seed=seed,
        )  # fmt: skip
        parts = [
            MixPart(name=name, share=1.0, endpoint=endpoint, stream=stream, model=model, workload=workload)
            for name, stream in (("streams", True), ("whole", False))
        ]
        return Plan(
            url=url, endpoint=endpoint, model=model, rate_per_second=self.rate_per_second,
            duration_seconds=self.seconds, timeout_seconds=self.patience_seconds, warmup_requests=_WARMUPS,
            workload=workload, mix=parts,
        )  # fmt: skip

    def told(self) -> str:
        return (
            f"{self.rate_per_second:g} requests/s for {self.seconds:g} s, Poisson, half of them streams, "
            f"{self.prefix_tokens} + {self.tail_tokens} prompt tokens, about {self.max_tokens} output tokens; "
            f"a client waits {self.patience_seconds:g} s for a whole answer"
        )


def usual(kind: Kind, seconds: float | None = None) -> KilledLoad:
    """What is left of two engines of that kind can carry it; real ones take long to start."""
    load = KilledLoad(10.0, 45.0, 256) if kind is Kind.SIM else KilledLoad(1.5, 180.0, 64)
    return load if seconds is None else replace(load, seconds=seconds)
