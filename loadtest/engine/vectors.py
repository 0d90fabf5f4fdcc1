"""Embedding vectors that depend on the text only."""

import hashlib
from array import array
from math import hypot


def unit_vector(packed_tokens: bytes, dimensions: int) -> "array[float]":
    """A vector of length 1, in 32-bit floats; equal tokens give equal vectors."""
    raw = array("h", hashlib.shake_128(packed_tokens).digest(2 * dimensions)).tolist()
    length = hypot(*raw) or 1.0
    return array("f", [value / length for value in raw])


def similarity(left: "array[float]", right: "array[float]") -> float:
    """The cosine of the angle between two unit vectors."""
    return sum(a * b for a, b in zip(left, right, strict=True))
