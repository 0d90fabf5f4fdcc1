"""One JSON line a request in the access log, with salted hashes of the prompt's prefix blocks.

The hashes show which prompts share a prefix, and nothing else of them.
"""

import json
from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any, BinaryIO, Self

import orjson

from gateway.observe.log import LineWriter
from gateway.observe.record import Record
from gateway.request import Demand

_HASH_BYTES = 8


class PrefixHashes:
    """Hashes with one salt, whose secret is needed to check whether a guessed prompt was logged."""

    def __init__(self, secret: bytes) -> None:
        key = sha256(b"access log\0" + secret).digest()  # the same secret makes other salts too
        self._salted = blake2b(key=key, digest_size=_HASH_BYTES)

    def of(self, demand: Demand) -> dict[str, Any]:
        """The prompt's size in bytes, where its blocks end, and the hash of all that is before each end."""
        return {"bytes": demand.prompt_size, "ends": demand.edges, "hashes": [self._hash(key) for key in demand.keys]}

    def _hash(self, key: int) -> str:
        hashed = self._salted.copy()  # half the cost of salting it again
        hashed.update(key.to_bytes(8, "little"))
        return hashed.hexdigest()


_OFFSET_SECONDS = 1.0  # how long an offset between the clocks is used


class AccessLog:
    """Lines of requests, inside its `with` block. Lines that cannot be written are dropped and counted."""

    def __init__(
        self,
        out: BinaryIO,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        prefixes: PrefixHashes | None = None,
    ) -> None:
        self._writer = LineWriter(out, "access-log")
        self._prefixes = prefixes
        self._clock = clock
        self._wall_clock = wall_clock
        self._look_at_clocks()

    @property
    def dropped(self) -> int:
        return self._writer.dropped

    def add(self, record: Record) -> None:
        if record.ended_seconds - self._looked_seconds > _OFFSET_SECONDS:
            self._look_at_clocks()
        self._writer.write(line_of(record, self._offset_seconds, self._prefixes))

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def _look_at_clocks(self) -> None:
        self._looked_seconds = self._clock()
        self._offset_seconds = self._wall_clock() - self._looked_seconds  # from the loop's clock to Unix time


def line_of(record: Record, offset_seconds: float, prefixes: PrefixHashes | None = None) -> bytes:
    """The line: Unix time, and times in milliseconds since arrival; null where a thing did not happen."""
    demand = record.demand
    prefix = {} if prefixes is None else {"prefix": prefixes.of(demand) if demand is not None and demand.keys else None}
    arrived, first, ended = record.arrived_seconds, record.first_byte_seconds, record.ended_seconds
    return _as_line(
        {
            "time": _thousandths(offset_seconds + ended),
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "model": record.model,
            "client": record.client or None,
            "backend": record.backend or None,
            "outcome": record.outcome,
            "status": record.status,
            "stream": record.streams,
            "attempts": record.attempts,
            "queue_ms": _thousandths(record.queue_seconds * 1000),
            "first_byte_ms": None if first is None else _thousandths((first - arrived) * 1000),
            "duration_ms": _thousandths((ended - arrived) * 1000),
            "request_bytes": record.request_bytes,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "predicted_hit_tokens": record.predicted_hit_tokens,
            "actual_hit_tokens": record.actual_hit_tokens,
            "reused_inputs": record.reused_inputs,
            "error": record.error or None,
            **prefix,
        }
    )


def _as_line(document: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a number beyond 64 bits, or text that is no UTF-8
        return json.dumps(document).encode() + b"\n"


def _thousandths(value: float) -> float:
    return int(value * 1000) / 1000  # a third of the cost of round()
