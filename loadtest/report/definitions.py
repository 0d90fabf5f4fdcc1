"""Versions of what figures mean, so that files of different versions are not compared as if they meant the same."""

from __future__ import annotations

from collections.abc import Mapping

# By path in results.json; a path covers everything below it. A figure whose definition changes gets a new version here.
DEFINITIONS = {
    "requests": 1,
    "overall": 1,
    "steady": 1,
    "tokens": 1,
    "latency": 1,
    "streaming": 1,
    "stalls": 1,
    "concurrency": 1,
    "routing": 1,
    "parts": 1,
    "client": 1,
    "timeline": 1,
    # 2: an answer of several tokens without a measured TPOT misses a bound on TPOT; 1: it kept the bound.
    "slo": 2,
    # 2: as above, and over the same stretch of the run as requests/s; 1: over the whole run.
    "slo.goodput_per_second": 2,
    # 2: half of ITL p50 bounds the client's lag too; one stall is not a rate above capacity.
    "verdict": 2,
}
_FIRST = 1


def redefined(path: str, before: Mapping[str, int], after: Mapping[str, int] = DEFINITIONS) -> tuple[int, int] | None:
    """Both versions of the figure at a path of results.json; None where they are the same.

    A file without any versions has the first ones.
    """
    place = path.partition("[")[0]
    one, other = _version(place, before), _version(place, after)
    return None if one == other else (one, other)


def _version(path: str, versions: Mapping[str, int]) -> int:
    """Of the nearest path at or above it that has one."""
    while path:
        if path in versions:
            return versions[path]
        path = path.rpartition(".")[0]
    return _FIRST
