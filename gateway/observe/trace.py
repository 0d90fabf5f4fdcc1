"""What is traced of a request: its place in a trace (W3C's `traceparent`), and what happened when.

Spans are made of it after the request, in another thread (`observe/tracing.py`). Before that, a request costs the
sampling decision; one that is sampled also notes its attempts.
"""

import re
import secrets
from collections.abc import Callable
from typing import NamedTuple

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_SAMPLED = 1
_IDS_AT_ONCE = 128
ID_BYTES = 24  # of a trace and of a span
_ALL = 1 << 64
_MOST_PATH_BYTES = 256


class RandomIds:
    """Random ids in hex, each for a trace and a span. One call to the kernel makes many, because each call costs."""

    def __init__(self) -> None:
        self._block = b""
        self._taken = 0

    def take(self) -> bytes:
        """One that was never taken before."""
        start = self._taken
        if start == len(self._block):
            self._block, start = secrets.token_hex(ID_BYTES * _IDS_AT_ONCE).encode(), 0
        self._taken = start + 2 * ID_BYTES
        return self._block[start : self._taken]


class Price(NamedTuple):
    """What an engine would have cost: milliseconds, or the unit of the policy."""

    engine: str
    cost: float
    hit_tokens: int
    is_open: bool


class Attempt:
    """One attempt to answer a request. Times are seconds of the loop's clock; None = did not happen."""

    def __init__(self, span_id: str, asked_seconds: float, prices: list[Price]) -> None:
        self.span_id = span_id
        self.asked_seconds = asked_seconds
        self.prices = prices
        self.backend = ""
        self.url = ""
        self.waited_seconds = 0.0
        self.hit_tokens = 0
        self.placed_seconds: float | None = None
        self.first_byte_seconds: float | None = None
        self.ended_seconds: float | None = None
        self.error = ""  # the kind of failure


class RequestTrace:
    """The trace of one sampled request. `parent_id` is the client's span; empty = the trace begins here."""

    def __init__(
        self,
        ids: tuple[str, str, str],
        method: str,
        path: str,
        clock: Callable[[], float],
        new_span_id: Callable[[], str],
    ) -> None:
        """`ids`: of the trace, of the first attempt's span, and of the client's span or nothing."""
        self.trace_id, self._next_span_id, self.parent_id = ids
        self.span_id = new_span_id()
        self.method = method
        self.path = path
        self.attempts: list[Attempt] = []
        self._clock = clock
        self._new_span_id = new_span_id

    def header(self) -> bytes:
        """The `traceparent` of the next attempt, whose span is the parent of the engine's."""
        return b"00-%b-%b-01" % (self.trace_id.encode(), self._next_span_id.encode())

    def asks(self, prices: list[Price]) -> None:
        """An attempt begins: an engine is to be found for it."""
        self.attempts.append(Attempt(self._next_span_id, self._clock(), prices))

    def placed(self, backend: str, waited_seconds: float, hit_tokens: int) -> None:
        """The scheduler chose this backend, and the request is sent."""
        if not self.attempts:
            self.asks([])
        attempt = self.attempts[-1]
        attempt.backend, attempt.waited_seconds, attempt.hit_tokens = backend, waited_seconds, hit_tokens
        attempt.placed_seconds = self._clock()

    def failed(self, kind: str) -> None:
        self.attempts[-1].error = kind

    def stand_in(self) -> Attempt:
        """For batches and pieces, which have records of their own, and of which backends see one `traceparent`."""
        return Attempt(self._next_span_id, self._clock(), [])

    def attempted(self, first_byte_seconds: float | None) -> None:
        """The attempt has ended, whether it succeeded or not."""
        attempt = self.attempts[-1]
        attempt.first_byte_seconds, attempt.ended_seconds = first_byte_seconds, self._clock()

    def retried(self, headers: bytes) -> bytes:
        """The header lines of the next attempt, which has a span of its own."""
        before = self.header()
        self._next_span_id = self._new_span_id()
        return headers.replace(before, self.header(), 1)


class Tracer:
    """Decides which requests are traced: those that their client traces, and a share of those without a trace."""

    def __init__(self, sample_ratio: float, new_ids: Callable[[], bytes], clock: Callable[[], float]) -> None:
        bound = round(sample_ratio * _ALL)
        self.sample_ratio = sample_ratio
        self._bound = b"%016x" % bound if bound < _ALL else b"g"  # compared as text, which needs no conversion
        self._new_ids = new_ids
        self._clock = clock

    def begin(self, headers: dict[bytes, bytes], method: bytes, path: bytes) -> tuple[bytes, RequestTrace | None]:
        """The header line by which backends see the trace of a request, and the trace, if it is sampled.

        A trace that its client does not sample is passed on as it is, without a line of ours. One that begins here
        tells backends whether it is sampled, so that they do not begin traces of their own.
        """
        given = headers.get(b"traceparent")
        if given is None:
            ids = self._new_ids()
            if ids[16:32] >= self._bound:
                return b"traceparent: 00-%b-%b-00\r\n" % (ids[:32], ids[32:]), None
            return self._sampled(ids[:32], ids[32:], b"", method, path)
        found = _PARENT.fullmatch(given)
        if found is not None and _is_valid(found[1], found[2], found[3], found[5]):
            if not int(found[4], 16) & _SAMPLED:
                return b"", None
            del headers[b"traceparent"]
            return self._sampled(found[2], self._new_ids()[32:], found[3], method, path)
        del headers[b"traceparent"]
        headers.pop(b"tracestate", None)  # it belongs to the trace that cannot be continued
        return self.begin(headers, method, path)

    def _sampled(
        self, trace_id: bytes, span_id: bytes, parent_id: bytes, method: bytes, path: bytes
    ) -> tuple[bytes, RequestTrace | None]:
        target = path.partition(b"?")[0][:_MOST_PATH_BYTES].decode("latin-1")
        ids = trace_id.decode(), span_id.decode(), parent_id.decode()
        trace = RequestTrace(ids, method.decode("latin-1"), target, self._clock, self._new_span_id)
        return b"traceparent: %b\r\n" % trace.header(), trace

    def _new_span_id(self) -> str:
        return self._new_ids()[32:].decode()


def _is_valid(version: bytes, trace_id: bytes, span_id: bytes, more: bytes | None) -> bool:
    """Whether a `traceparent` is one; later versions may have more parts."""
    return version != b"ff" and (version != b"00" or more is None) and trace_id != _NO_TRACE and span_id != _NO_SPAN
