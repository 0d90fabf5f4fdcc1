"""Filler text with the byte-per-token ratio of English prose, cut cheaply at any length."""

from __future__ import annotations

import random

_PROSE = (
    "the of and to in is that it was for on are as with they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before also around another came come work three word must because does part even place well "
    "such here take why things help put years different away again off went old number great tell men say small "
    "every found still between name should home big give air line set own under read last never us left end along "
    "while might next sound below saw something thought both few those always looked show large often together asked "
    "house world going want school important until form food keep children feet land side without boy once animals "
    "life enough took sometimes four head above kind began almost live page got earth need far hand high year mother "
    "light parts country father let night following picture being study second eyes soon times story boys since "
    "white days ever paper hard near sentence better best across during today others however sure means knew try told"
)

_CORPUS_BYTES = 1 << 18


class Corpus:
    """A fixed stretch of prose; a slice costs one copy, so a long prompt costs no per-word work while driving."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"corpus-{seed}")
        words = rng.choices(_PROSE.split(), k=_CORPUS_BYTES // 5)
        self._text = " ".join(words)

    def slice(self, rng: random.Random, length_bytes: int) -> str:
        """`length_bytes` of prose from a random place; wraps round, so any length can be had."""
        start = rng.randrange(len(self._text))
        piece = self._text[start : start + length_bytes]
        while len(piece) < length_bytes:
            piece += self._text[: length_bytes - len(piece)]
        return piece
