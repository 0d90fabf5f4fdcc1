"""The plan of a run: everything a worker process needs, and everything the report must state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loadtest.drive.arrivals import bounded, constant, poisson
from loadtest.workloads.body import BodyMaker, Endpoint
from loadtest.workloads.spec import WorkloadSpec


class Arrivals(StrEnum):
    """How an open loop spaces its requests."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Plan(BaseModel):
    """One run. Closed loop has `concurrency`, open loop has `rate_per_second`; exactly one is set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    endpoint: Endpoint = Endpoint.CHAT
    model: str
    stream: bool = True
    concurrency: int | None = Field(default=None, ge=1)
    rate_per_second: float | None = Field(default=None, gt=0)
    arrivals: Arrivals = Arrivals.POISSON
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
    api_key: str | None = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> Self:
        if (self.concurrency is None) == (self.rate_per_second is None):
            raise ValueError("give either a concurrency (closed loop) or a rate (open loop)")
        if self.duration_seconds is None and self.requests is None:
            raise ValueError("give a duration, a number of requests, or both")
        return self

    @property
    def seed(self) -> int:
        """One seed for arrivals and prompts."""
        return self.workload.seed

    def body_maker(self) -> BodyMaker:
        """Makes this run's request bodies."""
        return BodyMaker(
            endpoint=self.endpoint,
            model=self.model,
            stream=self.stream,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            extra=self.extra_body,
        )


def schedule(plan: Plan) -> Iterator[tuple[int, float]]:
    """(index, seconds from the start) of every arrival of an open loop; the same in every worker."""
    assert plan.rate_per_second is not None
    if plan.arrivals is Arrivals.CONSTANT:
        dues = constant(plan.rate_per_second)
    else:
        dues = poisson(plan.rate_per_second, random.Random(f"arrivals-{plan.seed}"))
    return bounded(dues, requests=plan.requests, duration_seconds=plan.duration_seconds)


def shared_out(total: int, worker: int, workers: int) -> int:
    """This worker's part of `total` things; the parts of all workers add up to `total`."""
    return total // workers + (worker < total % workers)
