"""Engines' counts in a run, from the counters' changes."""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_QUEUE = "vllm:request_queue_time_seconds"  # from arrival to the first scheduling
ENGINE_PREFILL = "vllm:request_prefill_time_seconds"  # from there to the first token
_HITS = "vllm:prefix_cache_hits_total"
_LOOKED_UP = "vllm:prefix_cache_queries_total"


def hits(counters: Mapping[str, float]) -> float:
    """Prompt tokens that were found in prefix caches."""
    return total(counters, _HITS)


def looked_up(counters: Mapping[str, float]) -> float:
    """Prompt tokens that were looked for there."""
    return total(counters, _LOOKED_UP)


def hit_ratio(counters: Mapping[str, float]) -> float | None:
    """Of all prompt tokens that were looked up; None where none were."""
    tokens = looked_up(counters)
    return hits(counters) / tokens if tokens else None


def preemptions(counters: Mapping[str, float]) -> float:
    """Sequences that had to give their blocks up."""
    return total(counters, "vllm:num_preemptions_total")


def mean_ms(counters: Mapping[str, float], histogram: str) -> float | None:
    """The mean of values that engines added to a histogram of seconds; None without additions."""
    count = total(counters, f"{histogram}_count")
    return total(counters, f"{histogram}_sum") / count * 1e3 if count else None


def served(counters: Mapping[str, float]) -> float:
    return total(counters, "vllm:request_success_total")


def of_each(counters: Mapping[str, float], engines: list[str]) -> list[dict[str, float]]:
    """The changes by engine, of those of a run that read the engines' pages by these names."""
    if len(engines) == 1:
        return [dict(counters)]
    return [
        {name.removeprefix(f"{engine} "): value for name, value in counters.items() if name.startswith(f"{engine} ")}
        for engine in engines
    ]


def least_share(requests: list[float]) -> float | None:
    """Of the engine with the fewest, over an even share; None where it is unknown."""
    whole = sum(requests)
    return min(requests) * len(requests) / whole if whole and len(requests) > 1 else None


def total(counters: Mapping[str, float], name: str) -> float:
    """A counter over all its labels, and over all engines with their names before it."""
    return sum(value for key, value in counters.items() if key.partition("{")[0].rpartition(" ")[2] == name)
