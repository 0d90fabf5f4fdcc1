"""Makes a trace in Mooncake's format: times, lengths, and numbers for blocks of as many tokens each.

The log's blocks end where messages do, in bytes. Those of the trace end every so many tokens: where that is in bytes
follows from the model's mean. Two prompts get the same number for a block if they are the same up to the first end in
the log that is not before the end of the block, so what they share is told too small by less than a block of the log.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from loadtest.recording.access_log import Logged

_Place = tuple[str, int]


def trace_of(requests: Sequence[Logged], block_tokens: int) -> Iterator[dict[str, Any]]:
    """A line for each request, which are in the order of their arrival. Numbers count up: no hash is in the trace."""
    ratios = bytes_per_token(requests)
    numbers: dict[_Place, int] = {}
    fresh = count()
    for request in requests:
        step = ratios[request.model] * block_tokens
        places = _places(request, request.prompt_tokens // block_tokens, step)
        for place in places:
            if place is not None and place not in numbers:
                numbers[place] = next(fresh)
        yield {
            "timestamp": round((request.at_seconds - requests[0].at_seconds) * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [next(fresh) if place is None else numbers[place] for place in places],
        }


def bytes_per_token(requests: Sequence[Logged]) -> dict[str, float]:
    """By model: one figure for all prompts, so that those that begin alike are cut alike."""
    sizes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for request in requests:
        sizes[request.model] += request.size_bytes
        tokens[request.model] += request.prompt_tokens
    return {model: sizes[model] / tokens[model] for model in tokens}


def _places(request: Logged, blocks: int, step: float) -> list[_Place | None]:
    """What stands for each block; None = it is like no other, for the log tells nothing of it."""
    ends, hashes = request.ends, request.hashes
    whole = bool(ends) and ends[-1] >= request.size_bytes
    places: list[_Place | None] = []
    for block in range(blocks):
        at = bisect_left(ends, (block + 1) * step)
        if at < len(ends):
            places.append((hashes[at], block))
        else:
            places.append((hashes[-1], block) if whole else None)
    return places
