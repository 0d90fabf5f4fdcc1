"""The engine's KV cache: blocks with reference counts, an LRU list of free blocks, the index of cached prefixes."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import Protocol

from loadtest.engine.tokens import BYTES_PER_TOKEN, TokenisedText


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """The tokens of a sequence, and the other inputs of its blocks' hashes."""

    prompt: TokenisedText
    # The output's tokens from one number up to another, packed.
    packed_output: Callable[[int, int], bytes]
    _: KW_ONLY
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    # The client also requested events of blocks that were found in the cache.
    reports_hits: bool = False

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The ids of the tokens from `start` up to `stop`, prompt and output counted through."""
        prompt_tokens = self.prompt.num_tokens
        packed = self.prompt.packed[start * BYTES_PER_TOKEN : stop * BYTES_PER_TOKEN]
        if stop > prompt_tokens:
            packed += self.packed_output(max(start - prompt_tokens, 0), stop - prompt_tokens)
        return array("I", packed).tolist()

    def extra_keys(self, first_block: int, num_blocks: int) -> list[tuple[str, ...] | None]:
        """Further inputs of each block's hash: the adapter always, the cache salt in the first block."""
        lora = () if self.lora_name is None else (self.lora_name,)
        keys: list[tuple[str, ...] | None] = [lora or None] * num_blocks
        if first_block == 0 and num_blocks and self.cache_salt:
            keys[0] = (*lora, self.cache_salt)
        return keys


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
    """The scheduler's state of a sequence. Times are in engine seconds.

    `prompt_keys` are the chain hashes of the prompt's full blocks, `output_keys` gives the hashes of the blocks after
    them, up to the last computed token. `output_tokens` is 0 for a pooling request, which ends with its prefill.
    """

    sequence_id: int
    prompt_tokens: int
    output_tokens: int
    _: KW_ONLY
    prompt_keys: Sequence[int] = ()
    output_keys: Callable[[], Sequence[int]] = _no_keys
    arrived_seconds: float = 0.0

    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    # How many of its blocks, from the first on, can be found by key.
    registered_blocks: int = 0
    # Contents of the blocks for KV events; None without events.
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
    # Computed tokens at the last preemption, until it runs again; and the tokens computed twice so far.
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    scheduled_seconds: float = -1.0
    first_token_seconds: float = -1.0
    finished_seconds: float = -1.0

    @property
    def prefill_target_tokens(self) -> int:
        """Tokens that must be computed before the next token can be sampled."""
        return self.prompt_tokens + self.earlier_generated_tokens

    def publish(self, content: BlockContent) -> None:
        self.content = content

    def arrive(self, now_seconds: float) -> None:
        self.arrived_seconds = now_seconds

    def admit(self, blocks: list[int], hit_blocks: int, block_size: int, now_seconds: float) -> int:
        """Into the batch, its first blocks found in the cache. Tokens that it computes again after a preemption."""
        self.state = State.PREFILLING
        self.blocks = blocks
        self.registered_blocks = hit_blocks
        self.computed_tokens = hit_blocks * block_size
        if self.scheduled_seconds < 0:
            self.scheduled_seconds = now_seconds
            self.cached_tokens = self.computed_tokens
        again = max(0, self.lost_tokens - self.computed_tokens)
        self.recomputed_tokens += again
        self.lost_tokens = 0
        return again

    def prefill(self, tokens: int) -> bool:
        """So many more are computed; whether the prompt is."""
        self.computed_tokens += tokens
        return self.computed_tokens == self.prefill_target_tokens

    def sample_first(self, now_seconds: float, cacheable_tokens: int) -> None:
        """The prompt is computed, and a token sampled, if it has any."""
        if self.first_token_seconds < 0:
            self.first_token_seconds = now_seconds
            self.created_cache_tokens = max(0, cacheable_tokens - self.cached_tokens)
        if self.output_tokens:
            self.earlier_generated_tokens += 1

    def decode(self, clock: int) -> None:
        """From this step of the engine on, until all of its output is there."""
        self.state = State.DECODING
        self.decode_since = clock
        self.decode_until = clock + self.output_tokens - self.earlier_generated_tokens

    def stop_decoding(self, clock: int) -> None:
        decoded = clock - self.decode_since
        self.computed_tokens += decoded
        self.earlier_generated_tokens += decoded

    def preempt(self) -> None:
        """Back to the queue; all that it computed is lost."""
        self.lost_tokens = self.computed_tokens
        self.computed_tokens = 0
        self.state = State.WAITING
        self.preemptions += 1

    def end(self, state: State, now_seconds: float = -1.0) -> None:
        self.state = state
        self.finished_seconds = now_seconds

    def grow(self, blocks: list[int]) -> None:
        self.blocks += blocks

    def register(self, upto_block: int) -> None:
        """Its blocks before this number can be found by key."""
        self.registered_blocks = upto_block

    def give_up_blocks(self) -> list[int]:
        blocks, self.blocks = self.blocks, []
        return blocks

    def keys(self, first_block: int, upto_block: int) -> Sequence[int]:
        """The existing keys of its blocks from `first_block` up to `upto_block`."""
        prompt_keys = self.prompt_keys
        prompt_blocks = len(prompt_keys)
        if upto_block <= prompt_blocks:
            return prompt_keys[first_block:upto_block]
        outputs = self.output_keys()
        if first_block >= prompt_blocks:
            return outputs[first_block - prompt_blocks : upto_block - prompt_blocks]
        return [*prompt_keys[first_block:], *outputs[: upto_block - prompt_blocks]]


class CacheObserver(Protocol):
    """Receives every change of the prefix cache, in order."""

    def on_stored(self, sequence: SequenceState, first_block: int, parent_key: int | None, keys: Sequence[int]) -> None:
        """Full blocks of a sequence, from its block number `first_block` on, can be found by `keys` from now on."""

    def on_removed(self, key: int) -> None:
        """One block with that key was overwritten; another may hold the same."""

    def on_cleared(self) -> None: ...


class BlockPool:
    """Owns every block. A block is free without references; a free block stays cached until it is reused."""

    def __init__(self, num_blocks: int, observer: CacheObserver | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._observer = observer
        self._references = [0] * num_blocks
        self._key_of: list[int | None] = [None] * num_blocks
        # The first block that got a key; further blocks with the same content, for the few keys that have any.
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        # Head: given out first. First blocks without reusable contents, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without references, cached or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """The keys that find a block."""
        return len(self._cached)

    def cached_keys(self) -> dict[int, int]:
        """The keys that find blocks, each with its number of blocks."""
        copies = self._copies
        return {key: 1 + len(copies.get(key, ())) for key in self._cached}

    def find(self, keys: Sequence[int], max_blocks: int) -> list[int]:
        """The blocks that hold the longest cached prefix of `keys`, at most `max_blocks`."""
        found: list[int] = []
        get = self._cached.get
        for key in keys[:max_blocks]:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave the free list if they were taken."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0)

    def take_cached(self, blocks: Iterable[int]) -> None:
        """Refer once more to blocks given by `find`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, least recently used first; their old content is forgotten."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        pop, references, key_of = self._free.popitem, self._references, self._key_of
        cached, copies, observer = self._cached, self._copies, self._observer
        taken = []
        for _ in range(count):
            block = pop(last=False)[0]
            taken.append(block)
            references[block] = 1
            key = key_of[block]
            if key is not None:
                key_of[block] = None
                if key in copies:
                    self._forget_copy(block, key)
                else:
                    del cached[key]
                if observer is not None:
                    observer.on_removed(key)
        return taken

    def register(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Make full blocks findable by key. The first block with a key is found until it is reused, then the next."""
        cached, copies, key_of = self._cached, self._copies, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if key in cached:
                copies.setdefault(key, []).append(block)
            else:
                cached[key] = block
                if copies:
                    copies.pop(key, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give one sequence's blocks back. Its tail is reused first, because its head is the likelier prefix."""
        references, free, key_of = self._references, self._free, self._key_of
        worthless = []
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                free[block] = None
                if key_of[block] is None:
                    worthless.append(block)
        for block in reversed(worthless):
            free.move_to_end(block, last=False)

    def reset_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if self.num_used:
            return False
        self._cached.clear()
        self._copies.clear()
        self._key_of = [None] * self.num_blocks
        if self._observer is not None:
            self._observer.on_cleared()
        return True

    def _forget_copy(self, block: int, key: int) -> None:
        """One of several blocks with the same key is about to be overwritten."""
        copies = self._copies[key]
        if self._cached[key] == block:
            self._cached[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]
