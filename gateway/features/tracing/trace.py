"""The trace data of a request: its place in a trace (W3C's `traceparent`), and its events with their times.

`tracing/tracing.py` makes spans of it after the request, in another thread. Before that, a request costs the sampling
decision; a sampled one also notes its attempts.
"""

import re
from binascii import hexlify
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gateway.core.front.handler import TraceSource
from gateway.core.observe.record import Record, Trace, Verdict

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_SAMPLED = 1
_LINE: Final = b"traceparent: 00-"
_HEX: Final = b"0123456789abcdef"
_EVEN: Final = b"02468ace"
_DASH: Final = 0x2D
_ID_BYTES: Final = 8  # of a span, and of either half of a trace's id
_IDS_CHARACTERS: Final = 34  # of the lower half of a trace's id and of a span's id in hex, each with a "-"
_TRACES_AT_ONCE = 256
_ALL = 1 << 64
_MOST_PRICES = 8  # the best engines


class Price(NamedTuple):
    """The cost of an engine: milliseconds, or the unit of the policy."""

    engine: str
    cost: float
    hit_tokens: int
    is_open: bool


def _prices(verdicts: Sequence[Verdict]) -> list[Price]:
    """The costs of the best engines; times in milliseconds."""
    scales = [(verdict, 1000 if verdict.parts is not None else 1) for verdict in verdicts[:_MOST_PRICES]]
    return [Price(each.name, each.cost * scale, each.hit_tokens, each.is_open) for each, scale in scales]


class Attempt:
    """One attempt to answer a request. Times are seconds of the loop's clock; None = did not happen."""

    def __init__(self, span_id: bytes, asked_seconds: float, prices: list[Price]) -> None:
        self.span_id = span_id
        self.asked_seconds = asked_seconds
        self.prices = prices
        self.backend = ""
        self.waited_seconds = 0.0
        self.hit_tokens = 0
        self.placed_seconds: float | None = None
        self.first_byte_seconds: float | None = None
        self.ended_seconds: float | None = None
        self.error = ""  # the kind of failure


class RequestTrace(Trace):
    """The trace of one sampled request. `parent_id` is the client's span; empty = the trace begins here."""

    def __init__(
        self,
        ids: tuple[bytes, bytes, bytes],
        method: str,
        path: str,
        clock: Callable[[], float],
        new_span_id: Callable[[], bytes],
    ) -> None:
        """`ids` in hex: of the trace, of the first attempt's span, and of the client's span or nothing."""
        self.trace_id, self._next_span_id, self.parent_id = ids
        self.span_id = new_span_id()
        self.method = method
        self.path = path
        self.attempts: list[Attempt] = []
        self._clock = clock
        self._new_span_id = new_span_id

    def header(self) -> bytes:
        """The `traceparent` of the next attempt, whose span is the parent of the engine's."""
        return b"00-%b-%b-01" % (self.trace_id, self._next_span_id)

    def asks(self, verdicts: Sequence[Verdict]) -> None:
        self.attempts.append(Attempt(self._next_span_id, self._clock(), _prices(verdicts)))

    def placed(self, backend: str, waited_seconds: float, hit_tokens: int) -> None:
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
        attempt = self.attempts[-1]
        attempt.first_byte_seconds, attempt.ended_seconds = first_byte_seconds, self._clock()

    def retried(self, headers: bytes) -> bytes:
        before = self.header()
        self._next_span_id = self._new_span_id()
        return headers.replace(before, self.header(), 1)


class Finished(NamedTuple):
    """A request that was traced, for its spans. `urls`: of backends, by name; the offset is that to Unix time."""

    record: Record
    trace: RequestTrace
    urls: dict[str, str]
    offset_seconds: float


class Tracer(TraceSource):
    """Selects the requests to trace: requests traced by their client, and a share of requests without a trace."""

    def __init__(self, sample_ratio: float, random_bytes: Callable[[int], bytes], clock: Callable[[], float]) -> None:
        bound = round(sample_ratio * _ALL)
        self.sample_ratio = sample_ratio
        self._bound = b"%016x" % bound if bound < _ALL else b"g"  # compared as text, which needs no conversion
        self._random_bytes = random_bytes
        self._begin = self._ids = b""  # of the next traces: the line up to the half of the id that they have in common
        self._taken = 0  # characters of these ids
        self._clock = clock

    def begin(self, headers: dict[bytes, bytes], method: bytes, path: bytes) -> tuple[bytes, RequestTrace | None]:
        """The header line by which backends see the trace of a request, and the trace, if it is sampled.

        A trace that its client does not sample is passed on unchanged, without a line of ours. A trace that begins here
        states whether it is sampled, so that backends do not begin traces of their own.
        """
        given = headers.get(b"traceparent")
        if given is None:
            start = self._taken
            if start == len(self._ids):
                self._make_ids()
                start = 0
            self._taken = start + _IDS_CHARACTERS
            ids = self._ids[start : start + _IDS_CHARACTERS]
            if ids >= self._bound:
                return self._begin + ids + b"00\r\n", None
            lower_half, span_id, _ = ids.split(b"-")
            return self._sampled(self._begin[len(_LINE) :] + lower_half, span_id, b"", method, path)
        if _is_unsampled(given):
            return b"", None
        found = _PARENT.fullmatch(given)
        if found is not None and _is_valid(found[1], found[2], found[3], found[5]):
            if not int(found[4], 16) & _SAMPLED:
                return b"", None  # of a later version
            del headers[b"traceparent"]
            return self._sampled(found[2], self._new_span_id(), found[3], method, path)
        del headers[b"traceparent"]
        headers.pop(b"tracestate", None)  # it belongs to the trace that cannot be continued
        return self.begin(headers, method, path)

    def _make_ids(self) -> None:
        """Makes many ids with one call of the kernel: a call for each would double the cost of a request's decision."""
        self._begin = _LINE + hexlify(self._random_bytes(_ID_BYTES))
        random = self._random_bytes(2 * _ID_BYTES * _TRACES_AT_ONCE)
        self._ids = hexlify(random, b"-", _ID_BYTES) + b"-"

    def _sampled(
        self, trace_id: bytes, span_id: bytes, parent_id: bytes, method: bytes, path: bytes
    ) -> tuple[bytes, RequestTrace | None]:
        ids = trace_id, span_id, parent_id
        trace = RequestTrace(ids, method.decode("latin-1"), path.decode("latin-1"), self._clock, self._new_span_id)
        return b"traceparent: %b\r\n" % trace.header(), trace

    def _new_span_id(self) -> bytes:
        return hexlify(self._random_bytes(_ID_BYTES))


def _is_unsampled(given: bytes) -> bool:
    """Whether this is a valid `traceparent` of today's version whose trace is not sampled: the expression takes four
    times as long to see that.
    """
    return (
        len(given) == 55
        and given[54:] in _EVEN
        and given.startswith(b"00-")
        and given[35] == given[52] == _DASH
        and given.translate(None, _HEX) == b"---"
        and given[3:35] != _NO_TRACE
        and given[36:52] != _NO_SPAN
    )


def _is_valid(version: bytes, trace_id: bytes, span_id: bytes, more: bytes | None) -> bool:
    """Whether a `traceparent` is valid; later versions may have more parts."""
    return version != b"ff" and (version != b"00" or more is None) and trace_id != _NO_TRACE and span_id != _NO_SPAN
