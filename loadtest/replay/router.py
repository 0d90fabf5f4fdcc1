"""What a replay asks of whoever routes, and the routers that send on arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from loadtest.replay.request import ReplayRequest
from loadtest.replay.view import EngineView

Sending = tuple[ReplayRequest, int]


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

    def settle(self, now: float, *, is_look: bool) -> list[Sending]:
        """All events of this moment are told: who may go now? `is_look`: it is time to look though nothing happened."""


class Rule(Protocol):
    """A peer's rule: which engine is best for a request at its arrival."""

    def choose(self, request: ReplayRequest, engines: Sequence[EngineView]) -> int:
        """The engine's index; the request is sent there at once."""

    def released(self, request: ReplayRequest) -> None:
        """An answer is whole, for rules that keep a record of what is active."""


class PushRouter:
    """Sends each request on arrival to where a rule says; requests wait inside the engines."""

    def __init__(self, rule: Rule, engines: Sequence[EngineView]) -> None:
        self._rule = rule
        self._engines = engines
        self._uncached: dict[ReplayRequest, int] = {}
        self.scrape_seconds = math.inf  # rules look whenever they want to

    @property
    def waiting(self) -> int:
        return 0

    def arrived(self, request: ReplayRequest, now: float) -> list[Sending]:  # noqa: ARG002
        index = self._rule.choose(request, self._engines)
        view = self._engines[index]
        view.in_flight += 1
        uncached = self._uncached[request] = view.uncached_tokens(request)
        view.prefill_tokens += uncached
        return [(request, index)]

    def first_token(self, request: ReplayRequest, now: float) -> None:  # noqa: ARG002
        self._engines[request.engine].prefill_tokens -= self._uncached.pop(request)

    def finished(self, request: ReplayRequest, now: float) -> None:  # noqa: ARG002
        self._engines[request.engine].in_flight -= 1
        self._rule.released(request)

    def scraped(self, now: float) -> None: ...

    def settle(self, now: float, *, is_look: bool) -> list[Sending]:  # noqa: ARG002
        return []
