"""What a sequence's KV blocks hold, as KV events tell it: token ids, adapter, cache salt."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.engine.tokens import BYTES_PER_TOKEN, TokenisedText


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """The tokens of a sequence, and what tells its blocks from others with the same tokens."""

    prompt: TokenisedText
    # The output's tokens from one number up to another, packed.
    packed_output: Callable[[int, int], bytes]
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    # The client asked to be told of blocks that were found in the cache, too.
    reports_hits: bool = False

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The ids of the tokens from `start` up to `stop`, prompt and output counted through."""
        prompt_tokens = self.prompt.num_tokens
        packed = self.prompt.packed[start * BYTES_PER_TOKEN : stop * BYTES_PER_TOKEN]
        if stop > prompt_tokens:
            packed += self.packed_output(max(start - prompt_tokens, 0), stop - prompt_tokens)
        return array("I", packed).tolist()

    def extra_keys(self, first_block: int, num_blocks: int) -> list[tuple[str, ...] | None]:
        """What else the hash of each block covers: the adapter always, the cache salt in the first block."""
        lora = () if self.lora_name is None else (self.lora_name,)
        keys: list[tuple[str, ...] | None] = [lora or None] * num_blocks
        if first_block == 0 and num_blocks and self.cache_salt:
            keys[0] = (*lora, self.cache_salt)
        return keys
