import pytest

from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Calibration, CostModel, OutputLengths
from gateway.core.scheduling.admission import Capacity, slots_of
from tests.unit.routing.crowds import reserve, work

CAPACITY = Capacity(Calibration(CostModel()), OutputLengths(), kv_headroom=0.95, window_seconds=0.1)


def engine(
    *, cap: int = 4, slots: int | None = None, kv: int | None = None, running: int = 0, ahead: float = 0.0
) -> Engine:
    """An engine with so many sequences, of which one is in prefill if there is some ahead."""
    made = Engine(0, "a", cap=cap, slots=cap if slots is None else slots, kv_cache_tokens=kv)
    for number in range(running):
        started = work(1, 400, ahead if number == 0 else 0.0, observable=True)
        made.load.start(started, 0.0)
        if number or not ahead:
            made.load.first_token(started, 0.0)
    return made


@pytest.mark.parametrize(
    ("where", "is_open"),
    [
        (engine(), True),
        (engine(running=3), True),
        (engine(running=4), False),
        (engine(running=1, ahead=0.1), True),
        (engine(running=1, ahead=0.11), False),
        (engine(slots=2, running=2), False),
    ],
    ids=["idle", "a slot is free", "full", "a little ahead", "too much ahead", "full for a slow start"],
)
def test_an_engine_is_open_while_a_slot_is_free_and_little_prefill_is_ahead(where: Engine, is_open: bool) -> None:
    assert CAPACITY.is_open(where, 0.0) is is_open
    assert CAPACITY.admits(where, Demand("m"), 0.0) is is_open


def test_time_opens_an_engine_whose_prefill_goes_on() -> None:
    where = engine(running=1, ahead=0.3)
    assert [CAPACITY.is_open(where, now) for now in (0.0, 0.19, 0.21)] == [False, False, True]


@pytest.mark.parametrize(
    ("ask", "running", "admits"),
    [
        (Demand("m", sequences=4), 0, True),
        (Demand("m", sequences=4), 1, False),
        (Demand("m", sequences=5), 0, False),
        (Demand("m", sequences=50, divisible=True), 0, True),
        (Demand("m", sequences=50, divisible=True), 1, False),
        (Demand("m", sequences=0), 4, True),
    ],
)
def test_a_wide_request_needs_as_many_slots(ask: Demand, running: int, admits: bool) -> None:
    assert CAPACITY.admits(engine(running=running), ask, 0.0) is admits


def test_while_a_backend_starts_slowly_a_wide_request_runs_there_alone() -> None:
    wide = Demand("m", sequences=3)
    assert CAPACITY.admits(engine(slots=1), wide, 0.0)
    assert not CAPACITY.admits(engine(slots=2, running=1), wide, 0.0)
    assert not CAPACITY.admits(engine(cap=2, slots=1), wide, 0.0)


def beside(ask: Demand, kv: int | None, running: int = 1) -> Engine:
    """An engine with a request that has reserved its tokens."""
    made = engine(kv=kv, running=running)
    reserve(made.kv, ask, 512 if ask.output_tokens is None else ask.output_tokens)
    return made


@pytest.mark.parametrize(("prompt", "admits"), [(240, True), (241, False)])
def test_the_kv_cache_is_filled_to_the_headroom_in_whole_blocks(prompt: int, admits: bool) -> None:
    ask, there = Demand("m", prompt_tokens=prompt, output_tokens=200), Demand("m", prompt_tokens=400, output_tokens=96)
    assert CAPACITY.admits(beside(there, 1000), ask, 0.0) is admits
    assert CAPACITY.is_open(beside(there, 1000), 0.0)
    assert CAPACITY.admits(beside(there, None), ask, 0.0)
    assert CAPACITY.admits(beside(there, 1000, running=0), ask, 0.0)


def test_a_prompt_that_shares_most_of_its_blocks_with_one_that_runs_fits_where_another_does_not() -> None:
    running = Demand("m", keys=(1, 2), edges=(1600, 3200), prompt_size=3200, prompt_tokens=800, output_tokens=16)
    alike = Demand("m", keys=(1, 2, 3), edges=(1600, 3200, 3400), prompt_size=3400, prompt_tokens=850, output_tokens=16)
    unlike = Demand(
        "m", keys=(5, 6, 7), edges=(1600, 3200, 3400), prompt_size=3400, prompt_tokens=850, output_tokens=16
    )
    where = beside(running, 1000)
    assert CAPACITY.admits(where, alike, 0.0)
    assert not CAPACITY.admits(where, unlike, 0.0)


def test_an_engine_whose_kv_cache_is_full_is_not_open_unless_it_is_idle() -> None:
    there = Demand("m", prompt_tokens=928, output_tokens=16)
    assert not CAPACITY.is_open(beside(there, 1000), 0.0)
    assert CAPACITY.is_open(beside(there, 1024), 0.0)
    assert CAPACITY.is_open(beside(there, None), 0.0)
    assert CAPACITY.is_open(beside(there, 1000, running=0), 0.0)


def test_an_idle_engine_takes_a_prompt_larger_than_its_kv_cache() -> None:
    assert CAPACITY.admits(engine(kv=1000), Demand("m", prompt_tokens=100_000), 0.0)


def test_slots_taken_are_sequences_and_all_there_are_for_what_can_be_divided() -> None:
    assert slots_of(Demand("m", sequences=9), engine()) == 9
    assert slots_of(Demand("m", sequences=9, divisible=True), engine()) == 4
    assert slots_of(Demand("m", sequences=3, divisible=True), engine()) == 3


def test_streams_near_their_end_admit_a_request_that_would_not_fit_beside_all_final_lengths() -> None:
    judge, where = CAPACITY, engine(kv=1600, cap=8, running=4)
    wish = Demand("m", prompt_tokens=16, output_tokens=320, streams=True)
    streams = [reserve(where.kv, wish, 320) for _ in range(4)]
    assert not judge.admits(where, wish, 0.0)
    for place, stream in enumerate(streams):
        where.kv.on_tokens(stream, 80 * place)
    assert judge.admits(where, wish, 1.0)
    assert judge.is_open(where, 1.0)
    for _ in range(3):
        reserve(where.kv, wish, 320)
    assert not judge.admits(where, wish, 1.0)


@pytest.mark.parametrize(
    ("slots", "last"), [(1, 0), (3, 0), (4, 1), (16, 1), (31, 1), (32, 2), (256, 16)]
)  # fmt: skip
def test_the_last_slots_are_not_for_those_they_are_kept_from(slots: int, last: int) -> None:
    fits, full = engine(cap=slots, running=slots - last - 1), engine(cap=slots, running=slots - last)
    assert CAPACITY.is_open(fits, 0.0, guarded=True)
    assert CAPACITY.admits(fits, Demand("m"), 0.0, guarded=True)
    assert not CAPACITY.is_open(full, 0.0, guarded=True)
    assert not CAPACITY.admits(full, Demand("m"), 0.0, guarded=True)
    assert CAPACITY.is_open(full, 0.0) is CAPACITY.admits(full, Demand("m"), 0.0) is (last > 0)


def test_nor_is_the_last_of_the_kv_cache() -> None:
    here, where = CAPACITY, engine(cap=16, kv=16_000, running=1)
    for tokens, for_all, for_guarded in ((14_000, True, True), (15_000, True, False), (15_200, False, False)):
        held = reserve(where.kv, Demand("m", prompt_tokens=tokens - 16, output_tokens=16), 16)
        small = Demand("m", prompt_tokens=16, output_tokens=16)
        assert here.admits(where, small, 0.0) is here.is_open(where, 0.0) is for_all, tokens
        assert here.admits(where, small, 0.0, guarded=True) is here.is_open(where, 0.0, guarded=True) is for_guarded
        where.kv.release(held)


@pytest.mark.parametrize(("budgets", "for_guarded"), [(0.74, True), (0.76, False)])
def test_with_nearly_a_token_budget_of_prefill_ahead_an_engine_is_not_for_them(
    budgets: float, *, for_guarded: bool
) -> None:
    here = Capacity(CAPACITY.calibration, CAPACITY.lengths)
    where = engine(cap=16, running=1, ahead=budgets * here.calibration.budget_seconds)
    assert here.is_open(where, 0.0)
    assert here.admits(where, Demand("m"), 0.0)
    assert here.is_open(where, 0.0, guarded=True) is for_guarded
    assert here.admits(where, Demand("m"), 0.0, guarded=True) is for_guarded


def test_without_a_window_any_prefill_may_be_ahead() -> None:
    here, where = Capacity(CAPACITY.calibration, CAPACITY.lengths), engine(running=1, ahead=1000.0)
    assert here.is_open(where, 0.0)
    assert here.admits(where, Demand("m"), 0.0)
