"""Data parallelism: several engines behind one server, and vLLM's own choice among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.engine.api.errors import rank_out_of_range
from loadtest.engine.choice import Choice
from loadtest.engine.engine_loop import EngineLoop, Running, TokenSink

# Waiting requests weigh more the fuller the KV cache is, from half full on.
_WAITING_WEIGHT: Final = 6.0
_PRESSED_FROM: Final = 0.5


@dataclass(frozen=True, slots=True)
class RankLoad:
    """How busy one rank is. `in_flight` counts what this server sent there and has no end of yet."""

    in_flight: int
    waiting: int
    running: int
    kv_usage: float

    @property
    def score(self) -> float:
        """vLLM's measure of load; the least one gets the next request."""
        pressure = max(0.0, self.kv_usage - _PRESSED_FROM)
        return max(self.in_flight, self.waiting + self.running) + self.waiting * _WAITING_WEIGHT * pressure


class RankBalancer:
    """Picks the least loaded rank; among equals, the search begins one further each time."""

    def __init__(self) -> None:
        self._first = 0

    def choose(self, loads: Sequence[RankLoad]) -> int:
        """The number of the rank for the next request."""
        count = len(loads)
        first, self._first = self._first, (self._first + 1) % count
        return min(((first + step) % count for step in range(count)), key=lambda rank: loads[rank].score)


class EngineRanks:
    """The engines of one server, in the order of their ranks."""

    def __init__(self, ranks: Sequence[EngineLoop], new_id: Callable[[], int]) -> None:
        self.ranks = ranks
        self.new_id = new_id
        # Requests refused because too many were queued.
        self.rejected = 0
        self._balancer = RankBalancer()

    @property
    def num_requests(self) -> int:
        """Sequences that have not ended, on all ranks."""
        return sum(rank.num_requests for rank in self.ranks)

    def submit(self, choice: Choice, sink: TokenSink, wants_every_token: bool) -> Running:
        """Queue an answer on the rank that it asks for, else on the least loaded; ApiError if there is no such rank."""
        rank = self.ranks[self._rank_for(choice)]
        if choice.limit_tokens is not None:
            rank.stats.on_asked(choice.first_of, choice.limit_tokens)
        return rank.submit(choice.sequence, sink, wants_every_token, choice.finish_reason)

    def abort(self, running: Running) -> None:
        """Take a sequence out at once; nothing happens if it has ended."""
        running.loop.abort(running)

    def fail_all(self, failure: Exception) -> None:
        """The engines die: everyone who waits for tokens is told."""
        for rank in self.ranks:
            rank.fail_all(failure)

    def pause(self, paused: bool) -> None:
        """Stop or resume stepping, as hung engines would."""
        for rank in self.ranks:
            rank.pause(paused)

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks, on the ranks where no sequence holds any."""
        for rank in self.ranks:
            rank.scheduler.reset_prefix_cache()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def _rank_for(self, choice: Choice) -> int:
        wanted = choice.rank
        if wanted is None:
            return self._balancer.choose([_load(rank) for rank in self.ranks])
        if not 0 <= wanted < len(self.ranks):
            raise rank_out_of_range(wanted, len(self.ranks))
        return wanted


def _load(rank: EngineLoop) -> RankLoad:
    scheduler = rank.scheduler
    usage = scheduler.pool.num_used / scheduler.pool.num_blocks
    return RankLoad(rank.num_requests, scheduler.num_waiting, scheduler.num_running, usage)
