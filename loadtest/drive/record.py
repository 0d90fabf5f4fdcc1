"""Records of finished requests and of a run: the only input of statistics."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import sub
from typing import Any, Self

# Gaps between reads are counted in ticks of 10 µs: finer than any timer here, and any number of them stays small.
ITL_TICKS_PER_SECOND = 100_000

_PROMPT_TOKENS = ("prompt_tokens", "input_tokens", "total_tokens")

OK = "ok"
INTERRUPTED = "interrupted"
DROPPED = "dropped"
TIMEOUT = "timeout"
CONNECT = "connect"
DISCONNECTED = "disconnected"
CLIENT_LIMIT = "client_limit"
STREAM_ERROR = "stream_error_event"
STREAM_CUT = "stream_without_done"
NOT_A_STREAM = "not_a_stream"
BAD_BODY = "bad_body"
BODY_CUT = "body_cut"

# How a failure shows to the client.
ERROR_OBJECT = "error_object"  # OpenAI's, in an answer or as an event of a stream
OTHER_ANSWER = "other_answer"  # an answer that is neither the requested kind nor OpenAI's error
SILENT_END = "silent_end"  # ends as a whole answer does
CONNECTION = "connection"  # could not be made, or broke
NOTHING = "nothing"  # no end within the client's patience


def http_outcome(status: int) -> str:
    """The outcome of an answer that is not 200."""
    return f"http_{status}"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request: its outcome, its text, and the form of a failure for the client."""

    outcome: str
    detail: str | None = None
    shown_as: str | None = None


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from the start of the run; None is "did not happen" or "was not reported"."""

    index: int
    group: int
    intended: float
    _: KW_ONLY
    sent: float
    end: float
    outcome: str
    asked_tokens: int = 0
    status: int | None = None
    detail: str | None = None
    shown_as: str | None = None
    first_token: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_tokens: int | None = None
    backend: str | None = None
    queue_seconds: float | None = None
    events: int = 0
    reads: int = 0
    part: str | None = None
    turn: int = 0
    asked_prompt_tokens: int = 0
    # The longest time without data: from the send, over every read, to the end.
    quiet_from: float = 0.0
    quiet_until: float = 0.0
    # Of the body that was sent; empty if none was.
    body_hash: str = ""
    # Of the audio that was uploaded; as the server counts them where the file does not say it.
    audio_seconds: float | None = None

    @classmethod
    def planned(cls, index: int, group: int, intended: float, **more: Any) -> Self:
        """One that is not sent yet."""
        return cls(index, group, intended, sent=intended, end=intended, outcome=INTERRUPTED, **more)

    def begin(self, now: float) -> None:
        self.sent = now

    def drop(self, now: float) -> None:
        """It was due, and is never sent."""
        self.sent = self.end = now
        self.outcome = DROPPED

    def note_headers(self, status: int, headers: Mapping[str, str]) -> None:
        """Facts from the answer's head, from server and gateway."""
        self.status = status
        backend = headers.get("x-gateway-backend")
        self.backend = None if backend is None else written(backend)
        predicted = _number(headers.get("x-gateway-prefix-tokens"))
        self.predicted_tokens = None if predicted is None else round(predicted)
        queue_ms = _number(headers.get("x-gateway-queue-ms"))
        self.queue_seconds = None if queue_ms is None else queue_ms / 1e3

    def note_usage(self, usage: Mapping[str, Any]) -> None:
        """By the names of chats, or else by those of responses; some reranks report the total only."""
        prompt = next((usage[name] for name in _PROMPT_TOKENS if usage.get(name) is not None), None)
        self.prompt_tokens = _count(prompt)
        self.completion_tokens = _count(usage.get("completion_tokens", usage.get("output_tokens")))
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        if usage.get("type") == "duration" and self.audio_seconds is None:
            self.audio_seconds = _count(usage.get("seconds"))

    def finish(
        self, how: RequestEnd, now: float, first_token: float | None, read_times: Sequence[float], events: int
    ) -> None:
        self.outcome, self.detail, self.shown_as = how.outcome, how.detail, how.shown_as
        self.end, self.first_token = now, first_token
        self.events, self.reads = events, len(read_times)
        starts, ends = (self.sent, *read_times), (*read_times, now)
        lengths = list(map(sub, ends, starts))
        longest = lengths.index(max(lengths))
        self.quiet_from, self.quiet_until = starts[longest], ends[longest]

    def note_body(self, body_hash: str) -> None:
        self.body_hash = body_hash

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def was_sent(self) -> bool:
        """Whether the client gave it to the network."""
        return self.outcome != DROPPED

    @property
    def due(self) -> float:
        """Where honest latency starts: the intended time, or the actual one where a coarse timer sent early."""
        return min(self.intended, self.sent)

    @property
    def tpot_seconds(self) -> float | None:
        """(E2E - TTFT) / (n - 1), n from the server's usage, never from chunks. None for an answer of one read."""
        if self.first_token is None or self.completion_tokens is None or self.completion_tokens < 2 or self.reads == 1:
            return None
        return (self.end - self.first_token) / (self.completion_tokens - 1)


@dataclass(slots=True)
class WorkerHealth:
    """One worker's own figures during the measured part of a run."""

    worker: int
    loop_lags_seconds: array[float] = field(default_factory=lambda: array("d"))
    cpu_shares: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class Harvest:
    """Everything a run brought in."""

    records: list[Record] = field(default_factory=list)
    itl_ticks: Counter[int] = field(default_factory=Counter)
    healths: list[WorkerHealth] = field(default_factory=list)
    _: KW_ONLY
    stopped_early: bool = False
    origin: float = 0.0  # the run's zero on the monotonic clock
    lost: list[str] = field(default_factory=list)  # why workers ended before their time; the first one stops the run

    @property
    def is_given_up(self) -> bool:
        return self.stopped_early or bool(self.lost)

    def stop(self) -> None:
        """The user ended it by hand."""
        self.stopped_early = True

    def take(self, health: WorkerHealth, itl_ticks: Counter[int], failure: str) -> None:
        """A worker's final report; `failure` is the error that ended it early, if any."""
        self.healths.append(health)
        self.itl_ticks.update(itl_ticks)
        if failure:
            self.lost.append(f"client worker {health.worker} failed: {failure}")

    def complete(self) -> Harvest:
        """In the order in which requests were due."""
        self.records.sort(key=lambda record: (record.intended, record.index))
        self.healths.sort(key=lambda health: health.worker)
        return self


@dataclass(frozen=True, slots=True)
class Tick:
    """News for a live display: requests ended since the last one, and requests in flight."""

    elapsed_seconds: float
    records: list[Record]
    in_flight: int


def written(text: str) -> str:
    """As a file can hold it: aiohttp reads bytes that are not UTF-8 as surrogates."""
    return text.encode("utf-8", "replace").decode()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
