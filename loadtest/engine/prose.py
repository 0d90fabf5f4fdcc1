"""What the engine says: words that depend on the prompt only, each exactly one token long."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.engine.tokens import BYTES_PER_TOKEN

# Three letters a word: with the space before it, a token.
_LETTERS: Final = (
    "theandforyouanycanhadherwasoneouroutdaygethashimhishowmannewnowoldseetwowaywho"
    "boydiditsletputsayshetoousesunskyseaiceoakelmfoxowlcatdoghenbeeantairfogmuddew"
    "logmappeninkcupjarkeyboxbaghatcapnetrod"
)
_WORDS: Final = tuple(" " + _LETTERS[i : i + 3] for i in range(0, len(_LETTERS), 3))
_NONCE: Final = re.compile(r"nonce:([A-Za-z0-9_-]{1,64})")
_MULTIPLIER: Final = 0x9E3779B97F4A7C15


def find_nonce(prompt: str) -> str | None:
    """The last `nonce:<word>` in the prompt: the answer repeats it, so a client can prove that it is its own."""
    found = None
    for found in _NONCE.finditer(prompt):  # noqa: B007
        pass
    return found.group(1) if found else None


@dataclass(frozen=True, slots=True)
class Prose:
    """The answer to one prompt, token by token."""

    seed: int
    opening: Sequence[str] = ()

    @classmethod
    def of(cls, seed: int, nonce: str | None, max_tokens: int) -> "Prose":
        """An answer that begins with the nonce, in as many tokens as there are at most."""
        if nonce is None or max_tokens < 1:
            return cls(seed)
        text = f"nonce:{nonce}"
        pieces = [text[i : i + BYTES_PER_TOKEN] for i in range(0, len(text), BYTES_PER_TOKEN)]
        if len(pieces) > max_tokens:
            pieces[max_tokens - 1 :] = ["".join(pieces[max_tokens - 1 :])]
        return cls(seed, tuple(pieces))

    def token(self, index: int) -> str:
        """The text of the answer's token number `index`."""
        opening = self.opening
        if index < len(opening):
            return opening[index]
        mixed = (self.seed ^ (index * _MULTIPLIER)) * _MULTIPLIER
        return _WORDS[(mixed >> 40) % len(_WORDS)]

    def text(self, start: int, stop: int) -> str:
        """The text of the tokens from `start` up to `stop`."""
        token = self.token
        return "".join([token(index) for index in range(start, stop)])

    def packed(self, start: int, stop: int) -> bytes:
        """The tokens from `start` up to `stop` as the tokeniser would pack them."""
        width = BYTES_PER_TOKEN
        return b"".join(self.token(i).encode()[:width].ljust(width, b"\0") for i in range(start, stop))
