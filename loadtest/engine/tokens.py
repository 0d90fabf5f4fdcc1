"""Text to tokens without a vocabulary: a token is four bytes of UTF-8, a short one ends each piece of the text.

Chat markers are pieces of their own, so a conversation's next turn has the same tokens for what was said before, and a
text's tokens begin with those of its prefixes. A prompt is held as packed bytes, four to a token; ids are made on
demand.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

BYTES_PER_TOKEN: Final = 4
_MARKER: Final = re.compile(rb"(<\|im_start\|>[^\n<]{0,64}\n|<\|im_end\|>\n?)")


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """A prompt: its tokens as little-endian 32-bit words."""

    packed: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // BYTES_PER_TOKEN

    def ids(self) -> list[int]:
        return array("I", self.packed).tolist()

    def text(self) -> str:
        """The text the tokens stand for."""
        return detokenise(self.packed)


def tokenise(text: str) -> TokenisedText:
    raw = text.encode("utf-8", "surrogatepass")
    if b"<|im_" not in raw:
        return TokenisedText(_pad(raw))
    return TokenisedText(b"".join(_pad(piece) for piece in _MARKER.split(raw)))


def from_ids(ids: Sequence[int]) -> TokenisedText:
    """The prompt that a client gave as token ids; OverflowError if one is out of the vocabulary."""
    return TokenisedText(array("I", ids).tobytes())


def detokenise(packed: bytes) -> str:
    return packed.replace(b"\0", b"").decode("utf-8", "replace")


def _pad(piece: bytes) -> bytes:
    return piece + b"\0" * (-len(piece) % BYTES_PER_TOKEN)


def namespace(*parts: str) -> int:
    """The parent key of a first block: prompts of different models, adapters or cache salts share nothing."""
    return xxhash.xxh3_64_intdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def block_keys(packed: bytes, block_size: int, parent_key: int) -> list[int]:
    """Chain hashes of the full blocks of a prompt: each depends on its own tokens and all before."""
    width = block_size * BYTES_PER_TOKEN
    keys: list[int] = []
    digest, key = xxhash.xxh3_64_intdigest, parent_key
    for start in range(0, len(packed) - width + 1, width):
        key = digest(packed[start : start + width], key)
        keys.append(key)
    return keys


def render_chat(messages: Iterable[tuple[str, str]], add_generation_prompt: bool = True) -> str:
    """The chat template: (role, content) pairs to the prompt's text."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return turns + "<|im_start|>assistant\n" if add_generation_prompt else turns
