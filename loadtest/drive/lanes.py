"""The parts of a mix side by side: where each one's requests come from, and how they are sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from loadtest.drive.client import Client
from loadtest.drive.plan import Plan
from loadtest.workloads.body import BodyMaker
from loadtest.workloads.prompts import Source
from loadtest.workloads.sources import source_of


@dataclass(frozen=True, slots=True)
class Lane:
    """One kind of request; a run without a mix has a single one, without a name."""

    name: str | None
    source: Source
    bodies: BodyMaker
    client: Client


@dataclass(frozen=True, slots=True)
class Lanes:
    """Which kind each arrival is of: drawn by share, the same in every worker."""

    lanes: Sequence[Lane]
    shares: Sequence[float]
    seed: int

    def of(self, index: int) -> Lane:
        if len(self.lanes) == 1:
            return self.lanes[0]
        return random.Random(f"{self.seed}-part-{index}").choices(self.lanes, self.shares)[0]

    @property
    def count(self) -> int | None:
        """How many arrivals there can be; None: no end."""
        return self.lanes[0].source.count if len(self.lanes) == 1 else None

    @property
    def arrivals_seconds(self) -> Sequence[float]:
        """When they came, where that was recorded."""
        return self.lanes[0].source.arrivals_seconds if len(self.lanes) == 1 else ()


def lanes_of(plan: Plan, session: aiohttp.ClientSession, clock: Callable[[], float]) -> Lanes:
    """All lanes over one session. Reads the files that workloads name."""

    def lane(name: str | None, alone: Plan) -> Lane:
        return Lane(name, source_of(alone.workload), alone.body_maker(), Client(alone, session, clock))

    if not plan.mix:
        return Lanes([lane(None, plan)], [1.0], plan.seed)
    lanes = [lane(part.name, plan.part(part)) for part in plan.mix]
    return Lanes(lanes, [part.share for part in plan.mix], plan.seed)
