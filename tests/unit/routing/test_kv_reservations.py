"""What is reserved equals a naive count over all running requests, whatever their order of coming and going."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.core.request import Demand
from gateway.core.routing.kv_reservations import KvLedger, Reservation, _RadixNode
from tests.recount import taken_tokens
from tests.unit.routing.crowds import reserve

BLOCK = 16


def chain(*blocks: int) -> tuple[int, ...]:
    """Keys that stand for these blocks and all before each, as hashes do."""
    return tuple(hash(blocks[:end]) for end in range(1, len(blocks) + 1))


def ask_of(blocks: tuple[int, ...], *, block_tokens: int = 100, rest: int = 0, **fields: object) -> Demand:
    """A prompt of these blocks and some more tokens; sizes are in tokens, so that all prompts measure alike."""
    size = len(blocks) * block_tokens + rest
    edges = tuple(range(block_tokens, size + 1, block_tokens))[: len(blocks)]
    return Demand("m", keys=chain(*blocks), edges=edges, prompt_size=size, prompt_tokens=max(1, size), **fields)  # type: ignore[arg-type]


def whole(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def keys_of(node: _RadixNode) -> list[int]:
    """The keys of it and of all that lean on it."""
    below = [key for each in node.children.values() for key in keys_of(each)]
    return [*node.creator.keys[node.start : node.end], *below]


BLOCKS = st.lists(st.integers(0, 1), max_size=9).map(tuple)
ASKS = st.builds(
    ask_of,
    BLOCKS,
    rest=st.integers(0, 40),
    sequences=st.sampled_from([0, 1, 1, 1, 2, 5]),
    reads_cache=st.sampled_from([True, True, True, False]),
    output_tokens=st.sampled_from([None, 30, 100]),
)


class LedgerMachine(RuleBasedStateMachine):
    """Requests come, grow, and leave in any order, some of them twice; prompts are alike in any number of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = KvLedger(BLOCK)
        self.live: dict[Reservation, tuple[Demand, int]] = {}  # and what it takes beyond its blocks
        self.gone: list[Reservation] = []

    def _naive(self) -> int:
        used = {key for ask, _ in self.live.values() if ask.reads_cache and ask.sequences for key in ask.keys}
        return 100 * len(used) + sum(own for _, own in self.live.values())

    def _own(self, ask: Demand, output_tokens: int) -> int:
        shared = 100 * len(ask.keys) if ask.reads_cache else 0
        rest = whole(max(0, ask.prompt_tokens - shared))
        return rest + ask.sequences * whole(output_tokens) if ask.sequences else 0

    @rule(ask=ASKS, output_tokens=st.integers(0, 50))
    def reserve(self, ask: Demand, output_tokens: int) -> None:
        before, needed = self.ledger.taken_tokens, self.ledger.needed(ask, output_tokens)
        most = ask.sequences and ask.prompt_tokens + BLOCK + ask.sequences * (output_tokens + BLOCK)
        assert self.ledger.taken_tokens == before
        reservation = reserve(self.ledger, ask, output_tokens)
        assert reservation not in self.live
        self.live[reservation] = (ask, self._own(ask, output_tokens))
        assert self.ledger.taken_tokens - before == needed <= most

    @rule(data=st.data(), tokens=st.integers(1, 60))
    def tokens_come(self, data: st.DataObject, tokens: int) -> None:
        if self.live:
            reservation = data.draw(st.sampled_from(list(self.live)))
            before = reservation.output_tokens
            left = self.ledger.on_tokens(reservation, tokens)
            ask, own = self.live[reservation]
            self.live[reservation] = (ask, own + reservation.output_tokens - before)
            limit = ask.sequences * whole(ask.output_tokens if ask.output_tokens is not None else 1 << 40)
            assert left > 0
            assert before <= reservation.output_tokens <= max(before, limit)
            assert reservation.output_tokens >= min(limit, reservation.streamed_tokens)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.live:
            reservation = data.draw(st.sampled_from(list(self.live)))
            self.ledger.release(reservation)
            del self.live[reservation]
            self.gone.append(reservation)

    @rule(data=st.data())
    def what_has_left_neither_grows_nor_leaves_again(self, data: st.DataObject) -> None:
        if self.gone:
            reservation = data.draw(st.sampled_from(self.gone))
            self.ledger.on_tokens(reservation, 100)
            self.ledger.release(reservation)

    @invariant()
    def what_is_taken_is_the_naive_count(self) -> None:
        assert self.ledger.taken_tokens == self._naive() == taken_tokens(self.ledger)
        assert len(self.ledger) == len(self.live)

    @invariant()
    def just_the_keys_of_those_who_run_are_known(self) -> None:
        used = {key for ask, _ in self.live.values() if ask.reads_cache and ask.sequences for key in ask.keys}
        assert sorted(keys_of(self.ledger._root)) == sorted(used)

    def teardown(self) -> None:
        for reservation in list(self.live):
            self.ledger.release(reservation)
        assert repr(self.ledger) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_prefix_in_use_by_several_is_counted_once() -> None:
    ledger = KvLedger(BLOCK)
    first, second = ask_of((1, 2, 3), rest=10), ask_of((1, 2, 4), rest=10)
    reserve(ledger, first, 20)
    assert ledger.taken_tokens == 300 + 16 + 32
    assert ledger.needed(second, 20) == 100 + 16 + 32
    reserve(ledger, second, 20)
    assert ledger.taken_tokens == 400 + 2 * (16 + 32)


def test_what_others_still_use_stays_counted_when_its_first_user_leaves() -> None:
    ledger = KvLedger(BLOCK)
    first = reserve(ledger, ask_of((1, 2, 3)), 16)
    second = reserve(ledger, ask_of((1, 2, 4)), 16)
    ledger.release(first)
    assert ledger.taken_tokens == 300 + 16
    assert ledger.needed(ask_of((1, 2, 3)), 16) == 100 + 16
    ledger.release(second)
    assert ledger.taken_tokens == 0


def test_each_sequence_has_an_answer_of_its_own_in_whole_blocks() -> None:
    ledger = KvLedger(BLOCK)
    reservation = reserve(ledger, ask_of((1,), sequences=4), 17)
    assert ledger.taken_tokens == 100 + 4 * 32
    assert reservation.output_tokens == 4 * 32


def test_an_answer_that_outlives_its_reservation_grows_by_a_tenth_in_whole_blocks() -> None:
    ledger = KvLedger(BLOCK)
    reservation = reserve(ledger, ask_of(()), 320)
    assert [ledger.on_tokens(reservation, tokens) for tokens in (0, 100, 219)] == [8, 8, 1]
    assert ledger.taken_tokens == 16 + 320
    assert ledger.on_tokens(reservation, 1) == 8
    assert ledger.taken_tokens == 16 + 352
    assert ledger.on_tokens(reservation, 132) == 8  # many at once: to the next whole block
    assert ledger.taken_tokens == 16 + 464


def test_an_answer_grows_no_further_than_its_client_allows() -> None:
    ledger = KvLedger(BLOCK)
    reservation = reserve(ledger, ask_of((), output_tokens=100), 64)
    assert ledger.on_tokens(reservation, 70) == 8
    assert ledger.taken_tokens == 16 + 80
    assert ledger.on_tokens(reservation, 20) == 6
    assert ledger.taken_tokens == 16 + 96
    assert ledger.on_tokens(reservation, 6) == 8
    assert ledger.taken_tokens == 16 + 112
    assert ledger.on_tokens(reservation, 16) > 1 << 40  # no further report is needed
    assert ledger.taken_tokens == 16 + 112


def test_an_answer_that_is_reserved_whole_is_not_followed_beyond_that() -> None:
    ledger = KvLedger(BLOCK)
    reservation = reserve(ledger, ask_of((), output_tokens=64), 64)
    assert ledger.on_tokens(reservation, 60) == 4
    assert ledger.on_tokens(reservation, 7) > 1 << 40  # some events are no tokens
    assert ledger.taken_tokens == 16 + 64


def test_what_takes_no_sequence_and_what_has_left_does_not_grow() -> None:
    ledger = KvLedger(BLOCK)
    lookup, gone = reserve(ledger, ask_of((), sequences=0), 0), reserve(ledger, ask_of(()), 16)
    ledger.release(gone)
    assert ledger.on_tokens(lookup, 1) > 1 << 40
    assert ledger.on_tokens(gone, 100) > 1 << 40
    assert ledger.taken_tokens == 0


def test_what_takes_no_sequence_takes_nothing() -> None:
    ledger = KvLedger(BLOCK)
    lookup = ask_of((1, 2), sequences=0)
    assert ledger.needed(lookup, 100) == 0
    ledger.release(reserve(ledger, lookup, 100))
    assert repr(ledger) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"


@pytest.mark.parametrize("ledger", [KvLedger(BLOCK, shares=False), KvLedger(BLOCK)], ids=["engine", "request"])
def test_where_the_cache_is_not_read_every_request_counts_for_itself(ledger: KvLedger) -> None:
    ask = ask_of((1, 2), reads_cache=ledger.shares is False)
    reserve(ledger, ask, 0)
    reserve(ledger, ask, 0)
    assert ledger.taken_tokens == 2 * whole(200)


def test_prompts_that_are_measured_differently_and_keys_that_collide_leave_nothing_behind() -> None:
    """A later request may know the tokens of a prefix better; and keys are no more than 64-bit hashes."""
    random = Random(0)
    for _ in range(300):
        ledger, live = KvLedger(BLOCK), []
        for _ in range(random.randrange(1, 12)):
            blocks = tuple(random.randrange(2) for _ in range(random.randrange(1, 8)))
            ask = ask_of(blocks, block_tokens=random.randrange(1, 200))
            if random.random() < 0.5:
                ask = replace(ask, keys=tuple(random.randrange(6) for _ in blocks))
            live.append(reserve(ledger, ask, random.randrange(50)))
            assert ledger.taken_tokens == taken_tokens(ledger)
        random.shuffle(live)
        for reservation in live:
            ledger.release(reservation)
            assert ledger.taken_tokens == taken_tokens(ledger) >= 0
        assert repr(ledger) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"


def test_streams_at_different_places_leave_room_that_the_sum_of_their_ends_does_not() -> None:
    ledger = KvLedger(BLOCK)
    streams = [reserve(ledger, ask_of((), rest=16, streams=True), 320) for _ in range(4)]
    assert ledger.taken_tokens == ledger.forecast(0.0).peak_tokens == 4 * 336
    for place, stream in enumerate(streams):
        ledger.on_tokens(stream, 80 * place)
    assert ledger.forecast(0.003).peak_tokens == 4 * 336, "a forecast is good for a while"
    assert ledger.forecast(0.3).peak_tokens == 4 * (16 + 80) + (240 + 160 + 80)  # when the one that is ahead ends
    assert ledger.taken_tokens == 4 * 336
    ledger.release(streams[3])
    assert ledger.forecast(0.3).peak_tokens == 3 * (16 + 160) + 160 + 80


def test_an_answer_that_is_not_streamed_is_reckoned_whole_until_it_ends() -> None:
    ledger = KvLedger(BLOCK)
    reserve(ledger, ask_of((), rest=16), 320)
    stream = reserve(ledger, ask_of((), rest=16, streams=True), 320)
    ledger.on_tokens(stream, 160)
    assert ledger.forecast(0.0).peak_tokens == 2 * 336
    assert ledger.peak_with(ask_of((), rest=16), 320, 0.0) == 3 * 336
    assert ledger.peak_with(ask_of((), rest=16, streams=True), 320, 0.0) == 2 * 336 + 16 + 160


def test_a_prefix_that_others_use_outlasts_a_stream_and_its_own_prompt_does_not() -> None:
    ledger = KvLedger(BLOCK)
    reserve(ledger, ask_of((1,), streams=False), 16)
    shared = reserve(ledger, ask_of((1, 2), streams=True), 16)
    assert shared.tokens_alone == 100 + 16
    assert reserve(ledger, ask_of((3,), streams=True), 32).tokens_alone == 100 + 32
    assert ledger.forecast(0.0).base_tokens == 100 + 16


def test_a_newcomer_of_several_sequences_is_never_reckoned_too_small() -> None:
    ledger = KvLedger(BLOCK)
    running = reserve(ledger, ask_of((), rest=16, streams=True), 320)
    ledger.on_tokens(running, 160)
    pair = ask_of((), rest=16, sequences=2, streams=True)
    foreseen = ledger.peak_with(pair, 320, 0.0)
    reserve(ledger, pair, 320)
    assert ledger.forecast(0.0).peak_tokens <= foreseen <= ledger.taken_tokens


def test_a_key_that_means_another_block_elsewhere_in_a_prompt_is_not_taken_for_it() -> None:
    ledger, held = KvLedger(BLOCK), []
    for number, keys in enumerate([(1, 2, 3, 4), (1, 7), (1, 2, 7, 8)]):
        ask = replace(ask_of((0,) * len(keys)), keys=keys)
        held.append(reserve(ledger, ask, 0))
        assert ledger.taken_tokens == taken_tokens(ledger) == (400, 500, 700)[number]
    for reservation in held:
        ledger.release(reservation)
    assert repr(ledger) == "<KvLedger 0 tokens, 0 requests, 0 prefixes>"


def test_events_that_hold_several_tokens_are_learned_from_what_engines_count() -> None:
    ledger = KvLedger(BLOCK)
    for _ in range(40):
        done = reserve(ledger, ask_of((), streams=True), 320)
        ledger.on_tokens(done, 160)
        ledger.on_usage(done, 320)
        ledger.release(done)
    short = reserve(ledger, ask_of((), streams=True), 320)
    ledger.on_tokens(short, 2)
    ledger.on_usage(short, 320)  # teaches nothing
    ledger.release(short)
    running = reserve(ledger, ask_of((), streams=True), 320)
    ledger.on_tokens(running, 80)
    ends_together, it_ends_later = (16 + 320) + (16 + 160), (16 + 240) + (16 + 160)
    assert ends_together - BLOCK <= ledger.peak_with(ask_of((), streams=True), 160, 1.0) <= ends_together
    assert it_ends_later < ends_together - BLOCK
