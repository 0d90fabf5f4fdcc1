"""Vectors as they travel: backends are asked for base64, clients get what they asked for, to the last bit.

Floats are written as vLLM does: each 32-bit float as the shortest decimal of the 64-bit float of the same value.
"""

import binascii
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import orjson


class NotVectors(ValueError):
    """What should be vectors is not."""


def as_floats(vectors: list[Any]) -> list[Any]:
    """Each vector as a list of numbers, ready to be written by orjson. Raises NotVectors."""
    return [orjson.Fragment(_floats_of(vector)) if type(vector) is str else _numbers(vector) for vector in vectors]


def as_base64(vectors: list[Any]) -> list[Any]:
    """Each vector in base64. Raises NotVectors."""
    return [vector if type(vector) is str else _base64_of(vector) for vector in vectors]


def is_sound(vector: Any) -> bool:
    """Whether it is base64 of numbers, each of them finite."""
    try:
        return type(vector) is str and bool(np.isfinite(np.frombuffer(b64decode(vector, validate=True), "<f4")).all())
    except (binascii.Error, ValueError):
        return False


def _numbers(vector: list[Any]) -> list[Any]:
    if not set(map(type, vector)) <= {float, int}:
        raise NotVectors("An embedding in the backend's response is not a list of numbers.")
    return vector


def _floats_of(vector: str) -> bytes:
    try:
        floats = np.frombuffer(b64decode(vector, validate=True), "<f4").astype(np.float64)
    except (binascii.Error, ValueError) as error:
        raise NotVectors("An embedding in the backend's response is not base64 of 32-bit floats.") from error
    return orjson.dumps(floats, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64_of(vector: Any) -> str:
    try:
        return b64encode(np.array(vector, "<f4").tobytes()).decode()
    except (TypeError, ValueError) as error:
        raise NotVectors("An embedding in the backend's response is not a list of numbers.") from error
