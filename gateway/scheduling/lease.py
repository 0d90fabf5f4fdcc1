"""What a request holds of its engine, from its placement to the last byte."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.request import Demand, UpstreamResult, Usage
from gateway.routing.engine import Engine
from gateway.routing.estimates import Calibration
from gateway.routing.kv_reservations import Reservation
from gateway.scheduling.admission import slots_of
from gateway.scheduling.fair_share import Tenant, Tenants


class Lease(Reservation):
    """A request bound to an engine, with all that it holds until it is released. In the gateway, a `with` block that
    ends at the last byte releases it."""

    __slots__ = (
        "_first_token", "_release", "answered", "backend", "calibration", "charged_tokens", "client_was_slow", "engine",
        "engine_index", "first_token_seconds", "hit_tokens", "on_release", "paced_tokens", "predicted_seconds", "rank",
        "served_tokens", "tenant", "tenants", "uncached_tokens", "waited_seconds",
    )  # fmt: skip
    _first_token: "Callable[[Lease], None]"
    _release: "Callable[[Lease], None]"

    def __init__(
        self,
        demand: Demand,
        engine: Engine,
        prefill_seconds: float,
        hit_tokens: int,
        tenants: Tenants,
        tenant: Tenant,
        calibration: Calibration,
        waited_seconds: float,
    ) -> None:
        sequences = slots_of(demand, engine) if demand.divisible else demand.sequences
        super().__init__(demand, sequences, prefill_seconds)
        self.engine = engine
        self.backend = engine.name
        self.engine_index = engine.index
        self.rank = engine.rank  # of the engine, if the backend runs several
        self.hit_tokens = hit_tokens  # prompt tokens predicted to be cached there
        self.uncached_tokens = max(0, demand.prompt_tokens - hit_tokens)
        self.tenants = tenants
        self.tenant = tenant
        self.calibration = calibration
        self.predicted_seconds = prefill_seconds + engine.terms(calibration.model).step  # to its first token, if alone
        self.charged_tokens = 0.0  # to the tenant's share
        self.waited_seconds = waited_seconds
        self.first_token_seconds: float | None = None  # by the broker's clock
        self.answered = False  # the response was complete
        self.client_was_slow = False
        self.paced_tokens = 0  # of a stream's sequence: the time that they took is the engine's alone
        self.served_tokens: int | None = None  # uncached prompt and output, as reported; None = as expected
        self.on_release: Callable[[Lease], None] | None = None  # of the lower queue that it is from

    def when_released(self, call: "Callable[[Lease], None]") -> None:
        """Call this at its release, when the engine is free of it, and before anything is learned from it."""
        self.on_release = call

    def hand_out(self, first_token: "Callable[[Lease], None]", release: "Callable[[Lease], None]") -> Self:
        """Set what to call at its first token, and when its block ends."""
        self._first_token, self._release = first_token, release
        return self

    def on_first_token(self) -> None:
        """The first token arrived: the prefill is over."""
        self._first_token(self)

    def on_tokens(self, tokens: int) -> int:
        """More tokens of a stream arrived; more than expected reserve more of the engine's KV cache.

        Returns how many more may come before the next report.
        """
        if not self.released:
            self.engine.load.on_tokens(tokens)
        return self.engine.kv.on_tokens(self, tokens)

    def on_answer(self, answer: UpstreamResult) -> None:
        self.answered = answer.status == 200
        self.client_was_slow = answer.client_was_slow
        if self.first_token_seconds is None:
            self.first_token_seconds = answer.first_byte_seconds

    def on_usage(self, usage: Usage) -> None:
        """The backend reported its work: the tenant is charged the uncached prompt and the output."""
        if self.streamed_tokens:
            self.engine.kv.on_usage(self, usage.completion_tokens)
            if not self.client_was_slow:
                self.paced_tokens = usage.completion_tokens // max(1, self.sequences)
        cached = self.hit_tokens if usage.cached_tokens is None else usage.cached_tokens
        self.served_tokens = max(0, usage.prompt_tokens - cached) + usage.completion_tokens

    def on_failure(self) -> None:
        """Work that a backend lost is not charged to the tenant."""
        self.served_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self)
