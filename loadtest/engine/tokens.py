"""Text to tokens without a vocabulary: a token is four bytes of UTF-8; a short one ends each piece of the text.

Chat markers are pieces of their own, so a conversation's next turn has the same tokens for the earlier turns, and a
text's tokens begin with those of its prefixes. A prompt is held as packed bytes, four to a token; token ids and the
keys of an answer's blocks are made on demand.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, overload

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


class OutputKeys(Sequence[int]):
    """Chain hashes that go on from the last full block of a prompt.

    `tail` are the packed prompt tokens after that block, `packed_output` packs the output's tokens from one number up
    to another. An answer that is broken off early costs no more than it had.
    """

    def __init__(
        self,
        parent_key: int,
        tail: bytes,
        packed_output: Callable[[int, int], bytes],
        *,
        output_tokens: int,
        block_size: int,
    ) -> None:
        self._parent_key = parent_key
        self._tail = tail
        self._packed_output = packed_output
        self._block_size = block_size
        self._tail_tokens = len(tail) // BYTES_PER_TOKEN
        self._length = (self._tail_tokens + output_tokens) // block_size
        self._keys: list[int] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        wanted = range(self._length)[index]
        if isinstance(wanted, range):
            self._extend(max(wanted[0], wanted[-1]) + 1 if wanted else 0)
            return [self._keys[number] for number in wanted]
        self._extend(wanted + 1)
        return self._keys[wanted]

    def _extend(self, blocks: int) -> None:
        have = len(self._keys)
        if blocks <= have:
            return
        start, stop = have * self._block_size, blocks * self._block_size
        packed = self._tail[start * BYTES_PER_TOKEN :]
        packed += self._packed_output(max(start - self._tail_tokens, 0), stop - self._tail_tokens)
        self._keys += block_keys(packed, self._block_size, self._keys[-1] if have else self._parent_key)
