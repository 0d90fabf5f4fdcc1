"""Offline lines: they use idle capacity, wait for all others, and give back what interactive requests need."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError
from gateway.core.request import Demand
from gateway.core.routing.engine import prefill_seconds
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from gateway.features.batches.offline import victims
from gateway.features.batches.pace import BatchPace, OfflineLine, Urgency, urgency
from tests.unit.batches.offline_hall import DAY_SECONDS, OfflineHall, a_line, offline_hall
from tests.unit.scheduling.builders import ask


def line(laxity_seconds: float = DAY_SECONDS, **fields: object) -> Demand:
    """A line of a batch with this laxity."""
    return ask(**{"batch": True, "offline": a_line(laxity_seconds), "tenant": "batch"} | fields)


def wait(here: OfflineHall, demand: Demand) -> Ticket:
    placed = here.place(demand)
    assert isinstance(placed, Ticket)
    return placed


def run(here: OfflineHall, demand: Demand) -> Lease:
    """A request that has got its first token."""
    placed = here.place(demand)
    assert isinstance(placed, Lease)
    here.scheduler.first_token(placed, here.now)
    return placed


def scan(here: OfflineHall, passed_seconds: float = 1.0) -> list[Lease]:
    """Let time pass, and bind what can be bound; all prefills end at once."""
    here.now += passed_seconds
    granted: list[tuple[Ticket, Lease | GatewayError]] = here.scheduler.scan_queue("m", here.now)
    granted += here.offline.bind(here.now)
    leases = [lease for _, lease in granted if isinstance(lease, Lease)]
    for lease in leases:
        here.scheduler.first_token(lease, here.now)
    return leases


def fill(here: OfflineHall, lines: int) -> list[Lease]:
    """So many lines run."""
    for _ in range(lines):
        wait(here, line())
    leases: list[Lease] = []
    for _ in range(2 * lines):
        leases += scan(here)
    assert len(leases) == lines
    return leases


def test_a_line_waits_for_a_scan_and_then_uses_an_idle_engine() -> None:
    here = offline_hall(4)
    wait(here, line())
    [lease] = scan(here)
    assert lease.demand.offline is not None
    assert here.sites[0].load.in_flight == 1
    here.scheduler.release(lease, here.now)
    assert not here.offline


def test_a_line_that_was_paused_goes_on_before_others_begin() -> None:
    here = offline_hall(4)
    wait(here, line())
    paused = line(generated_tokens=9)
    wait(here, paused)
    assert [lease.demand is paused for _ in range(2) for lease in scan(here)] == [True, False]


def test_no_line_is_bound_while_another_request_waits_for_the_model() -> None:
    here = offline_hall(4)
    held = [run(here, ask()) for _ in range(4)]
    wait(here, line())
    wait(here, ask())
    here.scheduler.release(held.pop(), here.now)
    here.scheduler.release(held.pop(), here.now)
    [lease] = scan(here)
    assert lease.demand.offline is None


def test_the_last_slots_are_not_for_lines() -> None:
    here = offline_hall(32)
    for _ in range(40):
        wait(here, line())
    leases = [lease for _ in range(60) for lease in scan(here)]
    assert len(leases) == 30  # of 32 slots, two are guarded


def test_one_line_is_in_prefill_on_an_engine() -> None:
    here = offline_hall(32)
    for _ in range(4):
        wait(here, line())
    here.now += 1.0
    assert len(here.offline.bind(here.now)) == 1
    assert here.offline.bind(here.now + 0.001) == []


def test_lines_stop_where_others_would_feel_them() -> None:
    here = offline_hall(256)
    prompts = {"prompt_tokens": 20_000}
    for _ in range(60):
        wait(here, line(**prompts))
    leases = [lease for _ in range(200) for lease in scan(here, 5.0)]
    model = here.calibration.of("m").model
    load = here.sites[0].load
    assert 2 < len(leases) < 20
    assert model.a + model.c * load.in_flight + model.d * load.context_tokens <= 2 * model.a


def test_lines_follow_another_objective() -> None:
    here = offline_hall(32)
    run(here, ask())
    wait(here, line())
    here.offline.apply(1e-9)
    assert scan(here, 60.0) == []
    here.offline.apply(None)
    assert len(scan(here)) == 1


@pytest.mark.parametrize("tokens", [0, 200, 2000])
def test_a_prefill_that_few_tokens_follow_needs_more_of_the_time_free(tokens: int) -> None:
    here = offline_hall(32)
    prefills = here.offline.model("m").prefills
    [lease] = fill(here, 1)
    assert prefills.least_share(9, 0.01) == 0  # of what prefills bring, nothing is known
    lease.on_tokens(tokens)
    here.scheduler.release(lease, here.now)
    seconds = prefill_seconds(here.calibration.of("m").model, 1.0, lease.demand.prompt_tokens, 0)
    share = seconds / (max(1, tokens) * 0.01)
    assert prefills.least_share(9, 0.01) == pytest.approx(min(0.2, 9 * share))
    assert prefills.least_share(0, 0.01) == 0


def test_lines_that_wait_for_long_do_not_come_before_others() -> None:
    here = offline_hall(1)
    [held] = fill(here, 1)
    wait(here, line())
    here.now += DAY_SECONDS / 2
    interactive = wait(here, ask())
    here.scheduler.release(held, here.now)
    assert [ticket for ticket, _ in here.scheduler.scan_queue("m", here.now)] == [interactive]


def test_lines_are_paused_for_interactive_requests_that_wait() -> None:
    here = offline_hall(3)
    leases = fill(here, 3)
    waiting = wait(here, ask())
    [victim] = here.offline.pause(here.now)
    assert victim is leases[-1]  # it has run for the shortest time
    assert here.offline.pause(here.now) == []  # that one is still to be released
    here.scheduler.release(victim, here.now)
    assert [ticket for ticket, _ in here.scheduler.scan_queue("m", here.now)] == [waiting]


def test_lines_are_paused_for_kv_cache_too() -> None:
    here = offline_hall(8, kv=4000)
    leases = fill(here, 3)
    assert here.sites[0].kv.taken_tokens > 1500
    wait(here, ask(prompt_tokens=2500))
    paused = here.offline.pause(here.now)
    assert paused
    for lease in paused:
        here.scheduler.release(lease, here.now)
    assert len(scan(here)) == 1
    assert len(paused) < len(leases) + 1


def test_no_line_is_paused_for_batch_requests() -> None:
    here = offline_hall(3)
    fill(here, 3)
    wait(here, ask(batch=True))
    assert here.offline.pause(here.now) == []


def test_lines_are_paused_where_they_slow_others_down() -> None:
    here = offline_hall(256, 256)
    for demand in [line(prompt_tokens=10_000)] * 40:
        wait(here, demand)
    bound = sum(len(scan(here, 5.0)) for _ in range(100))
    here.now += 60.0
    assert here.offline.pause(here.now) == []
    for _ in range(80):
        run(here, ask(prompt_tokens=5000))
    here.now += 1.0
    paused = here.offline.pause(here.now)
    assert 0 < len(paused) <= bound
    by_engine = [sum(lease.engine is site for lease in paused) for site in here.sites]
    assert abs(by_engine[0] - by_engine[1]) <= 2


def test_a_line_of_an_urgent_batch_waits_as_a_batch_request() -> None:
    here = offline_hall(1)
    run(here, ask())
    waiting = wait(here, line(laxity_seconds=1000.0))
    assert here.queue.requests == 1
    assert waiting.demand.batch
    assert not here.offline.is_behind_others(waiting)
    assert scan(here) == []


def test_lines_that_wait_become_batch_requests_when_their_batch_becomes_urgent() -> None:
    here, laxity_seconds = offline_hall(1), [DAY_SECONDS]
    run(here, ask())
    urgent = OfflineLine(DAY_SECONDS, lambda _: laxity_seconds[0], lambda: None)
    waiting = [wait(here, line(offline=urgent)) for _ in range(2)]
    assert scan(here) == []
    assert here.queue.requests == 0
    laxity_seconds[0] = 1000.0
    assert scan(here) == []
    assert here.queue.requests == 2
    assert {ticket.arrived_seconds for ticket in waiting} == {here.now}


def test_a_line_waits_behind_others_until_they_leave() -> None:
    here = offline_hall(1)
    run(here, ask())
    first, second = wait(here, line()), wait(here, line())
    assert not here.offline.is_behind_others(first)
    assert here.offline.is_behind_others(second)
    assert here.leave(first)
    assert not here.offline.is_behind_others(second)


def test_a_few_lines_of_a_late_batch_wait_as_interactive_requests() -> None:
    here = offline_hall(8, 8)
    for _ in range(16):
        run(here, ask())
    tickets = [wait(here, line(laxity_seconds=-5.0)) for _ in range(6)]
    scan(here)
    assert sum(not ticket.demand.batch for ticket in tickets) == 2  # an eighth of 16 slots
    assert here.queue.requests == 6


def test_a_line_that_leaves_waits_no_longer() -> None:
    here = offline_hall(1)
    ticket = wait(here, line())
    assert here.leave(ticket)
    assert not here.leave(ticket)
    assert not here.offline


def test_a_line_waits_for_a_backend_to_come_back() -> None:
    here = offline_hall(1)
    here.serving["m"] = []
    here.changed()
    wait(here, line())
    assert scan(here) == []
    here.serving["m"] = here.sites
    here.changed()
    assert len(scan(here)) == 1


def test_a_line_for_a_model_that_is_gone_fails() -> None:
    here = offline_hall(1)
    ticket = wait(here, line())
    del here.serving["m"]
    here.changed()
    [(refused, error)] = here.offline.bind(here.now)
    assert refused is ticket
    assert isinstance(error, GatewayError)
    assert not here.offline


@pytest.mark.parametrize(
    ("laxity_seconds", "expected"),
    [(math.inf, Urgency.IDLE), (7200.0, Urgency.IDLE), (1000.0, Urgency.BATCH), (-1.0, Urgency.INTERACTIVE)],
)
def test_urgency_is_by_laxity(laxity_seconds: float, expected: Urgency) -> None:
    assert urgency(laxity_seconds) is expected


def test_laxity_is_what_the_measured_pace_leaves() -> None:
    pace = BatchPace(0.0, 10_000.0, 5000)
    assert pace.laxity_seconds(0.0) == 10_000.0  # the pace is unknown
    for second in range(1, 1001):
        pace.done(float(second))
    assert pace.laxity_seconds(1000.0) == pytest.approx(10_000 - 1000 - 4000, rel=0.01)


def test_a_batch_without_any_answer_has_no_laxity() -> None:
    assert BatchPace(0.0, 10_000.0, 5).laxity_seconds(100.0) == -math.inf


def test_lines_that_start_anew_are_the_last_victims() -> None:
    here, leases = offline_hall(64), list[Lease]()
    for continues in (False, True, False, True):
        wait(here, line(offline=a_line(continues=continues)))
        leases += scan(here)
    anew, goes_on, other, goes_on_too = leases
    assert victims(leases, 3, 0, here.now + 1.0) == [goes_on_too, goes_on, other]
    assert anew not in victims(leases, 3, 0, here.now + 1.0)


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 100)), max_size=12), st.integers(0, 8), st.integers(0, 9))
def test_victims_free_enough_and_are_the_cheapest(runs: list[tuple[int, float]], slots: int, blocks: int) -> None:
    here, tokens = offline_hall(64), 500 * blocks
    leases = []
    for prompt_tokens, started in sorted(runs, key=lambda run: run[1]):
        here.now = started
        leases.append(run(here, ask(prompt_tokens=prompt_tokens)))
    chosen = victims(leases, slots, tokens, 100.0)
    freed = sum(lease.tokens_alone for lease in chosen)
    assert len(chosen) == len(leases) or (len(chosen) >= slots and freed >= tokens)
    if chosen:
        assert len(chosen) - 1 < slots or freed - chosen[-1].tokens_alone < tokens

    def lost(lease: Lease) -> float:
        return (100.0 - lease.started_seconds) / max(1, lease.tokens_alone)

    rest = [lost(lease) for lease in leases if lease not in chosen]
    assert not rest or not chosen or max(map(lost, chosen)) <= min(rest)


def pooled(inputs: int = 8, **fields: object) -> Demand:
    """A call of embeddings lines."""
    return line(divisible=True, sequences=inputs, output_tokens=0, prompt_tokens=2000, streams=False, **fields)


def test_a_call_of_pooled_lines_is_in_prefill_until_it_was_predicted_to_end() -> None:
    here = offline_hall(256, policy="prefix")
    for _ in range(3):
        wait(here, pooled())
    here.now += 1.0
    [(_, lease)] = here.offline.bind(here.now)
    assert isinstance(lease, Lease)
    assert here.offline.bind(here.now + 0.5 * lease.prefill_seconds) == []
    assert len(here.offline.bind(here.now + 1.1 * lease.prefill_seconds)) == 1


def test_two_calls_of_pooled_lines_are_in_flight_on_an_engine_however_long_they_take() -> None:
    here = offline_hall(256)
    for _ in range(9):
        wait(here, pooled())
    leases = [lease for _ in range(20) for lease in scan(here)]
    assert len(leases) == 2
    here.scheduler.release(leases[0], here.now)
    assert len(scan(here)) == 1


def test_pooled_lines_take_the_part_of_the_time_that_streams_leave() -> None:
    here = offline_hall(256, policy="prefix")
    for _ in range(40):
        run(here, ask())
    here.now += 60.0  # their prefills are over
    wait(here, pooled())
    [lease] = scan(here, 0.0)
    here.scheduler.release(lease, here.now)
    wait(here, pooled())
    assert scan(here, 1.1 * lease.prefill_seconds) == [], "a step takes more than half of the time between tokens"
    assert len(scan(here, 2 * lease.prefill_seconds)) == 1


def test_a_pooled_line_starts_no_call_before_a_prompt_or_a_request_that_waits() -> None:
    here = offline_hall(8)
    prompt = here.scheduler.place(ask(prompt_tokens=50_000, streams=True), here.now)
    assert isinstance(prompt, Lease)
    wait(here, pooled(inputs=1))
    here.now += 0.5
    assert here.offline.bind(here.now) == []
    here.scheduler.first_token(prompt, here.now)
    assert len(scan(here)) == 1
