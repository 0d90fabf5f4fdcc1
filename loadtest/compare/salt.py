"""Whether a proxy passes `cache_salt` on: without it, one arm would find what another left in the prefix caches."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence

from loadtest.compare.proxy import ask
from loadtest.drive.counted import hits
from loadtest.drive.target import read_counters
from loadtest.workloads.body import BodyMaker, Endpoint
from loadtest.workloads.prompts import NO_GROUP, Prompt

_WORDS = 120  # several blocks, and shorter than any engine's longest prompt


def passes_salt(engines: Sequence[str], proxy: str, endpoint: Endpoint, model: str) -> bool | None:
    """Every engine gets a prompt by itself, then one of them the same with another salt, through the proxy.

    A hit tells that the salt was lost. None where the engines cache nothing, or something does not answer.
    """
    prompt = Prompt(NO_GROUP, "", " ".join([secrets.token_hex(8)] + [f"word{number}" for number in range(_WORDS)]), 1)
    first, second = (
        BodyMaker(endpoint, model, stream=False, cache_salt=secrets.token_hex(8)).body(prompt) for _ in range(2)
    )
    try:
        for url in engines:
            ask(url + endpoint.path, first)
        before = _hits(engines)
        ask(engines[0] + endpoint.path, first)
        warm = _hits(engines)
        ask(proxy + endpoint.path, second)
        after = _hits(engines)
    except (OSError, ValueError):
        return None
    return judged(before, warm, after)


def judged(before: float, warm: float, after: float) -> bool | None:
    """Of the engines' hits before and after a repetition that must hit, and after the one with another salt."""
    return None if warm <= before else after <= warm


def _hits(engines: Sequence[str]) -> float:
    return sum(hits(_read(url)) for url in engines)


def _read(url: str) -> Mapping[str, float]:
    return asyncio.run(read_counters(f"{url}/metrics"))
