"""The plan of a run: everything that a worker needs and the report states, and when requests are due.

Arrivals are not rescaled to hit the rate exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from loadtest.access import Access
from loadtest.checkpoint import redaction
from loadtest.workloads.prompts import BodyMaker, Endpoint, WorkloadKind, WorkloadSpec


def constant(rate_per_second: float) -> Iterator[float]:
    """One arrival every 1/rate, the first at zero."""
    index = 0
    while True:
        yield index / rate_per_second
        index += 1


def poisson(rate_per_second: float, rng: random.Random) -> Iterator[float]:
    """Exponential gaps. The count over a run varies as a Poisson count does: that variance is part of the load."""
    due = 0.0
    while True:
        due += rng.expovariate(rate_per_second)
        yield due


def gamma(rate_per_second: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gamma gaps of that shape: 1 is Poisson, below 1 comes in bursts, above 1 is more even."""
    due = 0.0
    while True:
        due += rng.gammavariate(burstiness, 1 / (rate_per_second * burstiness))
        yield due


def ramped(at_rate_one: Iterable[float], first_rate: float, last_rate: float, ramp_seconds: float) -> Iterator[float]:
    """Arrivals of rate one, moved to a rate that goes evenly from the first to the last, and then stays."""
    during = (first_rate + last_rate) / 2 * ramp_seconds
    slope = (last_rate - first_rate) / ramp_seconds
    for count in at_rate_one:
        if count <= during:
            # The time at which the integral of the rate is `count`; this form of the root has no cancellation.
            root = math.sqrt(max(0.0, first_rate**2 + 2 * slope * count))
            yield 2 * count / (first_rate + root) if count else 0.0
        else:
            yield ramp_seconds + (count - during) / last_rate


def bounded(
    arrivals: Iterable[float], *, requests: int | None, duration_seconds: float | None
) -> Iterator[tuple[int, float]]:
    """(index, due) until the first of: `requests` have come, `duration_seconds` are over."""
    for index, due in enumerate(arrivals):
        if (requests is not None and index >= requests) or (duration_seconds is not None and due >= duration_seconds):
            return
        yield index, due


class Arrivals(StrEnum):
    """How an open loop spaces its requests."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


class MixPart(BaseModel):
    """One part of a mix: its share of arrivals, and its differences to the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    share: float = Field(gt=0)
    endpoint: Endpoint
    stream: bool
    model: str
    workload: WorkloadSpec


class Plan(BaseModel):
    """One run. A closed loop has `concurrency`, an open loop `rate_per_second` or a trace's own times, `trace_speed`.

    A ramp goes evenly from the first concurrency or rate to the last in `ramp_seconds`, and stays there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    endpoint: Endpoint = Endpoint.CHAT
    model: str
    stream: bool = True
    concurrency: int | None = Field(default=None, ge=1)
    first_concurrency: int | None = Field(default=None, ge=0)
    rate_per_second: float | None = Field(default=None, gt=0)
    first_rate_per_second: float | None = Field(default=None, ge=0)
    ramp_seconds: float | None = Field(default=None, gt=0)
    trace_speed: float | None = Field(default=None, gt=0)
    arrivals: Arrivals = Arrivals.POISSON
    burstiness: float = Field(default=1.0, gt=0, description="Shape of gamma gaps: below 1 comes in bursts.")
    duration_seconds: float | None = Field(default=None, gt=0)
    requests: int | None = Field(default=None, ge=1)
    max_in_flight: int = Field(default=10_000, ge=1, description="Open loop: arrivals above this are dropped, counted.")
    ignore_eos: bool = True
    cache_salt: str | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict)
    timeout_seconds: float = Field(default=600.0, gt=0)
    warmup_requests: int = Field(default=0, ge=0)
    workers: int = Field(default=1, ge=1)
    workload: WorkloadSpec = WorkloadSpec()
    mix: list[MixPart] = Field(default_factory=list, description="Instead of `workload`, where there are several.")
    access: Access = Field(default_factory=Access, exclude=True, repr=False)

    @field_serializer("url")
    def _without_user(self, url: str) -> str:
        return redaction.text(url)

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> Self:
        if [self.concurrency, self.rate_per_second, self.trace_speed].count(None) != 2:
            raise ValueError("give either a concurrency (closed loop), a rate (open loop), or a trace's own times")
        endless = self.workload.kind not in (WorkloadKind.TRACE, WorkloadKind.BODIES)
        if endless and self.duration_seconds is None and self.requests is None:
            raise ValueError("give a duration, a number of requests, or both")
        ramps = self.first_concurrency is not None or self.first_rate_per_second is not None
        if ramps != (self.ramp_seconds is not None):
            raise ValueError("a ramp has a first value and seconds")
        return self

    @property
    def seed(self) -> int:
        """One seed for arrivals and prompts."""
        return self.workload.seed

    @property
    def keeps_text(self) -> bool:
        """Whether later requests need the answers."""
        return self.workload.kind is WorkloadKind.SESSIONS

    def part(self, part: MixPart) -> Plan:
        """The plan of that part alone."""
        changes = {name: getattr(part, name) for name in ("endpoint", "stream", "model", "workload")}
        return self.model_copy(update={"mix": [], **changes})

    @property
    def slots(self) -> int:
        """The most users a closed loop ever has."""
        return max(self.concurrency or 0, self.first_concurrency or 0)

    def presence(self, slot: int) -> tuple[float, float]:
        """From when until when that user of a closed loop is there; before the start is from the start."""
        last, first = self.concurrency or 0, self.first_concurrency
        if first is None or self.ramp_seconds is None or min(first, last) > slot:
            return 0.0, math.inf
        if first < last:
            return (slot + 1 - first) / (last - first) * self.ramp_seconds, math.inf
        return 0.0, (first - slot) / (first - last) * self.ramp_seconds

    def body_maker(self) -> BodyMaker:
        return BodyMaker(
            endpoint=self.endpoint,
            model=self.model,
            stream=self.stream,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            extra=self.extra_body,
        )


def schedule(plan: Plan, recorded: Sequence[float] = ()) -> Iterator[tuple[int, float]]:
    """(index, seconds from the start) of every arrival of an open loop; the same in every worker."""
    dues: Iterator[float]
    if plan.trace_speed is not None:
        speed = plan.trace_speed
        dues = (at / speed for at in recorded)
    elif plan.ramp_seconds is not None and plan.first_rate_per_second is not None and plan.rate_per_second is not None:
        dues = ramped(_evenly(plan, 1.0), plan.first_rate_per_second, plan.rate_per_second, plan.ramp_seconds)
    else:
        assert plan.rate_per_second is not None
        dues = _evenly(plan, plan.rate_per_second)
    return bounded(dues, requests=plan.requests, duration_seconds=plan.duration_seconds)


def _evenly(plan: Plan, rate_per_second: float) -> Iterator[float]:
    rng = random.Random(f"arrivals-{plan.seed}")
    if plan.arrivals is Arrivals.CONSTANT:
        return constant(rate_per_second)
    if plan.arrivals is Arrivals.GAMMA:
        return gamma(rate_per_second, plan.burstiness, rng)
    return poisson(rate_per_second, rng)


def shared_out(total: int, worker: int, workers: int) -> int:
    """This worker's part of `total` things; the parts of all workers add up to `total`."""
    return total // workers + (worker < total % workers)
