"""What is in flight on one engine, as far as the next decision needs it."""

import math
from dataclasses import dataclass

MEMORY_SECONDS = 10.0  # over which the share of time spent in prefill is averaged: about as long as an answer takes


@dataclass(slots=True, eq=False)
class Work:
    """One placed request's share of a backend's load.

    `prefill_seconds` is the predicted time of its uncached prompt, `first_token_seconds` that to its first
    token when it is alone in prefill; `observable`: its first token will be seen.
    """

    sequences: int
    prompt_tokens: int
    prefill_seconds: float
    observable: bool
    uncached_tokens: int = 0
    first_token_seconds: float = 0.0
    started_seconds: float = 0.0
    alone: bool = False  # no other request was in prefill with it


class EngineLoad:
    """Requests in flight on one backend: those still in prefill, in order, and those decoding."""

    __slots__ = (
        "_head_since",
        "_pending_seconds",
        "changes",
        "context_tokens",
        "decoding",
        "in_flight",
        "pending",
        "recent_share",
        "share_at",
        "works",
    )

    def __init__(self) -> None:
        self.changes = 0  # how often anything of this has changed
        self.in_flight = 0  # sequences
        self.decoding = 0  # sequences with a first token
        self.context_tokens = 0  # prompt tokens in flight
        self.works: set[Work] = set()  # in flight
        self.pending: dict[Work, None] = {}  # in prefill, oldest first
        self._pending_seconds = 0.0
        self._head_since = 0.0
        self.recent_share = 0.0  # of the time lately that went into prefill, as predicted when requests were sent
        self.share_at = 0.0

    def __repr__(self) -> str:
        return f"<EngineLoad {self.in_flight} in flight, {self.decoding} decoding, {self.context_tokens} tokens>"

    def start(self, work: Work, now: float) -> None:
        """A request is sent to the backend."""
        self.changes += 1
        self.works.add(work)
        self.in_flight += work.sequences
        self.context_tokens += work.prompt_tokens
        work.started_seconds = now
        if not self.pending:
            self._head_since = now
            work.alone = True
        elif len(self.pending) == 1:
            next(iter(self.pending)).alone = False
        self.pending[work] = None
        self._pending_seconds += work.prefill_seconds
        self.recent_share = self.prefill_share(now) + work.prefill_seconds / MEMORY_SECONDS
        self.share_at = now

    def first_token(self, work: Work, now: float) -> bool:
        """The request's prefill is over. Only the first call counts, and returns True."""
        if not self._leave_prefill(work):
            return False
        self.changes += 1
        self.decoding += work.sequences
        self._head_since = now
        return True

    def finish(self, work: Work, now: float) -> None:
        """The request is over, however it ended."""
        self.changes += 1
        self.works.discard(work)
        self.in_flight -= work.sequences
        self.context_tokens -= work.prompt_tokens
        was_head = bool(self.pending) and next(iter(self.pending)) is work
        if self._leave_prefill(work):
            self._head_since = now if was_head else self._head_since
        else:
            self.decoding -= work.sequences

    @property
    def prefilling(self) -> bool:
        """Some request has no first token yet."""
        return bool(self.pending)

    def prefill_ahead_seconds(self, now: float) -> float:
        """Predicted prefill time of what was sent before, less what has passed of the oldest one's."""
        while self.pending:
            head = next(iter(self.pending))
            passed, whole = now - self._head_since, head.prefill_seconds
            if head.observable or passed < whole:
                return max(0.0, self._pending_seconds - (passed if passed < whole else whole))
            self._leave_prefill(head)  # not streamed, so its first token is not seen: taken as over when predicted
            self.changes += 1
            self.decoding += head.sequences
            self._head_since += head.prefill_seconds
        return 0.0

    def prefill_share(self, now: float) -> float:
        """Share of the engine's time lately that prefills were predicted to take; above 1 if it could not keep up."""
        return self.recent_share * math.exp((self.share_at - now) / MEMORY_SECONDS)

    def _leave_prefill(self, work: Work) -> bool:
        if work not in self.pending:
            return False
        del self.pending[work]
        self._pending_seconds = self._pending_seconds - work.prefill_seconds if self.pending else 0.0
        return True
