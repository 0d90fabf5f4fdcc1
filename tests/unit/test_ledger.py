"""The ledger: what is opened is closed once, and what is charged in the end is what was used."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.errors import GatewayError, QuotaExceeded
from gateway.core.ledger import RequestLedger
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.request import Demand, InferenceRequest, Kind, Usage
from gateway.core.routing.estimates import Estimates
from gateway.features.keys.limits import AllLimits
from gateway.features.keys.rate_limits import KeyLimits
from gateway.features.keys.settings import KeyConfig
from gateway.features.keys.usage import KeyUsage, totals
from tests.unit.front.wires import Clock

NOON_SECONDS = 1_800_000_000.0
OUTPUT_TOKENS = 200  # of an answer of unknown length
DAY_SECONDS = 86400.0


class Books:
    """The ledger of one key, and what it passes records on to."""

    def __init__(self, **limits: int) -> None:
        self.clock, self.unix = Clock(), Clock(NOON_SECONDS)
        self.usage, self.metrics = KeyUsage(self.unix), Metrics()
        self.usage.apply(has_keys=True)
        self.records: list[Record] = []
        self.ledger = RequestLedger(Estimates(), self.records.append)
        for consumer in (self.usage.counted, self.metrics.counted):
            self.ledger.count(consumer)
        self.all_limits = AllLimits(self.clock, self.unix)
        self.follow(**limits)
        self._made = 0

    def follow(self, **limits: int) -> None:
        self.all_limits.apply([KeyConfig(name="a", key="sk-a", **limits)])  # type: ignore[arg-type]
        self.ledger.apply(self.all_limits.by_name)

    @property
    def limits(self) -> KeyLimits:
        return self.all_limits.by_name["a"]

    def open(self, *, is_line: bool = False, client: str = "a", worked_bytes: int = 0, **demand: Any) -> Record:
        """Admit a request. Raises RateLimited or QuotaExceeded."""
        self._made += 1
        asked = Demand("m", **demand)
        request = InferenceRequest("chat", Kind.GENERATE, b"POST", b"/", asked, "id", worked_bytes=worked_bytes)
        record = Record(f"id-{self._made}", "chat", 0.0, client=client)
        record.parsed(asked, "m")
        if is_line:
            self.ledger.open_line(request, record)
        elif client in self.ledger.limits:
            self.ledger.open(request, record, self.ledger.limits[client])
        record.placed("m", "b", 0.0, 0)
        return record

    def finish(self, record: Record, outcome: str = "completed", usage: Usage | None = None) -> None:
        if usage is not None:
            record.answered(usage, None, 0, client_was_slow=False)
        status = 200 if outcome == "completed" or record.has_begun else 0
        record.ended(outcome, status, 1.0)
        self.ledger.finished(record)

    def spent(self, period: str = "day") -> int:
        return self.limits.spent()[period][1]

    @property
    def shown(self) -> int:
        """Tokens on the usage page."""
        self.usage.finished(self.records)
        self.records.clear()
        return sum(counts[1] + counts[3] for *_, counts in totals(self.usage.state(), 0, 1 << 30, by_day=False))


@pytest.fixture
def books() -> Books:
    return Books(tokens_per_day=1000)


def test_a_request_is_charged_what_it_is_expected_to_need_then_what_it_used(books: Books) -> None:
    record = books.open(prompt_tokens=100, sequences=2)
    assert (books.spent(), len(books.ledger)) == (500, 1)
    books.finish(record, usage=Usage(90, 10, 50))
    assert (books.spent(), books.shown, len(books.ledger)) == (100, 100, 0)


def cut(record: Record, streamed: int, *, has_begun: bool) -> Record:
    record.attempted(0.1, streamed, has_begun)
    return record


@pytest.mark.parametrize(
    ("streams", "outcome", "has_begun", "tokens", "streamed"),
    [
        (True, "completed", True, 600, 500),
        (True, "client_gone", True, 107, 7),
        (True, "cut_by_shutdown", False, 107, 7),
        (True, "interrupted", True, 107, 7),
        (True, "backend_error", False, 0, 7),
        (False, "client_gone", False, 300, 7),
        (False, "interrupted", True, 300, 7),
        (False, "backend_error", False, 0, 7),
        (False, "refused_by_backend", True, 0, 7),
        (True, "completed", True, 300, 7),
    ],
)
def test_what_is_not_reported_is_estimated(
    streams: bool, outcome: str, has_begun: bool, tokens: int, streamed: int, books: Books
) -> None:
    record = cut(books.open(prompt_tokens=100, streams=streams), streamed, has_begun=has_begun)
    books.finish(record, outcome)
    assert (books.spent(), books.shown) == (tokens, tokens)


def test_what_never_reached_a_backend_costs_nothing(books: Books) -> None:
    record = books.open(prompt_tokens=100)
    record.attempts = 0
    books.finish(record, "client_gone")
    assert (books.spent(), books.shown) == (0, 0)


def test_an_upload_is_expected_by_its_length_and_costs_by_what_came(books: Books) -> None:
    with pytest.raises(QuotaExceeded):
        Books(tokens_per_day=1).open(prompt_tokens=100)
    record = books.open(worked_bytes=640_000)
    assert books.spent() == 1000  # as much as the key may use: too rough an estimate to refuse it
    record.uploaded(6400)
    books.finish(record)
    assert (books.spent(), books.shown) == (100, 100)


def test_what_computes_no_tokens_is_free(books: Books) -> None:
    record = books.open(sequences=0)
    assert books.spent() == 0
    books.finish(record)
    assert (books.spent(), books.shown) == (0, 0)


def test_a_line_costs_what_its_answer_reports_and_nothing_if_it_is_sent_again(books: Books) -> None:
    books.finish(books.open(is_line=True, prompt_tokens=1), usage=Usage(5, 3))
    assert (books.spent(), books.shown) == (8, 8)
    for outcome, streamed, has_begun in (
        ("paused", 7, True),
        ("cut_by_shutdown", 7, True),
        ("backend_error", 0, False),
    ):
        books.finish(cut(books.open(is_line=True, streams=True), streamed, has_begun=has_begun), outcome)
        assert (books.spent(), books.shown, len(books.ledger)) == (8, 8, 0)
    books.finish(books.open(is_line=True, prompt_tokens=1))
    assert (books.spent(), books.shown) == (8 + 201, 8 + 201)


def test_rates_do_not_apply_to_lines_and_budgets_do() -> None:
    books = Books(tokens_per_day=500, tokens_per_minute=1, requests_per_minute=1, max_concurrent_requests=1)
    lines = [books.open(is_line=True, prompt_tokens=1) for _ in range(2)]
    with pytest.raises(QuotaExceeded, match="98 remain"):
        books.open(is_line=True, prompt_tokens=1)
    assert books.limits.running == 0
    for line in lines:
        books.finish(line, usage=Usage(1, 1))
    assert books.spent() == 4
    assert books.limits.account() == {"requests": 0.0, "tokens": 0.0}


def test_keys_without_limits_have_no_entries_and_their_usage(books: Books) -> None:
    record = books.open(client="b", prompt_tokens=100)
    line = books.open(client="b", is_line=True)
    assert len(books.ledger) == 0
    books.finish(record)
    books.finish(line, usage=Usage(1, 1))
    assert books.shown == 302


def test_a_session_is_charged_as_it_goes_and_on_the_day_on_which_it_uses_tokens() -> None:
    books = Books(tokens_per_day=300, tokens_per_month=10_000)
    session = books.open()
    for used in (0, 100, 201, 250):
        books.ledger.spend(session, used // 2, used - used // 2)
    assert books.spent() == 250
    books.unix.now += DAY_SECONDS
    books.ledger.spend(session, 400, 0)
    assert (books.spent("day"), books.spent("month")) == (150, 400)
    with pytest.raises(QuotaExceeded):
        books.ledger.spend(session, 550, 1)
    books.finish(session, "quota_exceeded")
    assert (books.spent("day"), books.spent("month"), books.shown) == (301, 551, 551)


def test_an_estimate_that_a_report_replaces_is_given_back(books: Books) -> None:
    session = books.open()
    books.ledger.spend(session, 600, 0)
    assert books.spent() == 600
    books.ledger.spend(session, 10, 30)
    books.finish(session)
    assert (books.spent(), books.shown) == (40, 40)


def test_a_response_that_goes_on_stays_open_and_counts_as_running_until_it_is_over() -> None:
    books = Books(tokens_per_day=1000, max_concurrent_requests=1)
    record = books.open(prompt_tokens=1)
    later = record.go_on()
    books.finish(record)
    assert (len(books.ledger), books.limits.running, books.spent(), books.shown) == (1, 1, 201, 0)
    later.answered(Usage(5, 7), None, 0, client_was_slow=False)
    books.ledger.over(later)
    assert (len(books.ledger), books.limits.running, books.spent(), books.shown) == (0, 0, 12, 12)


class LedgerMachine(RuleBasedStateMachine):
    """Requests, lines, sessions and responses of one key that begin, use tokens and end in any order."""

    @initialize(limit=st.integers(1000, 100_000))
    def begin(self, limit: int) -> None:
        self.limit = limit
        self.books = Books(tokens_per_day=limit, tokens_per_minute=limit, max_concurrent_requests=20)
        self.open: list[tuple[Record, str, int]] = []  # with its kind, and what it holds of the budget
        self.used = 0  # by what has ended

    @rule(
        kind=st.sampled_from(["request", "line", "session", "background"]),
        prompt=st.integers(0, 500),
        streams=st.booleans(),
        limit=st.none() | st.integers(0, 300),
    )
    def arrive(self, kind: str, prompt: int, streams: bool, limit: int | None) -> None:
        before = self.books.spent()
        try:
            record = self.books.open(is_line=kind == "line", prompt_tokens=prompt, streams=streams, output_tokens=limit)
        except GatewayError:
            assert self.books.spent() == before
            return
        if kind == "background":
            later = record.go_on()
            self.books.finish(record)
            record = later
        elif kind == "session":
            self.books.ledger.spend(record, 0, 0)
        self.open.append((record, kind, self.books.spent() - before))

    @rule(data=st.data(), tokens=st.integers(0, 1000))
    def use(self, data: st.DataObject, tokens: int) -> None:
        sessions = [place for place, (_, kind, _) in enumerate(self.open) if kind == "session"]
        if sessions:
            place = data.draw(st.sampled_from(sessions))
            record, kind, held = self.open[place]
            try:
                self.books.ledger.spend(record, tokens // 2, tokens - tokens // 2)
            except QuotaExceeded:
                assert self.books.spent() >= self.limit
            self.open[place] = record, kind, max(held, tokens)

    @rule(
        data=st.data(),
        usage=st.none() | st.builds(Usage, st.integers(0, 300), st.integers(0, 300)),
        outcome=st.sampled_from(["completed", "client_gone", "backend_error", "interrupted", "paused"]),
        has_begun=st.booleans(),
    )
    def end(self, data: st.DataObject, usage: Usage | None, outcome: str, has_begun: bool) -> None:
        if not self.open:
            return
        record, kind, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        before = self.books.shown
        if kind == "background":
            if usage is not None:
                record.answered(usage, None, 0, client_was_slow=False)
            self.books.ledger.over(record)
        else:
            usage = usage if outcome == "completed" and kind != "session" else None
            self.books.finish(cut(record, 5, has_begun=has_begun), outcome, usage)
        if usage is not None and usage.prompt_tokens + usage.completion_tokens:
            assert self.books.shown - before == usage.prompt_tokens + usage.completion_tokens
        self.used += self.books.shown - before

    @invariant()
    def what_is_open_is_counted_once(self) -> None:
        if hasattr(self, "books"):
            assert len(self.books.ledger) == len(self.open)
            assert self.books.limits.running == sum(kind != "line" for _, kind, _ in self.open)

    @invariant()
    def the_budget_has_what_was_used_and_what_is_held(self) -> None:
        if hasattr(self, "books"):
            assert self.books.spent() == self.used + sum(held for *_, held in self.open) >= 0
            assert self.books.shown == self.used

    def teardown(self) -> None:
        while hasattr(self, "books") and self.open:
            record, kind, _ = self.open.pop()
            if kind == "background":
                self.books.ledger.over(record)
            else:
                self.books.finish(record)
        if hasattr(self, "books"):
            assert len(self.books.ledger) == self.books.limits.running == 0
            assert self.books.spent() == self.books.shown


TestLedger = LedgerMachine.TestCase
