"""The policies that can be replayed, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.config import RoutingConfig
from loadtest.replay.admission import GATEWAY, LEDGER, Admission, parted
from loadtest.replay.engine import ReplayEngine
from loadtest.replay.gateway_router import GatewayRouter
from loadtest.replay.peers.cache_aware import CacheAware
from loadtest.replay.peers.chwbl import BoundedLoadRing
from loadtest.replay.peers.dynamo import DynamoCost
from loadtest.replay.peers.llm_d import active_request_profile, default_profile
from loadtest.replay.peers.lmetric import LMetric
from loadtest.replay.peers.load_only import LeastInFlight, PowerOfTwoChoices, RoundRobin
from loadtest.replay.router import PushRouter, Router, Rule
from loadtest.replay.scenario import Scenario
from loadtest.replay.view import EngineView


@dataclass(frozen=True, slots=True)
class Site:
    """What a router is made for."""

    scenario: Scenario
    block_tokens: int
    engines: Sequence[ReplayEngine]
    rng: random.Random
    admission: Admission | None = None  # None = the policy's own


def _push(rule: Callable[[Site], Rule]) -> Callable[[Site], Router]:
    def made(site: Site) -> Router:
        return PushRouter(rule(site), [EngineView(index, engine) for index, engine in enumerate(site.engines)])

    return made


def _own(policy: str, *, exact: bool = False, admission: Admission = GATEWAY) -> Callable[[Site], Router]:
    def made(site: Site) -> Router:
        return GatewayRouter(
            policy, site.scenario, site.engines, site.block_tokens, RoutingConfig(), site.admission or admission,
            exact=exact,
        )  # fmt: skip

    return made


_ROUTERS: dict[str, Callable[[Site], Router]] = {
    "ours": _own("prefix"),
    "ours_exact": _own("prefix", exact=True),
    "ours_push": _own("prefix", admission=replace(LEDGER, window=False)),
    "gateway_least_loaded": _own("least_loaded"),
    "gateway_round_robin": _own("round_robin"),
    "round_robin": _push(lambda site: RoundRobin()),  # noqa: ARG005
    "least_in_flight": _push(lambda site: LeastInFlight(site.rng)),
    "p2c": _push(lambda site: PowerOfTwoChoices(site.rng)),
    "chwbl": _push(lambda site: BoundedLoadRing(len(site.engines))),
    "sglang": _push(lambda site: CacheAware(len(site.engines), site.block_tokens, site.rng)),
    "llmd": _push(lambda site: default_profile(site.rng)),
    "llmd_active": _push(lambda site: active_request_profile(site.rng)),
    "dynamo": _push(lambda site: DynamoCost(len(site.engines), site.block_tokens, site.rng)),
    "lmetric": _push(lambda site: LMetric(site.rng)),
}
NAMES = tuple(_ROUTERS)
OWN = ("ours", "ours_exact", "gateway_least_loaded", "gateway_round_robin")  # an arm of admission may be chosen for
USUAL = (
    "ours", "lmetric", "sglang", "llmd", "llmd_active", "dynamo", "chwbl", "least_in_flight", "round_robin",
)  # fmt: skip


def router_of(name: str, site: Site) -> Router:
    """A new router of that policy, which may be named with an arm of admission."""
    policy, admission = parted(name)
    return _ROUTERS[policy](replace(site, admission=admission))
