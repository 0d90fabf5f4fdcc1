"""Encodes a text piece by piece, so that what was encoded before is looked up.

A tokenizer cuts a text at its added tokens before all else. A text that is cut there, each piece beginning with such a
token, has the same ids piece by piece as it has whole; a conversation's next turn is then the only piece that is new.
"""

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Encode = Callable[[list[str]], list[bytes]]
_ENTRY_BYTES = 200  # what an entry takes besides its text and its ids


class AddedToken(NamedTuple):
    """A text that is one token wherever it stands, and what of its surroundings it heeds."""

    content: str
    heeds_left: bool = False  # eats white space before it, or must not touch a word
    normalized: bool = False  # looked for in the normalized text


def cut_marks(tokens: Sequence[AddedToken], rendered: Iterable[str]) -> tuple[str, ...]:
    """The added tokens before which a text may be cut; of the many that some models have, those in use."""
    every = [token.content for token in tokens if token.content]
    texts = list(rendered)
    return tuple(
        token.content
        for token in tokens
        if token.content
        and not token.heeds_left
        and not token.normalized
        and any(token.content in text for text in texts)
        and not any(_hides(other, token.content) for other in every)
    )


def _hides(other: str, token: str) -> bool:
    """Whether finding `other` can keep `token` from being found where it stands."""
    if other == token:
        overlaps = range(1, len(token))
        return any(token.startswith(token[-length:]) for length in overlaps)
    if token in other:
        return True
    return any(token.startswith(other[-length:]) for length in range(1, min(len(other), len(token))))


class Segments:
    """The ids of texts, with a memory of pieces that is bounded in bytes; the least recently used goes first."""

    def __init__(self, encode: Encode, marks: Sequence[str], capacity_bytes: int) -> None:
        self.seen = 0
        self.cached = 0
        self.used_bytes = 0
        self._encode = encode
        self._cut = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._capacity_bytes = capacity_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()

    def tokens(self, text: str) -> bytes:
        """The packed ids of a text."""
        pieces = self._pieces(text)
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._known]
        fresh = dict(zip(new, self._encode(new), strict=True)) if new else {}
        self.seen += len(pieces)
        self.cached += len(pieces) - len(new)
        found = []
        for piece in pieces:
            ids = fresh.get(piece)
            if ids is None:
                ids = self._known[piece]
                self._known.move_to_end(piece)
            found.append(ids)
        self._remember(fresh)
        return b"".join(found)

    def _pieces(self, text: str) -> Sequence[str]:
        if self._cut is None:
            return (text,)
        edges = [0, *(match.start() for match in self._cut.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(edges) if start < end]

    def _remember(self, fresh: dict[str, bytes]) -> None:
        for piece, ids in fresh.items():
            self._known[piece] = ids
            self.used_bytes += _size(piece, ids)
        while self.used_bytes > self._capacity_bytes:
            self.used_bytes -= _size(*self._known.popitem(last=False))


def _size(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + len(ids) + _ENTRY_BYTES
