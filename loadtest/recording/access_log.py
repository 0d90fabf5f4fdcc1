"""Reads the gateway's access log: the answered requests whose prompts' prefix hashes it has."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Logged:
    """One request that was answered."""

    at_seconds: float  # Unix time of its arrival
    model: str
    prompt_tokens: int
    output_tokens: int
    size_bytes: int  # of the prompt
    ends: tuple[int, ...]  # bytes of the prompt up to the end of each block
    hashes: tuple[str, ...]  # of all that is before each end
    duration_seconds: float = 0.0  # from its arrival, as the next
    first_seconds: float | None = None  # None where the answer was not streamed
    queue_seconds: float = 0.0  # in the gateway's line
    backend: str = ""
    cached_tokens: int | None = None


@dataclass(slots=True)
class Log:
    """What a log holds, oldest arrival first, and how many lines were left out, by reason."""

    requests: list[Logged] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_log(lines: Iterable[bytes], model: str | None = None) -> Log:
    """Read lines; others than the access log's may be among them. `model`: only that one's."""
    log = Log()
    for line in lines:
        found = _request(line)
        if isinstance(found, str):
            log.left_out[found] += 1
        elif model is not None and found.model != model:
            log.left_out["of another model"] += 1
        else:
            log.requests.append(found)
    log.requests.sort(key=lambda request: request.at_seconds)
    return log


def _request(line: bytes) -> Logged | str:
    """The request, or why it is left out."""
    try:
        document = orjson.loads(line)
        ended, took_ms, model = document["time"], document["duration_ms"], document["model"]
        prompt, output = document["prompt_tokens"], document["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        return "not of the access log"
    if not prompt or not output:
        return "without an answer, or without its usage"
    prefix = document.get("prefix")
    if not isinstance(prefix, dict):
        return "without prefix hashes"
    try:
        return _logged(document, float(ended) - float(took_ms) / 1000, str(model), int(prompt), int(output), prefix)
    except (KeyError, TypeError, ValueError):
        return "not of the access log"


def _logged(
    document: dict[str, Any], at_seconds: float, model: str, prompt: int, output: int, prefix: dict[str, Any]
) -> Logged:
    ends, hashes = tuple(map(int, prefix["ends"])), tuple(map(str, prefix["hashes"]))
    if len(ends) != len(hashes) or list(ends) != sorted(ends):
        raise ValueError("each hash has an end, and they rise")
    first_ms, cached = document.get("first_byte_ms"), document.get("actual_hit_tokens")
    return Logged(
        at_seconds, model, prompt, output, int(prefix["bytes"]), ends, hashes,
        duration_seconds=float(document["duration_ms"]) / 1000,
        first_seconds=float(first_ms) / 1000 if document.get("stream") and first_ms is not None else None,
        queue_seconds=float(document.get("queue_ms") or 0.0) / 1000,
        backend=str(document.get("backend") or ""),
        cached_tokens=None if cached is None else int(cached),
    )  # fmt: skip
