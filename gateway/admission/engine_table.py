"""The engines as placement knows them, and which of them may take a request."""

from collections.abc import Callable, Sequence

from gateway.admission.candidate import Candidate
from gateway.admission.capacity import Capacity
from gateway.errors import InvalidRequest, ModelNotFound, NoBackend
from gateway.request import Ask
from gateway.routing.seat import Seat


class EngineTable:
    """Owner of the seats: `seats` by number, every one that was ever considered; `views` by model, until the fleet
    changes."""

    def __init__(self, serving: Callable[[str], Sequence[Candidate] | None], room: Capacity) -> None:
        self.seats: dict[int, Seat] = {}
        self.views: dict[str, list[Seat]] = {}
        self._serving = serving
        self._room = room

    def is_served(self, ask: Ask, now: float, avoid: frozenset[str] = frozenset()) -> bool:
        """Whether some backend can serve this request now or when it is its turn."""
        try:
            return bool(self.candidates(ask, now, avoid))
        except (NoBackend, ModelNotFound):
            return False

    def may_be_served(self, model: str, now: float) -> bool:
        """Whether an engine serves the model now, or nobody ever will."""
        try:
            return bool(self.views.get(model) or self.view(model, now))
        except ModelNotFound:
            return True

    def follow_limits(self, now: float) -> None:
        """Limits have moved; nothing else about the fleet has changed."""
        for model in self.views:
            for backend in self._serving(model) or ():
                self._seat(backend, now)

    def candidates(self, ask: Ask, now: float, avoid: frozenset[str]) -> list[Seat]:
        """The seats of the backends that may take this request. Raises ModelNotFound or NoBackend."""
        seats = self.views.get(ask.model)
        if seats is None:
            seats = self.view(ask.model, now)
        if ask.pinned is not None:
            seats = [seat for seat in seats if seat.name == ask.pinned]
        if ask.sequences > 1 and not all(self._room.is_large_enough(seat, ask) for seat in seats):
            seats = [seat for seat in seats if self._room.is_large_enough(seat, ask)] or seats
        if avoid and ask.pinned is None:
            seats = [seat for seat in seats if seat.name not in avoid] or seats
        if ask.rank is not None:
            seats = [seat for seat in seats if seat.rank == ask.rank] or seats  # one without ranks ignores the wish
        if not seats:
            raise NoBackend(f"No backend for model {ask.model!r} is available.", retry_after_seconds=2.0)
        return seats

    def view(self, model: str, now: float) -> list[Seat]:
        """The seats of a model, looked at anew. Raises ModelNotFound."""
        backends = self._serving(model)
        if backends is None:
            raise ModelNotFound(
                f"The model {model!r} does not exist. GET /v1/models lists the available models.", param="model"
            )
        seats = [self._seat(backend, now) for backend in backends]
        if seats:  # names that clients make up are not kept
            self.views[model] = seats
        return seats

    def _seat(self, backend: Candidate, now: float) -> Seat:
        seat = self.seats.get(backend.index)
        if seat is None:
            seat = Seat(backend.index, backend.name, backend.rank, slowness=backend.speed**0.5)
            self.seats[backend.index] = seat
        seat.cap = backend.cap
        seat.resize(backend.limit(now), backend.kv_cache_tokens)
        seat.block_tokens = backend.block_tokens
        seat.caches_prefixes = backend.caches_prefixes
        ledger = self._room.ledgers[seat.index]
        ledger.block_tokens, ledger.shares = seat.block_tokens, seat.caches_prefixes
        return seat

    def refuse_what_never_fits(self, ask: Ask, seats: Sequence[Seat]) -> None:
        """Raises InvalidRequest if none of these could run it, even if nothing else ran there."""
        if not any(self._room.is_large_enough(seat, ask) for seat in seats):
            largest = max(seat.cap for seat in seats)
            raise InvalidRequest(
                f"This request needs {ask.sequences} sequences (n x prompts); the limit of the backends for model"
                f" {ask.model!r} is {largest}. Send fewer per request.",
                param="n",
            )
