"""A model's own tokenizer, on this machine: counts the tokens of texts, and cuts texts to a number of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_MOST_TRIES = 8
_SPARE_BYTES = 64
_MOST_STARTS = 64
_TRIED_TOKENS = (1, 2, 5, 30, 100, 300, 1000) * 2


class TokenizerError(Exception):
    """A tokenizer that cannot be loaded; the message has the remedy."""


class TokenOffsets(Protocol):
    """The tokens of a text: the beginning and end of each in it, in characters."""

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class TokenCounter:
    """Texts by their number of tokens; special tokens are not among them."""

    def __init__(self, encode: Callable[[str], TokenOffsets]) -> None:
        self._encode = encode

    def count(self, text: str) -> int:
        return len(self._encode(text).offsets)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token begins and ends, in characters."""
        return self._encode(text).offsets

    def cut(self, text_of: Callable[[int], str], bytes_per_token: float, tokens: int) -> str:
        """The beginning of a text with exactly this number of tokens; `text_of` gives that many bytes of it, or more.

        Some tokenizers cannot cut a text to every number: then it has one token more or less.
        """
        wanted_bytes = round(tokens * bytes_per_token * 1.2) + _SPARE_BYTES
        text = text_of(wanted_bytes)
        offsets = self._encode(text).offsets
        while len(offsets) <= tokens:
            wanted_bytes *= 2
            text = text_of(wanted_bytes)
            offsets = self._encode(text).offsets
        # The same letters may be other tokens where the text ends.
        place = tokens
        found = text[: offsets[place - 1][1]]
        for _ in range(_MOST_TRIES):
            off = tokens - self.count(found)
            if not off:
                break
            place = min(max(1, place + off), len(offsets))
            found = text[: offsets[place - 1][1]]
        return found


class ExactProse:
    """Texts of exact numbers of tokens out of a tokenized text: only their heads are counted.

    That holds for tokenizers that never join words, which is tried at the start; with others each text is counted.
    """

    def __init__(self, counter: TokenCounter, prose: str) -> None:
        self._counter = counter
        self._prose = prose
        offsets = counter.offsets(prose)
        self._ends = [0, *(end for _, end in offsets)]
        starts_word = [prose[end : end + 1] in (" ", "") for end in self._ends]
        self._boundaries = [place for place, is_start in enumerate(starts_word) if is_start and place]
        self._is_boundary = starts_word
        rng = random.Random("tried")
        self._adds_up = all(self._adds_up_to(rng, tokens) for tokens in _TRIED_TOKENS)

    def text(self, head: str, rng: random.Random, tokens: int) -> str | None:
        """The head and prose after it; None where it takes a count."""
        wanted = tokens - self._counter.count(head)
        return self._made(head, rng, wanted) if self._adds_up and wanted > 0 else None

    def _made(self, head: str, rng: random.Random, tokens: int) -> str | None:
        first = rng.randrange(len(self._boundaries)) if self._boundaries else 0
        for start in self._boundaries[first : first + _MOST_STARTS]:
            stop = start + tokens
            if stop < len(self._ends) and self._is_boundary[stop]:
                return head + self._prose[self._ends[start] : self._ends[stop]]
        return None

    def _adds_up_to(self, rng: random.Random, tokens: int) -> bool:
        head = f"{rng.getrandbits(48):012x} tried {tokens}:"
        made = self._made(head, rng, tokens)
        return made is None or self._counter.count(made) == tokens + self._counter.count(head)


def load_tokenizer(name: str) -> TokenCounter:
    """From a tokenizer.json, a model's folder that has one, or the hub by the model's name. Raises TokenizerError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TokenizerError("--tokenizer needs a package: pip install '.[loadtest,tokenizer]'") from None
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        made = Tokenizer.from_file(str(file)) if path.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:
        hint = "give a tokenizer.json, a folder that has one, or the name of a model"
        raise TokenizerError(f"--tokenizer {name}: {error}; {hint}") from None

    def encode(text: str) -> TokenOffsets:
        found: TokenOffsets = made.encode(text, add_special_tokens=False)
        return found

    return TokenCounter(encode)
