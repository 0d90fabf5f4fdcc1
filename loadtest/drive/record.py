"""What is known of one request after it ended; the only thing statistics are made from."""

from __future__ import annotations

from dataclasses import dataclass

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
OTHER_ANSWER = "other_answer"  # an answer that is neither what was asked for nor OpenAI's error
SILENT_END = "silent_end"  # ends as a whole answer does
CONNECTION = "connection"  # could not be made, or broke
NOTHING = "nothing"  # no end within the client's patience


def http_outcome(status: int) -> str:
    """The outcome of an answer that is not 200."""
    return f"http_{status}"


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from the start of the run; None is "did not happen" or "was not reported"."""

    index: int
    group: int
    intended: float
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
    # The longest time in which nothing came: from the send, over every read, to the end.
    quiet_from: float = 0.0
    quiet_until: float = 0.0
    # Of the body that was sent; empty if none was.
    body_hash: str = ""

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
