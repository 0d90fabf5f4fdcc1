"""Token ids to prefix blocks: chained xxh3 hashes over the engine's own blocks, for prompts whose tokens are known.

The same keys come from a prompt that was tokenized here and from what an engine says it stored. They are ours: an
engine's own block hashes depend on its version and settings, and are never computed here.
"""

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

TOKEN_BYTES = 4


def token_seed(lora: str | None = None, salt: str | None = None) -> int:
    """The chain's start: what besides its tokens decides which KV cache blocks a prompt can use."""
    lora, salt = lora or "", salt or ""
    return xxh3_64_intdigest(f"{len(lora)}:{lora}{len(salt)}:{salt}".encode("utf-8", "surrogatepass"))


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit words. Raises OverflowError for what is no token id."""
    return array("I", token_ids).tobytes()


def token_keys(token_bytes: bytes, block_tokens: int, chain: int) -> tuple[int, ...]:
    """Keys of the full blocks of `packed` token ids; `chain` is a `token_seed` or the key of the block before."""
    width = block_tokens * TOKEN_BYTES
    keys = []
    for start in range(0, len(token_bytes) - width + 1, width):
        chain = xxh3_64_intdigest(token_bytes[start : start + width], chain)
        keys.append(chain)
    return tuple(keys)
