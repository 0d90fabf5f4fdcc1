"""The ledger: one entry for each request of a key with limits, from its admission until its usage is known. Pure.

A request is charged its expected tokens. Its entry is closed once, with the used tokens, by the owner of the work: the
handler when the answer ends, the sender of a batch line, or the part that holds a response in the background. Limits
and usage count the numbers of the same record, so they agree.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest
from gateway.core.routing.estimates import Estimates

_UPLOAD_BYTES_A_TOKEN: Final = 64  # Whisper makes 50 tokens of a second of speech, for which 3 KB are a low bit rate
_CUT: Final = frozenset(("client_gone", "cut_by_shutdown"))


class Limits(Protocol):
    """The limits of one API key. `most_tokens`: of one request; None = any number."""

    most_tokens: int | None

    @property
    def has_budget(self) -> bool: ...

    def charge(self, tokens: int) -> int:
        """Charge a request's expected tokens. Returns the day; `correct` must follow with it when the request ends.

        Raises RateLimited or QuotaExceeded.
        """

    def correct(self, charged_tokens: int, used_tokens: int, *, counts: bool, day: int = 0) -> None:
        """A request ended: replace its charge by its usage.

        `counts` as a request: a backend worked, or it was answered.
        """

    def charge_line(self, tokens: int) -> int:
        """The same for a line of an offline batch, to which the budgets alone apply; `correct_line` must follow."""

    def correct_line(self, charged_tokens: int, used_tokens: int, *, day: int) -> None: ...

    def spend(self, tokens: int) -> int:
        """Charge a running request for unexpected tokens, into debt if need be. Returns the day, for `correct`."""

    def check_left(self) -> None:
        """Raises QuotaExceeded if a budget is used up."""

    def headers(self) -> bytes:
        """The x-ratelimit header lines of every response."""


class Entry:
    """A request's charge, and its day. `is_line`: of an offline batch, which has budgets only."""

    __slots__ = ("_charged_tokens", "_day", "_is_line", "_limits")

    def __init__(self, limits: Limits, expected_tokens: int, *, is_line: bool) -> None:
        """Raises RateLimited or QuotaExceeded if a limit is reached."""
        self._limits = limits
        self._charged_tokens = expected_tokens
        self._is_line = is_line
        self._day = limits.charge_line(expected_tokens) if is_line else limits.charge(expected_tokens)

    def spend(self, used_tokens: int) -> None:
        """Update the used tokens. Raises QuotaExceeded if they exceed the expected ones, and a budget is used up."""
        more = used_tokens - self._charged_tokens
        if more > 0:
            self._charged_tokens = used_tokens
            self._day = self._limits.spend(more)
            self._limits.check_left()

    def close(self, used_tokens: int, *, counts: bool) -> None:
        """Replace the charge by the usage."""
        if self._is_line:
            self._limits.correct_line(self._charged_tokens, used_tokens, day=self._day)
        else:
            self._limits.correct(self._charged_tokens, used_tokens, counts=counts, day=self._day)


class RequestLedger:
    """Owner of the open entries. `limits`: of keys that have any, by name.

    `finished` gets the record of each request when its answer has ended.
    """

    def __init__(self, estimates: Estimates, finished: Callable[[Record], None]) -> None:
        self._estimates = estimates
        self._finished = finished
        self._counted: list[Callable[[Record], None]] = []
        self._open: dict[Record, Entry] = {}
        self.limits: Mapping[str, Limits] = MappingProxyType({})

    def __len__(self) -> int:
        return len(self._open)

    def count(self, consumer: Callable[[Record], None]) -> None:
        """This gets the record of each response that went on after its answer."""
        self._counted.append(consumer)

    def apply(self, limits: Mapping[str, Limits]) -> None:
        """Take over the limits of other keys, for the next requests."""
        self.limits = limits

    def open(self, request: InferenceRequest, record: Record, limits: Limits) -> None:
        """Admit a request: charge its key the expected tokens. Raises RateLimited or QuotaExceeded."""
        expected, most = sum(self._expected(request.demand, request.worked_bytes)), limits.most_tokens
        if request.worked_bytes and most is not None:
            expected = min(expected, most)  # too rough an estimate to reject an upload as too large
        self._open[record] = Entry(limits, expected, is_line=False)

    def open_line(self, request: InferenceRequest, record: Record) -> None:
        """Charge a line of an offline batch to the budgets of its key, if it has any. Raises QuotaExceeded."""
        record.will_be_resent()
        limits = self.limits.get(record.client)
        if limits is not None and limits.has_budget:
            self._open[record] = Entry(limits, sum(self._expected(request.demand, 0)), is_line=True)

    def spend(self, record: Record, prompt_tokens: int, completion_tokens: int) -> None:
        """Update the used tokens of a running request. Raises QuotaExceeded if its key has none left."""
        record.spent(prompt_tokens, completion_tokens)
        entry = self._open.get(record)
        if entry is not None:
            entry.spend(prompt_tokens + completion_tokens)

    def finished(self, record: Record) -> None:
        """The answer has ended: close its entry, unless the engine continues the response. To be called once."""
        if record.later is None:
            if self._open or not record.prompt_tokens:
                self._close(record)
        elif record in self._open:
            self._open[record.later] = self._open.pop(record)
        self._finished(record)

    def over(self, later: Record) -> None:
        """The response that went on after its answer is over: close its entry. To be called once, after `finished`."""
        self._close(later)
        for count in self._counted:
            count(later)

    def _close(self, record: Record) -> None:
        if not (record.prompt_tokens or record.completion_tokens or record.is_session):
            self._estimate(record)
        if (entry := self._open.pop(record, None)) is not None:
            counts = record.attempts > 0 or record.outcome == "completed"  # an answer may need no backend
            entry.close(record.prompt_tokens + record.completion_tokens, counts=counts)

    def _estimate(self, record: Record) -> None:
        """Estimate unreported usage: prompt and events of a cut stream, the expected tokens of other work.

        A request that failed before its client had a part of the answer costs nothing.
        """
        demand, outcome, streamed_tokens = record.requested, record.outcome, record.streamed_tokens
        is_whole = outcome == "completed"
        has_begun = record.attempts > 0 if outcome in _CUT else record.has_begun and outcome != "refused_by_backend"
        if demand is not None and demand.sequences and (is_whole or (has_begun and not record.is_resent)):
            prompt_tokens, expected_tokens = self._expected(demand, record.upload_bytes)
            is_cut = demand.streams and not is_whole
            record.counted(prompt_tokens, streamed_tokens if is_cut else max(expected_tokens, streamed_tokens))

    def _expected(self, demand: Demand, upload_bytes: int) -> tuple[int, int]:
        """Tokens of prompt and answers; none of a request that the engine computes nothing for."""
        if upload_bytes:
            return max(1, upload_bytes // _UPLOAD_BYTES_A_TOKEN), 0
        if not demand.sequences:
            return 0, 0
        output_tokens = self._estimates.expected_output_tokens(demand.model, demand.output_tokens)
        return demand.prompt_tokens, round(demand.sequences * output_tokens)
