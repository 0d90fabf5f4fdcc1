"""One sequence in the engine: what was asked, and how far it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from loadtest.engine.block_content import BlockContent


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()
    ABORTED = auto()


def _no_keys() -> Sequence[int]:
    return ()


@dataclass(slots=True, eq=False)
class SequenceState:
    """What the scheduler knows of a sequence. Times are in engine seconds.

    `prompt_keys` are the chain hashes of the prompt's full blocks, `output_keys` gives those of the blocks that begin
    after them, up to the last computed token. `output_tokens` is 0 for a pooling request, which ends with its prefill.
    """

    sequence_id: int
    prompt_tokens: int
    output_tokens: int
    prompt_keys: Sequence[int] = ()
    output_keys: Callable[[], Sequence[int]] = _no_keys
    arrived_seconds: float = 0.0

    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    # How many of its blocks, from the first on, can be found by key.
    registered_blocks: int = 0
    # What KV events tell of the blocks; None where nobody is told.
    content: BlockContent | None = None
    computed_tokens: int = 0
    # Tokens generated before the present stretch of decoding: not zero after a preemption.
    earlier_generated_tokens: int = 0
    # The engine's count of decode steps when this sequence entered decoding, and when it will end.
    decode_since: int = 0
    decode_until: int = 0
    # Prompt tokens found in the prefix cache, and those this sequence added to it.
    cached_tokens: int = 0
    created_cache_tokens: int = 0
    preemptions: int = 0
    # What it had computed when it was last preempted, until it runs again; and what it had to compute twice so far.
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    scheduled_seconds: float = -1.0
    first_token_seconds: float = -1.0
    finished_seconds: float = -1.0

    @property
    def prefill_target_tokens(self) -> int:
        """Tokens that must be computed before the next token can be sampled."""
        return self.prompt_tokens + self.earlier_generated_tokens

    def keys(self, first_block: int, upto_block: int) -> Sequence[int]:
        """The keys of its blocks from `first_block` up to `upto_block`, as far as there are any."""
        prompt_keys = self.prompt_keys
        prompt_blocks = len(prompt_keys)
        if upto_block <= prompt_blocks:
            return prompt_keys[first_block:upto_block]
        outputs = self.output_keys()
        if first_block >= prompt_blocks:
            return outputs[first_block - prompt_blocks : upto_block - prompt_blocks]
        return [*prompt_keys[first_block:], *outputs[: upto_block - prompt_blocks]]
