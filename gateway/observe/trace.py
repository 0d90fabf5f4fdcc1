"""What is traced of a request: its place in a trace (W3C's `traceparent`), and what happened when.

Spans are made of it after the request, in another thread (`observe/tracing.py`). Before that, a request costs the
sampling decision; one that is sampled also notes its attempts.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_SAMPLED = 1
_IDS_AT_ONCE = 128
ID_BYTES = 24  # of a trace and of a span
_ALL = 1 << 64
_MOST_PATH_BYTES = 256


def random_ids() -> Iterator[str]:
    """Random ids in hex, each for a trace and a span. One call to the kernel makes many, because each call costs."""
    while True:
        block = secrets.token_hex(ID_BYTES * _IDS_AT_ONCE)
        for start in range(0, len(block), 2 * ID_BYTES):
            yield block[start : start + 2 * ID_BYTES]


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
        ids: tuple[str, str],
        parent_id: str,
        method: str,
        path: str,
        clock: Callable[[], float],
        new_span_id: Callable[[], str],
    ) -> None:
        self.trace_id, self._next_span_id = ids
        self.span_id = new_span_id()
        self.parent_id = parent_id
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

    def __init__(self, sample_ratio: float, new_ids: Callable[[], str], clock: Callable[[], float]) -> None:
        bound = round(sample_ratio * _ALL)
        self.sample_ratio = sample_ratio
        self._bound = f"{bound:016x}" if bound < _ALL else "g"  # compared as text, which needs no conversion
        self._new_ids = new_ids
        self._clock = clock

    def _new_span_id(self) -> str:
        return self._new_ids()[32:]

    def begin(self, headers: dict[bytes, bytes], method: bytes, path: bytes) -> RequestTrace | None:
        """The trace of a request, if it is sampled. Its headers get the `traceparent` that backends are to see.

        A trace that its client does not sample is passed on as it is. One that begins here tells backends whether it
        is sampled, so that they do not begin traces of their own.
        """
        given, parent_id, ids = headers.get(b"traceparent"), "", self._new_ids()
        trace_id = ids[:32]
        if given is not None:
            found = _PARENT.fullmatch(given)
            if found is not None and _is_valid(found[1], found[2], found[3], found[5]):
                if not int(found[4], 16) & _SAMPLED:
                    return None
                trace_id, parent_id = found[2].decode(), found[3].decode()
            else:
                headers.pop(b"tracestate", None)  # it belongs to the trace that cannot be continued
        if not parent_id and ids[16:32] >= self._bound:
            headers[b"traceparent"] = b"00-%b-%b-00" % (trace_id.encode(), ids[32:].encode())
            return None
        target = path.partition(b"?")[0][:_MOST_PATH_BYTES].decode("latin-1")
        trace = RequestTrace(
            (trace_id, ids[32:]), parent_id, method.decode("latin-1"), target, self._clock, self._new_span_id
        )
        headers[b"traceparent"] = trace.header()
        return trace


def _is_valid(version: bytes, trace_id: bytes, span_id: bytes, more: bytes | None) -> bool:
    """Whether a `traceparent` is one; later versions may have more parts."""
    return version != b"ff" and (version != b"00" or more is None) and trace_id != _NO_TRACE and span_id != _NO_SPAN
