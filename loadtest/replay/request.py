"""One request of a replay: what is asked, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadtest.engine.sequence import SequenceState

_NEVER = -1.0


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """Times are in seconds from the replay's start; a negative one has not come.

    `keys` are of the prompt's full blocks, `answer_keys` of those that its answer completes. `following` is the
    session's next turn, sent `think_seconds` of its own after this one's end. `turn` and `turn_end` count the keys
    before and through the last answer that the prompt holds; 0 if the trace shows none.
    """

    number: int
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    answer_keys: tuple[int, ...] = ()
    think_seconds: float = 0.0
    turn: int = 0
    turn_end: int = 0
    following: ReplayRequest | None = field(default=None, repr=False)
    max_tokens: int | None = None  # as the client states it
    believed_tokens: int | None = None  # what the gateway takes its prompt for; None = what it has

    sequence: SequenceState | None = field(default=None, repr=False)  # in the engine it was sent to
    engine: int = -1
    sent_seconds: float = _NEVER
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    first_token_seconds: float = _NEVER
    finished_seconds: float = _NEVER

    @property
    def ttft_seconds(self) -> float:
        """From arrival at the gateway to the first token."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def e2e_seconds(self) -> float:
        """From arrival at the gateway to the last token."""
        return self.finished_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time between tokens after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.finished_seconds - self.first_token_seconds) / (self.output_tokens - 1)
