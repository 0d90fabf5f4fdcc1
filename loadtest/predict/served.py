"""What one engine did for each request, as the gateway saw it: its times, and the tokens that it computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadtest.recording.access_log import Logged


@dataclass(frozen=True, slots=True)
class Served:
    """One streamed answer. Times are Unix time; `computed_tokens` are the prompt's that were not cached."""

    backend: str
    sent: float
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
                request.backend, sent, request.at_seconds + first, end, cached,
                max(1, request.prompt_tokens - cached), request.output_tokens,
            )  # fmt: skip
