"""Prompts kept for the report: few, bounded in number and bytes, in memory only."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.observe.record import Record
from gateway.request import Ask

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")


@dataclass(slots=True)
class Sample:
    """One prompt. `weight` is how many requests it stands for; tokens are estimates until it is `told`."""

    text: bytes
    model: str
    client: str
    name: str
    keys: tuple[int, ...]
    edges: tuple[int, ...]
    at_seconds: float
    weight: float
    size_bytes: int
    prompt_tokens: int
    hit_tokens: int = 0
    told: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept. `burst` samples are taken as they come, then `per_second`."""

    per_second: float = 1.0
    burst: int = 128
    samples: int = 512
    total_bytes: int = 8 << 20
    text_bytes: int = 64 << 10


class Samples:
    """Takes one request in some, by a token bucket, and forgets the oldest."""

    def __init__(self, now: float, limits: Limits) -> None:
        self._limits = limits
        self._tokens = float(limits.burst)
        self._filled_seconds = now
        self._seen = 0  # requests since the last sample
        self._kept: deque[Sample] = deque()
        self._bytes = 0
        self._open: dict[int, tuple[Ask, Sample]] = {}  # by identity of the Ask, which is held, so that it stays unique

    def __repr__(self) -> str:
        return f"<Samples {len(self._kept)}, {self._bytes} bytes, {len(self._open)} open>"

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held_bytes(self) -> int:
        """Bytes of text that are kept."""
        return self._bytes

    def wants(self, now: float) -> bool:
        """Whether this request is to be sampled. To be asked once for every request that generates."""
        self._seen += 1
        if self._tokens >= 1.0:
            return True
        passed = now - self._filled_seconds
        if passed * self._limits.per_second < 1.0:
            return False
        self._tokens = min(float(self._limits.burst), self._tokens + passed * self._limits.per_second)
        self._filled_seconds = now
        return True

    def add(self, pieces: Sequence[bytes], ask: Ask, client: str, name: str, now: float) -> None:
        """Keep a prompt, given message by message. A name that does not look like a label is not kept."""
        if self._tokens >= self._limits.burst:
            self._filled_seconds = now  # a full bucket gains nothing by waiting
        self._tokens = max(0.0, self._tokens - 1.0)
        text = _joined(pieces, self._limits.text_bytes)
        if not text:
            return
        name = name if _NAME.fullmatch(name) else ""
        sample = Sample(
            text, ask.model, client, name, ask.keys, ask.edges, now, max(1, self._seen), ask.prompt_size,
            ask.prompt_tokens,
        )  # fmt: skip
        self._seen = 0
        self._kept.append(sample)
        self._bytes += len(text)
        self._open[id(ask)] = (ask, sample)
        while len(self._kept) > self._limits.samples or self._bytes > self._limits.total_bytes:
            self._bytes -= len(self._kept.popleft().text)
        while len(self._open) > self._limits.samples:
            del self._open[next(iter(self._open))]

    def finished(self, record: Record, ask: Ask) -> None:
        """Learn what became of a request, if it was sampled."""
        found = self._open.pop(id(ask), None)
        if found is None:
            return
        sample = found[1]
        sample.told = True
        sample.prompt_tokens = record.prompt_tokens or sample.prompt_tokens
        actual = record.actual_hit_tokens
        sample.hit_tokens = record.predicted_hit_tokens if actual is None else actual

    def snapshot(self, since_seconds: float) -> list[Sample]:
        """Those taken since then, oldest first; not changed afterwards."""
        return [replace(sample) for sample in self._kept if sample.at_seconds >= since_seconds]


def _joined(pieces: Sequence[bytes], limit: int) -> bytes:
    if len(pieces) == 1:
        return pieces[0][:limit]
    taken, size = [], 0
    for piece in pieces:
        taken.append(piece[: limit - size])
        size += len(taken[-1])
        if size >= limit:
            break
    return b"".join(taken)
