"""How values of several parts are written on the command line. What cannot be read raises ValueError and says why."""

from __future__ import annotations

import math
from typing import Any

import orjson

from loadtest.workloads.body import Endpoint
from loadtest.workloads.spec import WorkloadKind

_OF_A_MIX = [*Endpoint, *(kind for kind in WorkloadKind if kind is not WorkloadKind.TRACE)]


def ramp_of(text: str, number: type[float], option: str, such_as: str) -> tuple[float | None, float]:
    """What a load begins with, if it changes, and what it ends with. Raises ValueError."""
    first, colon, last = text.rpartition(":")
    try:
        values = (number(first) if colon else None), number(last)
    except ValueError:
        raise ValueError(f"{option} {text}: give {such_as}") from None
    if not (all(map(math.isfinite, (values[0] or 0, values[1]))) and values[1] > 0 and (values[0] or 0) >= 0):
        raise ValueError(f"{option} {text}: give {such_as}")
    return values


def bounds_of(text: str, option: str) -> tuple[int, int]:
    """N, or LOW:HIGH."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{option} {text}: give a whole number from 1 such as 4, or LOW:HIGH such as 2:6")
    return bounds


def shares_of(text: str) -> list[tuple[str, float]]:
    """NAME=SHARE between commas; the shares need not add up to 1."""
    found: list[tuple[str, float]] = []
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in _OF_A_MIX:
            raise ValueError(f"--mix: {name!r} is none of {', '.join(_OF_A_MIX)}")
        try:
            found.append((name, float(share)))
        except ValueError:
            raise ValueError(f"--mix: {part!r} is not NAME=SHARE, such as chat=0.8") from None
    if any(share <= 0 for _, share in found) or len({name for name, _ in found}) < len(found):
        raise ValueError("--mix: shares are above 0, and each name occurs once")
    return found


def json_object(text: str) -> dict[str, Any]:
    """The value of --extra-body."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("--extra-body must be a JSON object")
    return value
