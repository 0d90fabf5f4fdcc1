"""The protocol of a replay's router, the engine as its rules see it, and routers that send on arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from loadtest.replay.engine import ReplayEngine, ReplayRequest, Sending


class EngineView:
    """`in_flight` and `prefill_tokens` (uncached, no first token yet) are the router's own counts."""

    def __init__(self, index: int, engine: ReplayEngine) -> None:
        self.index = index
        self.in_flight = 0
        self.prefill_tokens = 0
        self._scheduler = engine.scheduler
        self._block_tokens = engine.scheduler.limits.block_size

    def send(self, uncached_tokens: int) -> None:
        self.in_flight += 1
        self.prefill_tokens += uncached_tokens

    def end_prefill(self, uncached_tokens: int) -> None:
        self.prefill_tokens -= uncached_tokens

    def finish(self) -> None:
        self.in_flight -= 1

    @property
    def waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache's blocks that sequences refer to."""
        pool = self._scheduler.pool
        return pool.num_used / pool.num_blocks

    def cached_blocks(self, request: ReplayRequest) -> int:
        """Leading blocks of the prompt that the engine's cache holds."""
        return len(self._scheduler.pool.find(request.keys, len(request.keys)))

    def uncached_tokens(self, request: ReplayRequest) -> int:
        """Tokens of the prompt that it would have to compute; at least one."""
        return max(1, request.prompt_tokens - self._block_tokens * self.cached_blocks(request))


class Router(Protocol):
    """Decides which engine gets a request, and when. It answers with what is to be sent now.

    `scrape_seconds`: from one look at the engines' metrics to the next; infinite for one that has no use for them.
    """

    scrape_seconds: float

    @property
    def waiting(self) -> int:
        """Requests that were not sent yet."""

    def arrived(self, request: ReplayRequest, now: float) -> list[Sending]: ...

    def first_token(self, request: ReplayRequest, now: float) -> None: ...

    def finished(self, request: ReplayRequest, now: float) -> None: ...

    def scraped(self, now: float) -> None:
        """It is time to look at the engines' metrics."""

    def joined(self, now: float) -> None:
        """The engines that were missing from the beginning are there."""

    def settle(self, now: float, *, is_look: bool) -> list[Sending]:
        """Requests to send now, after all events of this moment. `is_look`: a look by the clock, without events."""


class RoutingRule(Protocol):
    """A peer's rule: which engine is best for a request at its arrival."""

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine's index; the request is sent there at once."""

    def released(self, request: ReplayRequest) -> None:
        """An answer is whole, for rules that keep a record of what is active."""


class PushRouter:
    """Sends each request on arrival to where a rule says; requests wait inside the engines. The engines that join later
    are the last ones, and the rule does not see them before."""

    def __init__(self, rule: RoutingRule, engines: Sequence[EngineView], joining: int = 0) -> None:
        self._rule = rule
        self._all = engines
        self._engines = engines[: len(engines) - joining]
        self._uncached: dict[ReplayRequest, int] = {}
        self.scrape_seconds = math.inf  # rules look whenever they want to

    @property
    def waiting(self) -> int:
        return 0

    def arrived(self, request: ReplayRequest, now: float) -> list[Sending]:  # noqa: ARG002
        index = self._rule.choose(request, self._engines)
        view = self._engines[index]
        self._uncached[request] = view.uncached_tokens(request)
        view.send(self._uncached[request])
        return [(request, index)]

    def first_token(self, request: ReplayRequest, now: float) -> None:  # noqa: ARG002
        self._engines[request.engine].end_prefill(self._uncached.pop(request))

    def finished(self, request: ReplayRequest, now: float) -> None:  # noqa: ARG002
        self._engines[request.engine].finish()
        self._rule.released(request)

    def scraped(self, now: float) -> None: ...

    def joined(self, now: float) -> None:  # noqa: ARG002
        self._engines = self._all

    def settle(self, now: float, *, is_look: bool) -> list[Sending]:  # noqa: ARG002
        return []
