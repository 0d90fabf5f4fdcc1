"""How well the gateway knew what its backends held, from its access log."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson

from tests.bench.routing.results import Fidelity, Recovery

_AFTER = (5, 20, 60)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answered request: tokens that were expected in the cache, found there, and in the prompt."""

    placed: float
    """Unix time at which it was given to the backend, by when the prediction was made."""
    backend: str
    predicted: int
    actual: int
    prompt: int


def predictions(log: bytes, since: float) -> list[Prediction]:
    """Those of an access log from a moment on, in the order of placement; requests without known hits are left out."""
    found = []
    for line in log.splitlines():
        if not line.startswith(b"{"):
            continue
        told = orjson.loads(line)
        if told.get("outcome") != "completed" or told["actual_hit_tokens"] is None:
            continue
        placed = datetime.fromisoformat(told["time"]).timestamp() - (told["duration_ms"] - told["queue_ms"]) / 1e3
        predicted, actual = told["predicted_hit_tokens"], told["actual_hit_tokens"]
        if placed >= since:
            found.append(Prediction(placed, told["backend"], predicted, actual, told["prompt_tokens"]))
    return sorted(found, key=lambda one: one.placed)


def fidelity(found: Sequence[Prediction]) -> Fidelity | None:
    """Over all predictions; None without any."""
    prompt = sum(one.prompt for one in found)
    if not prompt:
        return None
    return Fidelity(
        requests=len(found),
        error=sum(abs(one.predicted - one.actual) for one in found) / prompt,
        over=sum(max(0, one.predicted - one.actual) for one in found) / prompt,
        under=sum(max(0, one.actual - one.predicted) for one in found) / prompt,
        error_a_request=sum(abs(one.predicted - one.actual) / max(one.prompt, 1) for one in found) / len(found),
    )


def recovery(found: Iterable[Prediction], backends: Sequence[str], at: float) -> Recovery:
    """The error on backends that lost their caches at a moment: before it, and for the first requests after it."""
    theirs = [one for one in found if one.backend in backends]
    before = [one for one in theirs if one.placed < at]
    after = [one for one in theirs if one.placed >= at]
    stretches = zip((0, *_AFTER), (*_AFTER, len(after)), strict=True)
    return Recovery(
        before=fidelity(before),
        after={f"{start + 1} to {end}": fidelity(after[start:end]) for start, end in stretches if start < len(after)},
    )
