"""Entries are kept in the order of their use, and never take more than they may."""

import os
import tracemalloc
from sys import getsizeof
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.config.file import parse
from gateway.embeddings.cache import ENTRY_BYTES, EmbeddingCache
from gateway.embeddings.metrics import EmbeddingMetrics
from gateway.observe.metrics import Metrics

MAX_BYTES = 4000
KEYS = st.integers(0, 9).map(lambda number: b"%016d" % number)
STEPS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 5000))), max_size=60)


def cache_of(max_bytes: int) -> EmbeddingCache:
    return EmbeddingCache(
        max_bytes, is_on=lambda _: True, revision=lambda _: b"", metrics=EmbeddingMetrics(Metrics()), secret=b"secret"
    )


def evictions(cache: EmbeddingCache) -> float:
    return cache.metrics.evictions.values.get((), 0)


@given(STEPS)
def test_it_does_what_a_list_of_all_entries_in_the_order_of_their_use_would(
    steps: list[tuple[bytes, int | None]],
) -> None:
    cache = cache_of(MAX_BYTES)
    naive: dict[bytes, tuple[Any, int]] = {}  # value and size, least lately used first
    evicted = 0
    for number, (key, size) in enumerate(steps):
        value = b"%d" % number
        known = naive.pop(key, None)
        if size is None:
            assert cache.get(key) == (None if known is None else known[0])
            if known is not None:
                naive[key] = known
        else:
            cache.put(key, value, size)
            if size + ENTRY_BYTES <= MAX_BYTES:
                naive[key] = value, size + ENTRY_BYTES
            while sum(each for _, each in naive.values()) > MAX_BYTES:
                del naive[next(iter(naive))]
                evicted += 1
        assert cache.used_bytes == sum(each for _, each in naive.values()) <= MAX_BYTES
        assert (len(cache), evictions(cache)) == (len(naive), evicted)


def test_memory_keeps_to_the_bound() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        cache = cache_of(4_000_000)
        for number in range(20_000):
            vector = f"{number}".ljust(64 + number % 256, "A")
            cache.put(os.urandom(16), (vector, 1000 + number, True), getsizeof(vector) + 112)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert evictions(cache) > 10_000
    assert 0.6 * cache.used_bytes < taken <= cache.used_bytes <= 4_000_000


def test_nothing_is_kept_without_memory() -> None:
    cache = cache_of(0)
    cache.put(b"key", b"value", 0)
    assert (cache.get(b"key"), len(cache), evictions(cache)) == (None, 0, 0)
    assert "0 entries" in repr(cache)


def test_a_cache_that_becomes_smaller_sinks_step_by_step() -> None:
    made = cache_of(10_000_000)
    for number in range(5000):
        made.put(number.to_bytes(16, "big"), b"x", 100)
    full = made.used_bytes
    backends = [{"url": "http://a:1"}]
    made.follow(parse({"backends": backends, "embeddings": {"cache_bytes": 4680}}))
    assert made.is_on("m")
    made.trim()
    assert 4680 < made.used_bytes < full
    made.put(b"new", b"x", 100)
    assert made.get(b"new") == b"x"
    for _ in range(3):
        made.trim()
    assert (made.used_bytes, made.max_bytes) == (4680, 4680)
    assert made.get(b"new") == b"x"
    made.follow(parse({"backends": backends, "embeddings": {"cache_bytes": 0}}))
    made.trim()
    assert (made.used_bytes, made.is_on("m")) == (0, False)
