"""The policies that can be replayed, by name: rules of other routers, and rules by load alone.

- SGLang's router and vllm-router: a tree of sent prompts by engine, a share that must match, unbalanced loads.
- KubeAI: consistent hashing with bounded loads; the opening of the prompt has a place on a ring.
- NVIDIA Dynamo: blocks to prefill plus blocks that would be active; the fewest win.
- llm-d: scorers from 0 to 1 and their weighted sum; the highest wins, ties by lot.
- LMetric: prefill queued on an engine times its batch; the smallest product wins.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from xxhash import xxh64_intdigest

from gateway.config import RoutingConfig
from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.gateway_router import GATEWAY, Admission, GatewayRouter, parted
from loadtest.replay.router import EngineView, PushRouter, Router, RoutingRule
from loadtest.replay.scenario import Scenario

# `--policy cache_aware` of sgl-project/sglang (main.rs, policies/cache_aware.rs and policies/tree.rs of
# sgl-model-gateway/src) and of vllm-project/router, with the defaults of both: share of the prompt that must match, and
# loads that are out of balance.
_MATCH, _ABSOLUTE, _RELATIVE = 0.3, 64, 1.5
# By default a tree keeps 2^26 characters an engine, looked at every 120 s: far more than a KV cache, and most replays
# are over before. `--max-tree-size` and `--eviction-interval` let users do better, so trees are as large as the KV
# cache and looked at every second: the better of the two in mean E2E for agents, equal for conversations and tools.
_EVICTION_SECONDS = 1.0


class CacheAware:
    """Out of balance: the fewest in flight. Else the best match if it is good enough, else the fewest in flight.

    The trees are one; each block has the engines that hold it. Several engines with the deepest block draw lots: SGLang
    takes the first holder, which is worse for tools; smg chooses among them.
    """

    def __init__(self, engines: int, block_tokens: int, tree_tokens: int, *, rng: random.Random) -> None:
        self._rng = rng
        self._block_tokens = block_tokens
        self._most_blocks = tree_tokens // block_tokens
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._holders: dict[int, list[int]] = {}  # of each block in a tree
        self._next_eviction_seconds = _EVICTION_SECONDS

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine; the prompt joins its tree."""
        if request.arrival_seconds >= self._next_eviction_seconds:
            self._next_eviction_seconds = request.arrival_seconds + _EVICTION_SECONDS
            self._evict()
        loads = [view.in_flight for view in engines]
        least, most = min(loads), max(loads)
        is_balanced = most - least <= _ABSOLUTE or most <= _RELATIVE * least
        matching = self._matching(request) if is_balanced else []
        chosen = self._rng.choice(matching) if matching else loads.index(least)
        self._insert(request.keys, chosen)
        return chosen

    def released(self, request: ReplayRequest) -> None:
        """The trees forget by size alone."""

    def _matching(self, request: ReplayRequest) -> list[int]:
        """The engines with the deepest block of the prompt, if that is deep enough."""
        depth, holders = 0, list[int]()
        for key in request.keys:
            if key not in self._holders:
                break
            depth, holders = depth + 1, self._holders[key]
        return holders if depth * self._block_tokens > _MATCH * request.prompt_tokens else []

    def _insert(self, keys: Sequence[int], engine: int) -> None:
        tree = self._trees[engine]
        for key in reversed(keys):
            if key not in tree:
                self._holders.setdefault(key, []).append(engine)
            tree[key] = None
            tree.move_to_end(key)

    def _evict(self) -> None:
        """Branches lose their ends first, the least recently used before others."""
        for engine, tree in enumerate(self._trees):
            while len(tree) > self._most_blocks:
                key, _ = tree.popitem(last=False)
                self._holders[key].remove(engine)
                if not self._holders[key]:
                    del self._holders[key]


_REPLICAS = 256
_LOAD_FACTOR = 1.25


class BoundedLoadRing:
    """Clockwise from the opening's hash, the first engine with a load, including this request, within 1.25 of the mean.

    KubeAI hashes the first 100 characters, which lie within the first block.
    """

    def __init__(self, engines: int, replicas: int = _REPLICAS, load_factor: float = _LOAD_FACTOR) -> None:
        places = (
            (xxh64_intdigest(f"engine-{i}{copy}".encode()), i) for i in range(engines) for copy in range(replicas)
        )
        self._ring = sorted(places)
        self._hashes = [place for place, _ in self._ring]
        self._load_factor = load_factor

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The first engine on the way round that has room, or else the first; a prompt without a full block is an
        opening of its own."""
        opening = (f"{request.keys[0]}" if request.keys else f"prompt {request.number}").encode()
        start = bisect_left(self._hashes, xxh64_intdigest(opening)) % len(self._ring)
        total = sum(view.in_flight for view in engines)
        bound = (total + 1) / len(engines) * self._load_factor
        places = (self._ring[(start + step) % len(self._ring)][1] for step in range(len(self._ring)))
        present = [index for index in places if index < len(engines)]  # others have yet to join
        return next((i for i in present if total == 0 or engines[i].in_flight + 1 <= bound), present[0])

    def released(self, request: ReplayRequest) -> None: ...


class DynamoCost:
    """cost = weight x (prompt tokens in prefill + own uncached ones) / block + active blocks with this request's."""

    def __init__(self, engines: int, block_tokens: int, rng: random.Random, *, overlap_weight: float = 1.0) -> None:
        self._block_tokens = block_tokens
        self._rng = rng
        self._weight = overlap_weight
        self._references: list[dict[int, int]] = [{} for _ in range(engines)]  # active blocks that have a key
        self._unnamed = [0] * engines  # partial blocks of active requests
        self._sent: dict[ReplayRequest, int] = {}

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The cheapest engine, ties by lot."""
        costs = [self._cost(request, view) for view in engines]
        least = min(costs)
        chosen = self._rng.choice([index for index, cost in enumerate(costs) if cost == least])
        references = self._references[chosen]
        for key in request.keys:
            references[key] = references.get(key, 0) + 1
        self._unnamed[chosen] += self._blocks(request) - len(request.keys)
        self._sent[request] = chosen
        return chosen

    def released(self, request: ReplayRequest) -> None:
        """Its blocks are active no more."""
        engine = self._sent.pop(request)
        references = self._references[engine]
        for key in request.keys:
            if references[key] == 1:
                del references[key]
            else:
                references[key] -= 1
        self._unnamed[engine] -= self._blocks(request) - len(request.keys)

    def _cost(self, request: ReplayRequest, view: EngineView) -> float:
        references = self._references[view.index]
        shared = 0
        for key in request.keys:
            if key not in references:
                break
            shared += 1
        active = len(references) + self._unnamed[view.index] + self._blocks(request) - shared
        prefill = (view.prefill_tokens + view.uncached_tokens(request)) / self._block_tokens
        return self._weight * prefill + active

    def _blocks(self, request: ReplayRequest) -> int:
        return -(-request.prompt_tokens // self._block_tokens)


Scorer = Callable[[ReplayRequest, Sequence[EngineView]], list[float]]


def prefix_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:
    """The share of the prompt's blocks that an engine holds."""
    total = len(request.keys)
    return [view.cached_blocks(request) / total if total else 0.0 for view in engines]


def queue_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:  # noqa: ARG001
    """1 for the shortest queue in an engine, 0 for the longest; 1 for all if they are equal."""
    lengths = [view.waiting for view in engines]
    least, most = min(lengths), max(lengths)
    return [(most - length) / (most - least) if most > least else 1.0 for length in lengths]


def kv_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:  # noqa: ARG001
    """The share of the KV cache that is free."""
    return [1.0 - view.kv_usage for view in engines]


def active_request_scores(request: ReplayRequest, engines: Sequence[EngineView]) -> list[float]:  # noqa: ARG001
    """1 for an idle engine, 0 for the engine with the most requests in flight."""
    counts = [view.in_flight for view in engines]
    most = max(counts)
    return [(most - count) / most if count else 1.0 for count in counts]


class WeightedScores:
    """A scheduling profile: scorers with weights."""

    def __init__(self, profile: Sequence[tuple[float, Scorer]], rng: random.Random) -> None:
        self._profile = profile
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine with the highest sum."""
        sums = [0.0] * len(engines)
        for weight, scorer in self._profile:
            sums = [total + weight * score for total, score in zip(sums, scorer(request, engines), strict=True)]
        best = max(sums)
        return self._rng.choice([index for index, total in enumerate(sums) if total == best])

    def released(self, request: ReplayRequest) -> None: ...


def default_profile(rng: random.Random) -> WeightedScores:
    """The chart's default: prefix 3, queue 2, KV cache 2."""
    return WeightedScores(((3.0, prefix_scores), (2.0, queue_scores), (2.0, kv_scores)), rng)


def active_request_profile(rng: random.Random) -> WeightedScores:
    """Prefix 2, active requests 1, KV cache 1."""
    return WeightedScores(((2.0, prefix_scores), (1.0, active_request_scores), (1.0, kv_scores)), rng)


class LMetric:
    """(uncached tokens in prefill + own uncached tokens) x (requests in flight with this one)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine with the smallest product, ties by lot."""
        products = [(view.prefill_tokens + view.uncached_tokens(request)) * (view.in_flight + 1) for view in engines]
        least = min(products)
        return self._rng.choice([index for index, product in enumerate(products) if product == least])

    def released(self, request: ReplayRequest) -> None: ...


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        self._turn = (self._turn + 1) % len(engines)
        return self._turn

    def released(self, request: ReplayRequest) -> None: ...


class LeastInFlight:
    """The engine with the fewest requests in flight; ties by lot."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        least = min(view.in_flight for view in engines)
        return self._rng.choice([view.index for view in engines if view.in_flight == least])

    def released(self, request: ReplayRequest) -> None: ...


class PowerOfTwoChoices:
    """The emptier of two engines drawn by lot."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:  # noqa: ARG002
        """The emptier one; of one engine, that one."""
        drawn = self._rng.sample(range(len(engines)), min(2, len(engines)))
        return min(drawn, key=lambda index: engines[index].in_flight)

    def released(self, request: ReplayRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class RouterContext:
    """The inputs of a router's constructor."""

    scenario: Scenario
    block_tokens: int
    engines: Sequence[ReplayEngine]
    _: KW_ONLY
    rng: random.Random
    admission: Admission | None = None  # None = the policy's own


def _push(rule: Callable[[RouterContext], RoutingRule]) -> Callable[[RouterContext], Router]:
    def made(site: RouterContext) -> Router:
        views = [EngineView(index, engine) for index, engine in enumerate(site.engines)]
        return PushRouter(rule(site), views, site.scenario.faults.join_engines)

    return made


def _own(policy: str, *, exact: bool = False, admission: Admission = GATEWAY) -> Callable[[RouterContext], Router]:
    def made(site: RouterContext) -> Router:
        return GatewayRouter(
            policy,
            site.scenario,
            engines=site.engines,
            block_tokens=site.block_tokens,
            routing=RoutingConfig(),
            admission=site.admission or admission,
            exact=exact,
        )

    return made


_ROUTERS: dict[str, Callable[[RouterContext], Router]] = {
    "ours": _own("prefix"),
    "ours_exact": _own("prefix", exact=True),
    "gateway_least_loaded": _own("least_loaded"),
    "gateway_round_robin": _own("round_robin"),
    "round_robin": _push(lambda site: RoundRobin()),  # noqa: ARG005
    "least_in_flight": _push(lambda site: LeastInFlight(site.rng)),
    "p2c": _push(lambda site: PowerOfTwoChoices(site.rng)),
    "chwbl": _push(lambda site: BoundedLoadRing(len(site.engines))),
    "sglang": _push(
        lambda site: CacheAware(len(site.engines), site.block_tokens, site.scenario.kv_tokens, rng=site.rng)
    ),
    "llmd": _push(lambda site: default_profile(site.rng)),
    "llmd_active": _push(lambda site: active_request_profile(site.rng)),
    "dynamo": _push(lambda site: DynamoCost(len(site.engines), site.block_tokens, site.rng)),
    "lmetric": _push(lambda site: LMetric(site.rng)),
}
NAMES = tuple(_ROUTERS)
OWN = ("ours", "ours_exact", "gateway_least_loaded", "gateway_round_robin")  # an arm of admission may be chosen for
USUAL = ("ours", "lmetric", "sglang", "llmd", "llmd_active", "dynamo", "chwbl", "least_in_flight", "round_robin")


def router_of(name: str, site: RouterContext) -> Router:
    """A new router of that policy, which may be named with an arm of admission."""
    policy, admission = parted(name)
    return _ROUTERS[policy](replace(site, admission=admission))
