"""Where a backend's KV events are published, and whether a ZeroMQ socket answers there.

A backend names its publishers in /kv_event_sources. vLLM's publisher listens if its endpoint has a wildcard, and
connects otherwise; its answer does not distinguish a resolved `tcp://*:0` from an address to connect to. Both are read
at the reported port of the backend's own host, and nowhere else: an answer never makes the gateway connect to another
machine. A publisher that connects needs `kv_events: {endpoint: ..., bind: true}`.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import NamedTuple

from gateway.core.backends.backend import Backend
from gateway.core.backends.settings import KvEventsConfig

WILDCARDS = frozenset({"*", "0.0.0.0", "::", ""})


class Address(NamedTuple):
    """Host and port of a tcp:// endpoint."""

    host: str
    port: int

    @classmethod
    def of(cls, endpoint: str) -> "Address":
        """Split an endpoint into its parts. Raises ValueError if other machines cannot reach it."""
        if not endpoint.startswith("tcp://"):
            raise ValueError(f"{endpoint} is not a network endpoint (tcp://host:port)")
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{endpoint} has no valid port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Source:
    """One engine's (data-parallel rank's) events: where to listen, and where to request missed messages."""

    rank: int
    endpoint: str
    replay: str | None
    _: KW_ONLY
    topic: str | None = None  # None = any
    bind: bool = False
    capacity_tokens: int | None = field(default=None, compare=False)


class ReadingPlan(NamedTuple):
    """The sources to read of a backend, and the reason if some are missing."""

    sources: tuple[Source, ...] = ()
    problem: str | None = None


def plan(backend: Backend) -> ReadingPlan:
    """The sources of this backend's events, by its configuration and its reports."""
    config, facts, host = backend.config.kv_events, backend.facts, backend.origin.host
    capacity = None if backend.kv_cache_tokens is None else backend.kv_cache_tokens // facts.engines
    if config == "off":
        return ReadingPlan(problem="kv_events is off")
    if isinstance(config, KvEventsConfig):
        return ReadingPlan(tuple(_configured(config, host, rank, capacity) for rank in range(facts.engines)))
    if facts.kv_event_sources is None:
        return ReadingPlan(problem="the backend has no /kv_event_sources")
    if not facts.kv_event_sources:
        return ReadingPlan(problem="the backend publishes no KV events (vLLM: --kv-events-config)")
    sources, problems, ranks = list[Source](), list[str](), set[int]()
    for reported in facts.kv_event_sources:
        try:
            if reported.rank in ranks:
                raise ValueError(f"duplicate rank {reported.rank} in /kv_event_sources")
            ranks.add(reported.rank)
            if reported.publisher != "zmq":
                raise ValueError(f"unsupported publisher {reported.publisher or 'null'}; only zmq is supported")
            if not reported.endpoint:
                raise ValueError("/kv_event_sources does not contain the endpoint")
            endpoint = str(Address(host, Address.of(reported.endpoint).port))
            sources.append(Source(reported.rank, endpoint, None, topic=reported.topic, capacity_tokens=capacity))
            if reported.replay_endpoint:  # the events are read even if it cannot be reached
                replay = str(Address(host, Address.of(reported.replay_endpoint).port))
                sources[-1] = replace(sources[-1], replay=replay)
        except ValueError as error:
            problems.append(str(error))
    return ReadingPlan(tuple(sources), "; ".join(dict.fromkeys(problems)) or None)


def _configured(config: KvEventsConfig, host: str, rank: int, capacity: int | None) -> Source:
    """Rank r publishes r ports above rank 0, as vLLM does it."""
    endpoint = _of_rank(config.endpoint, None if config.bind else host, rank)
    replay = _of_rank(config.replay, host, rank) if config.replay else None
    return Source(rank, endpoint, replay, topic=config.topic, bind=config.bind, capacity_tokens=capacity)


def _of_rank(endpoint: str, host: str | None, rank: int) -> str:
    """`host` takes the place of a wildcard."""
    address = Address.of(endpoint)
    if host is not None and address.host in WILDCARDS:
        address = address._replace(host=host)
    return str(address._replace(port=address.port + rank))


_SIGNATURE_BYTES = 10  # 0xff, eight bytes of any value, 0x7f: each side of a ZMTP connection sends it immediately


async def why_unreachable(source: Source, timeout_seconds: float) -> str | None:
    """The reason why a source's events or missed events cannot be read; None = no problem found."""
    endpoints = [] if source.bind else [source.endpoint]
    endpoints += [source.replay] if source.replay else []
    reasons = await asyncio.gather(*(_why_silent(endpoint, timeout_seconds) for endpoint in endpoints))
    return next((reason for reason in reasons if reason), None)


async def _why_silent(endpoint: str, timeout_seconds: float) -> str | None:
    address = Address.of(endpoint)
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                greeting = await reader.readexactly(_SIGNATURE_BYTES)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"{endpoint}: timed out"
    except asyncio.IncompleteReadError:
        return f"{endpoint} is not a ZeroMQ socket"
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return f"{endpoint}: {reason.lower()}"
    if greeting[0] != 0xFF or greeting[-1] != 0x7F:
        return f"{endpoint} is not a ZeroMQ socket"
    return None
