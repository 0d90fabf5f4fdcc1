"""Step times of an unknown engine, by least squares over the requests that it served; and the overhead around it.

A decode of n tokens takes n - 1 steps: each has a base, a part for every sequence that decodes, and what prefills of
others add. A prompt that meets an idle engine takes the base, its own prefill, and the overhead: gateway, HTTP, and
whatever the engine's server does besides stepping. Errors are relative, so long answers do not outweigh first tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.engine.step_time import StepTime
from loadtest.recording import Logged


@dataclass(frozen=True, slots=True)
class Served:
    """One streamed answer. Times are Unix time; `computed_tokens` are the prompt's that were not cached."""

    backend: str
    sent: float
    _: KW_ONLY
    first: float
    end: float
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


def served(requests: Iterable[Logged]) -> Iterator[Served]:
    """Of those whose times and cached tokens the log has."""
    for request in requests:
        first, cached = request.first_seconds, request.cached_tokens
        if first is None or cached is None:
            continue
        sent = request.at_seconds + request.queue_seconds
        end = request.at_seconds + request.duration_seconds
        if sent < request.at_seconds + first <= end:
            yield Served(
                request.backend,
                sent,
                first=request.at_seconds + first,
                end=end,
                cached_tokens=cached,
                computed_tokens=max(1, request.prompt_tokens - cached),
                output_tokens=request.output_tokens,
            )


FEWEST_IDLE = 5
FEWEST_ANSWERS = 20
_MOST = 2000  # requests that are looked at, the latest: each is compared with each
_BASE, _SEQUENCE, _PREFILL, _OVERHEAD = range(4)
_Array = NDArray[np.float64]


class NoFit(Exception):
    """There is too little to fit to; the message says of what."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How long steps take, and what a first token takes besides. None = no request met an idle engine: left out."""

    step_time: StepTime
    overhead_seconds: float | None
    idle_requests: int
    _: KW_ONLY
    answers: int = 0  # that step times were fitted to; 0 where they were given


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was around each request on its own engine."""

    decoding: _Array  # mean number of sequences that decoded with it
    prefilled: _Array  # tokens that others prefilled meanwhile
    idle: NDArray[np.bool_]  # no other request ran until its first token


def overhead_of(past: Sequence[Served], step_time: StepTime, max_batched_tokens: int) -> Calibration:
    """For known step times: the median of what prompts took on idle engines beyond their prefill."""
    past = past[-_MOST:]
    seen = _around(past)
    beyond = [
        one.first - one.sent - _prefill_seconds(one, step_time, max_batched_tokens)
        for one, idle in zip(past, seen.idle, strict=True)
        if idle
    ]
    enough = len(beyond) >= FEWEST_IDLE
    return Calibration(step_time, max(0.0, median(beyond)) if enough else None, len(beyond))


def fit(past: Sequence[Served], max_batched_tokens: int) -> Calibration:
    """Step times and overhead that fit best. Raises NoFit."""
    past = past[-_MOST:]
    seen = _around(past)
    rows: list[list[float]] = []
    took: list[float] = []
    for number, one in enumerate(past):
        steps = one.output_tokens - 1
        if steps > 0 and one.end > one.first:
            rows.append([steps, steps * float(seen.decoding[number]), float(seen.prefilled[number]), 0.0])
            took.append(one.end - one.first)
    answers = len(rows)
    for one, idle in zip(past, seen.idle, strict=True):
        if idle:
            rows.append([float(-(-one.computed_tokens // max_batched_tokens)), 0.0, one.computed_tokens, 1.0])
            took.append(one.first - one.sent)
    idle_requests = len(rows) - answers
    if answers < FEWEST_ANSWERS or idle_requests < FEWEST_IDLE:
        raise NoFit(
            f"a fit needs {FEWEST_ANSWERS} streamed answers that report cached tokens, and {FEWEST_IDLE} of them on an"
            f" idle engine; before what is judged there are {answers} and {idle_requests} (or give --preset)"
        )
    found = _solved(np.array(rows), np.array(took))
    step_time = StepTime(
        found[_BASE],
        found[_PREFILL],
        per_attention_pair_seconds=0.0,
        per_decode_sequence_seconds=found[_SEQUENCE],
        per_context_token_seconds=0.0,
    )
    return Calibration(step_time, found[_OVERHEAD], idle_requests, answers=answers)


def _prefill_seconds(one: Served, step_time: StepTime, max_batched_tokens: int) -> float:
    steps = -(-one.computed_tokens // max_batched_tokens)
    return steps * step_time.base_seconds + step_time.prefill_seconds(one.computed_tokens, one.cached_tokens)


def _solved(rows: _Array, took: _Array) -> list[float]:
    """Least squares of relative errors; what would be negative is zero."""
    scaled = rows / took[:, None]
    found, free = [0.0] * rows.shape[1], list(range(rows.shape[1]))
    while free:
        part: Any = np.linalg.lstsq(scaled[:, free], np.ones(len(took)), rcond=None)[0]
        if part.min() >= 0:
            for column, value in zip(free, part, strict=True):
                found[column] = float(value)
            break
        del free[int(part.argmin())]
    return found


def _around(past: Sequence[Served]) -> _Seen:
    seen = _Seen(np.ones(len(past)), np.zeros(len(past)), np.ones(len(past), dtype=np.bool_))
    by_backend: dict[str, list[int]] = {}
    for number, one in enumerate(past):
        by_backend.setdefault(one.backend, []).append(number)
    for numbers in by_backend.values():
        sent, first, end, computed = np.array(
            [(past[n].sent, past[n].first, past[n].end, past[n].computed_tokens) for n in numbers], dtype=np.float64
        ).T
        decode = np.maximum(end - first, 1e-9)
        seen.decoding[numbers] = _overlaps(first, end, first, end).sum(axis=1) / decode
        share = _overlaps(first, end, sent, first) / (first - sent)[None, :]
        seen.prefilled[numbers] = share @ computed
        present = _overlaps(sent, first, sent, end) > 0
        seen.idle[numbers] = present.sum(axis=1) <= 1  # itself
    return seen


def _overlaps(begin: _Array, end: _Array, others_begin: _Array, others_end: _Array) -> _Array:
    """Seconds that each stretch has in common with each other one."""
    together = np.minimum(end[:, None], others_end[None, :]) - np.maximum(begin[:, None], others_begin[None, :])
    return np.asarray(np.maximum(together, 0.0), dtype=np.float64)
