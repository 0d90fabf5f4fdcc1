"""Synthetic traces of regimes without recorded ones: `regime:NAME` replaces a trace file.

Lengths are lognormal: a mean, and the deviation of the logarithm. Arrivals are a Poisson process. The same name and
block size always make the same rows. Each is made at a rate near what four engines of the default size carry.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, islice
from pathlib import Path

from loadtest.workloads.trace import Row, Trace, TraceError, first_rows, read_trace

_PREFIX = "regime:"
_BLOCK_TOKENS = 64
_Keys = tuple[int, ...]


def trace_from(
    source: str, block_tokens: int | None = None, limit: int | None = None, minutes: float | None = None
) -> Trace:
    """The trace in a file, or that of `regime:NAME`. Raises TraceError."""
    if source.startswith(_PREFIX):
        return made(source.removeprefix(_PREFIX), block_tokens or _BLOCK_TOKENS, limit, minutes)
    return read_trace(Path(source), block_tokens, limit, minutes)


def made(name: str, block_tokens: int = _BLOCK_TOKENS, limit: int | None = None, minutes: float | None = None) -> Trace:
    """The rows of a regime, or the first ones. Raises TraceError."""
    if name not in _REGIMES:
        raise TraceError(f"{_PREFIX}{name}: unknown regime; there are {', '.join(REGIMES)}")
    sessions = name in _CLOSED_LOOPS
    rows = _REGIMES[name](_Prompts(name, block_tokens))
    rows.sort(key=lambda row: row.session or 0 if sessions else row.at_seconds)
    return Trace(name, list(first_rows(iter(rows), limit, minutes)), block_tokens, sessions=sessions)


class _Prompts:
    """Lots and prompts of one trace; every key that it makes is new."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self.rng = random.Random(f"regime {name}")
        self._block_tokens = block_tokens
        self._keys = count()

    def length(self, mean: float, deviation: float, least: int, most: int) -> int:
        """Tokens: lognormal, with the deviation of the logarithm, cut off at both ends."""
        drawn = self.rng.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)
        return min(most, max(least, round(drawn)))

    def arrivals(self, rate_per_second: float) -> Iterator[float]:
        """The times of a Poisson process, in seconds."""
        return accumulate(iter(lambda: self.rng.expovariate(rate_per_second), None))

    def keys(self, tokens: int, prefix: _Keys = ()) -> _Keys:
        """Of a prompt's full blocks, beginning with the keys of its opening."""
        return prefix + tuple(islice(self._keys, max(0, tokens // self._block_tokens - len(prefix))))

    def zipf(self, choices: Sequence[tuple[int, _Keys]]) -> tuple[int, _Keys]:
        """A random prefix; the n-th is drawn 1/n times as often as the first."""
        return self.rng.choices(choices, [1 / (place + 1) for place in range(len(choices))])[0]

    def prefixes(self, number: int, mean: float, deviation: float, most: int) -> list[tuple[int, _Keys]]:
        """Prompt openings: tokens, and the keys of full blocks."""
        sizes = (self.length(mean, deviation, 64, most) for _ in range(number))
        return [(tokens, self.keys(tokens)) for tokens in sizes]


def _reasoning(prompts: _Prompts) -> list[Row]:
    """Long answers: 1,200 requests of about 1,000 tokens in and 8,000 (deviation 0.6, up to 32,000) out.

    One system prompt of 256 tokens is all that they share.
    """
    rows, system = [], prompts.keys(256)
    for at in islice(prompts.arrivals(1.0), 1200):
        tokens = 256 + prompts.length(750, 0.7, 16, 8000)
        rows.append(Row(at, tokens, prompts.length(8000, 0.6, 500, 32_000), keys=prompts.keys(tokens, system)))
    return rows


def _mixed(prompts: _Prompts) -> list[Row]:
    """Uneven prompts: of 4,800 requests 2 % have 80,000 to 120,000 tokens of their own, and answers of 300.

    The others are conversations of 1 to 6 turns under one of four system prompts of 512 tokens: questions of 120 and
    answers of 200 tokens (deviation 0.8), sent 5 to 40 s after each other. Goodput stays near 90 % from 8 to 20
    requests a second on four engines, so state the capacity.
    """
    rng, systems, rows = prompts.rng, [prompts.keys(512) for _ in range(4)], list[Row]()
    starts = prompts.arrivals(5.0)
    while len(rows) < 4704:
        at, tokens, keys = next(starts), 512, rng.choice(systems)
        for _ in range(rng.randint(1, 6)):
            tokens += prompts.length(120, 0.8, 8, 2000)
            keys, answer_tokens = prompts.keys(tokens, keys), prompts.length(200, 0.8, 4, 2000)
            rows.append(Row(at, tokens, answer_tokens, keys=keys))
            tokens += answer_tokens
            at += rng.uniform(5, 40)
    span_seconds = max(row.at_seconds for row in rows)
    for _ in range(96):
        tokens = rng.randint(80_000, 120_000)
        rows.append(Row(rng.uniform(0, span_seconds), tokens, 300, keys=prompts.keys(tokens)))
    return rows


def _tools(prompts: _Prompts) -> list[Row]:
    """Tool calls in bursts: 5,000 requests of many agents on 16 templates (Zipf), tool definitions of 6,000 tokens.

    Each has 300 tokens of its own (deviation 1) and an answer of 60 (deviation 0.8). Half come alone, half in bursts of
    8 to 40 on one template within a second.
    """
    rng, rows = prompts.rng, list[Row]()
    templates = prompts.prefixes(16, 6000, 0.5, 20_000)
    arrivals = prompts.arrivals(36.0)
    while len(rows) < 5000:
        at, (definitions, prefix) = next(arrivals), prompts.zipf(templates)
        for _ in range(rng.randint(8, 40) if rng.random() < 0.04 else 1):
            tokens = definitions + prompts.length(300, 1.0, 16, 8000)
            answer_tokens = prompts.length(60, 0.8, 4, 1000)
            rows.append(Row(at + rng.random(), tokens, answer_tokens, keys=prompts.keys(tokens, prefix)))
    return rows


def _agents(prompts: _Prompts) -> list[Row]:
    """Agents that overfill the caches: 260 closed-loop sessions of 6 to 12 turns.

    Contexts begin with one of three sets of tools of 6,000 tokens and 20,000 of a project (deviation 0.5). Each turn
    adds 1,800 (deviation 0.8) and an answer of 150; it follows the answer before it after 40 s (deviation 1.6, up to
    600 s). At the rate as made, open sessions reach 2.4 times the tokens that the caches of four engines hold.
    """
    rng, rows = prompts.rng, []
    tools = [prompts.keys(6000) for _ in range(3)]
    for session, at in enumerate(islice(prompts.arrivals(0.4), 260)):
        tokens, keys, think_seconds = 6000 + prompts.length(20_000, 0.5, 1000, 80_000), rng.choice(tools), 0.0
        for _ in range(rng.randint(6, 12)):
            keys, answer_tokens = prompts.keys(tokens, keys), prompts.length(150, 0.8, 8, 2000)
            rows.append(Row(at, tokens, answer_tokens, keys=keys, session=session, think_seconds=think_seconds))
            tokens += answer_tokens + prompts.length(1800, 0.8, 32, 16_000)
            think_seconds = prompts.length(40_000, 1.6, 200, 600_000) / 1000
    return rows


def _embeddings(prompts: _Prompts) -> list[Row]:
    """Prefill alone: 4,000 requests of texts to embed, as one prompt each, without an answer or anything shared.

    60 % are of 16 to 64 texts of 40 tokens (deviation 0.6), 40 % of 1 to 4 of 1,200 (deviation 0.8, up to 8,000).
    """
    rng, rows = prompts.rng, []
    for at in islice(prompts.arrivals(50.0), 4000):
        if rng.random() < 0.6:
            tokens = sum(prompts.length(40, 0.6, 4, 400) for _ in range(rng.randint(16, 64)))
        else:
            tokens = sum(prompts.length(1200, 0.8, 100, 8000) for _ in range(rng.randint(1, 4)))
        rows.append(Row(at, tokens, 1, keys=prompts.keys(tokens)))
    return rows


def _synthetic(prompts: _Prompts) -> list[Row]:
    """Shared documents: 3,000 requests on 200 prefixes (Zipf) of 4,000 tokens (deviation 0.8, up to 30,000).

    Tails have 800 tokens (deviation 1.2, up to 16,000), answers 250 (deviation 0.9).
    """
    rows, prefixes = [], prompts.prefixes(200, 4000, 0.8, 30_000)
    for at in islice(prompts.arrivals(10.0), 3000):
        shared_tokens, prefix = prompts.zipf(prefixes)
        tokens = shared_tokens + prompts.length(800, 1.2, 16, 16_000)
        rows.append(Row(at, tokens, prompts.length(250, 0.9, 4, 4000), keys=prompts.keys(tokens, prefix)))
    return rows


_REGIMES: dict[str, Callable[[_Prompts], list[Row]]] = {
    "reasoning": _reasoning,
    "mixed": _mixed,
    "tools": _tools,
    "agents": _agents,
    "embeddings": _embeddings,
    "synthetic": _synthetic,
}
REGIMES = tuple(_REGIMES)
_CLOSED_LOOPS = ("agents",)
