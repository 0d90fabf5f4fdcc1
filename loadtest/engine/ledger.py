"""Requests received and how they ended: tests compare this record with the gateway's."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any

from loadtest.engine.faults import Script
from loadtest.engine.kv_cache import SequenceState


class Ending(StrEnum):
    """How a request ended."""

    RUNNING = "running"
    FINISHED = "finished"
    REFUSED = "refused"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """One HTTP request."""

    method: str
    path: str
    started_seconds: float
    _: KW_ONLY
    # The path as it was sent.
    raw_path: str = ""
    headers: Sequence[tuple[str, str]] = ()
    inference: bool = False
    script: Script | None = None
    request_id: str | None = None
    model: str | None = None
    nonces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    ending: Ending = Ending.RUNNING
    # A scripted fault ended it.
    struck: bool = False
    ended_seconds: float | None = None

    def note(self, request_id: str, model: str, nonces: Iterable[str | None]) -> None:
        self.request_id, self.model = request_id, model
        self.nonces = [nonce for nonce in nonces if nonce]

    def strike(self) -> None:
        self.struck = True

    def count(self, sequences: Iterable[SequenceState], output_tokens: int) -> None:
        """What its answers took, so far."""
        self.prompt_tokens = self.cached_tokens = 0
        for sequence in sequences:
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += sequence.cached_tokens
        self.output_tokens = output_tokens

    def answered(self, status: int) -> None:
        self.status = status

    def end(self, ending: Ending, now: float) -> Ending:
        """Its outcome; a scripted fault has precedence."""
        self.ending = Ending.FAILED if self.struck else ending
        self.ended_seconds = now
        return self.ending

    def as_json(self) -> dict[str, Any]:
        """The entry as the control route shows it."""
        return {
            "method": self.method,
            "path": self.path,
            "raw_path": self.raw_path,
            "request_id": self.request_id,
            "model": self.model,
            "nonces": self.nonces,
            "headers": {name.lower(): value for name, value in self.headers},
            "raw_headers": self.headers,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "status": self.status,
            "ending": self.ending.value,
            "started_seconds": self.started_seconds,
            "ended_seconds": self.ended_seconds,
        }


class Ledger:
    """Entries of all requests but probes, newest last; without `keep` only the counts are kept."""

    def __init__(self, clock: Callable[[], float], keep: int) -> None:
        self._clock = clock
        self._keep = keep
        self._entries: deque[LedgerEntry] = deque(maxlen=keep or 1)
        self.in_flight = 0
        self.max_in_flight = 0
        self.total = 0
        self.endings = dict.fromkeys(Ending, 0)

    def begin(
        self,
        method: str,
        path: str,
        raw_path: str,
        headers: Sequence[tuple[str, str]],
        script: Script | None,
        inference: bool,
    ) -> LedgerEntry:
        """A request arrived. Only inference requests count for concurrency."""
        entry = LedgerEntry(
            method, path, self._clock(), raw_path=raw_path, headers=headers, inference=inference, script=script
        )
        self.total += 1
        self.in_flight += inference
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        if self._keep:
            self._entries.append(entry)
        return entry

    def end(self, entry: LedgerEntry, ending: Ending) -> None:
        self.in_flight -= entry.inference
        self.endings[entry.end(ending, self._clock())] += 1

    def clear(self) -> None:
        """Forget ended requests; the highest concurrency starts again from the present one."""
        running = [entry for entry in self._entries if entry.ending is Ending.RUNNING]
        self._entries.clear()
        self._entries.extend(running)
        self.max_in_flight = self.in_flight
        self.total = len(running)
        self.endings = dict.fromkeys(Ending, 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "endings": {ending.value: count for ending, count in self.endings.items() if ending is not Ending.RUNNING},
            "entries": [entry.as_json() for entry in self._entries],
        }
