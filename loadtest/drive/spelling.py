"""How values of options are written on the command line: loads, targets, pages, bounds, shares. Pure.

Each reads a text and raises ValueError with what is wrong and an example.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from loadtest.drive.target import base_url
from loadtest.workloads.prompts import Endpoint, WorkloadKind

_OF_A_MIX = [*Endpoint, *(kind for kind in WorkloadKind if kind not in (WorkloadKind.TRACE, WorkloadKind.BODIES))]


@dataclass(frozen=True, slots=True)
class Load:
    """How much is sent: its name in tables and folders, and the plan's fields that say it."""

    label: str
    fields: dict[str, Any]


def loads_of(concurrency: str | None, rate: str | None, trace_speed: float, ramp_seconds: float | None) -> list[Load]:
    """Each value between commas of whichever is given; the trace's own times where none is."""
    if concurrency is not None:
        such_as = "a whole number from 1 such as 64, a ramp such as 4:64, or several such as 8,16,32"
        loads = [
            _load("c", part, "concurrency", ramp_seconds=ramp_seconds, such_as=such_as)
            for part in concurrency.split(",")
        ]
    elif rate is not None:
        such_as = "a number above 0 such as 20, a ramp such as 5:50, or several such as 5,10,20"
        loads = [
            _load("r", part, "rate_per_second", ramp_seconds=ramp_seconds, such_as=such_as) for part in rate.split(",")
        ]
    else:
        loads = [Load("trace", {"trace_speed": trace_speed})]
    if len({load.label for load in loads}) < len(loads):
        raise ValueError("--concurrency and --rate: each value once; see --repeat")
    return loads


def _load(letter: str, text: str, field: str, ramp_seconds: float | None, such_as: str) -> Load:
    number: type[float] = int if letter == "c" else float
    first, colon, last = text.strip().rpartition(":")
    complaint = f"-{letter} {text}: give {such_as}"
    try:
        values = (number(first) if colon else None), number(last)
    except ValueError:
        raise ValueError(complaint) from None
    if not (all(map(math.isfinite, (values[0] or 0, values[1]))) and values[1] > 0 and (values[0] or 0) >= 0):
        raise ValueError(complaint)
    label = letter + text.strip().replace(":", "-")
    if not colon:
        return Load(label, {field: values[1]})
    if ramp_seconds is None or ramp_seconds <= 0:
        raise ValueError("a load from A to B needs --ramp or --duration, above 0")
    return Load(label, {field: values[1], f"first_{field}": values[0], "ramp_seconds": ramp_seconds})


def targets_of(url: str | None, targets: str | None) -> dict[str, str]:
    """Base URLs by name: NAME=URL between commas, or the single one."""
    if (url is None) == (targets is None):
        raise ValueError("give a URL, or several as --targets direct=URL,gateway=URL")
    if targets is None:
        return {"": base_url(url or "")}
    found: dict[str, str] = {}
    for part in targets.split(","):
        name, _, target = part.strip().partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not target or name in found:
            raise ValueError(
                f"--targets: {part!r} is not NAME=URL with a name of its own, such as gateway=http://host:8080"
            )
        found[name] = base_url(target)
    return found


def pages_of(text: str) -> dict[str, str]:
    """URLs by name; one without a name is called by its host and port."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, url = part.partition("=")
        if not equals or "://" in name:
            name, url = "", part
        url = url if "://" in url else f"http://{url}"
        found[name or urlsplit(url).netloc] = url
    return found


def slo_of(text: str | None) -> dict[str, float]:
    """ttft, tpot, e2e in seconds, p, the share that must keep them, and gpu in percent, by their names as bounds."""
    fields = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "p": "attainment", "gpu": "gpu_percent"}
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text else []:
        name, _, value = part.strip().partition("=")
        try:
            found[fields[name]] = float(value) * (1 if name in ("p", "gpu") else 1e3)
        except (KeyError, ValueError):
            hint = "give ttft=, tpot=, e2e= in seconds (ttft=0.5), p= as a share (p=0.95), gpu= in percent (gpu=85)"
            raise ValueError(f"--slo: {part!r}: {hint}") from None
    if not all(math.isfinite(value) and value > 0 for value in found.values()) or found.get("attainment", 0.5) > 1:
        raise ValueError("--slo: times are above 0, and p is above 0 and at most 1")
    if found.get("gpu_percent", 1) > 100:
        raise ValueError("--slo: gpu is in percent, such as gpu=85")
    if found and found.keys() == {"attainment"}:
        raise ValueError("--slo: give a bound as well, such as ttft=0.5")
    return found


def until_of(text: str | None) -> float | None:
    """Percent, as the share that a confidence interval may reach to either side."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise ValueError(f"--until {text}: give a percentage between 0 and 100, such as 3%")
    return share


def bounds_of(text: str, option: str) -> tuple[int, int]:
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
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("--extra-body must be a JSON object")
    return value
