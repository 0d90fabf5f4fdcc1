import pytest

from gateway.core.errors import NoBackend, QueueFull
from gateway.core.request import Demand, UpstreamResult, Usage
from gateway.core.scheduling.scheduler import Lease
from gateway.core.scheduling.wait_queue import Ticket
from tests.unit.scheduling.builders import POLICIES, STARVATION_SECONDS, Hall, ask, hall

KEYS = tuple(range(1, 9))
EDGES = tuple(range(256, 2049, 256))
LONG_KEYS = tuple(range(1, 160))
LONG_EDGES = tuple(range(2500, 397_501, 2500))


def bind(here: Hall, wish: Demand | None = None, avoid: frozenset[str] = frozenset()) -> Lease:
    placed = here.scheduler.place(wish or ask(), here.now, avoid)
    assert isinstance(placed, Lease)
    here.scheduler.first_token(placed, here.now)
    return placed


def wait(here: Hall, wish: Demand | None = None) -> Ticket:
    placed = here.scheduler.place(wish or ask(), here.now)
    assert isinstance(placed, Ticket)
    return placed


def drain(here: Hall) -> dict[Ticket, str]:
    """The engine of each bound ticket; an error's class name for those that no backend can serve."""
    granted = here.scheduler.scan_queue("m", here.now)
    return {
        ticket: bound.engine.name if isinstance(bound, Lease) else type(bound).__name__ for ticket, bound in granted
    }


def hold_the_prompt(here: Hall, backend: int) -> Demand:
    """A long prompt that one backend holds."""
    here.index.record(backend, KEYS, EDGES)
    return ask(keys=KEYS, edges=EDGES, prompt_size=2048, prompt_tokens=512)


def hold_a_very_long_prompt(here: Hall, backend: int) -> Demand:
    """A hundred thousand tokens of which one backend holds nearly all."""
    here.index.record(backend, LONG_KEYS, LONG_EDGES)
    return ask(keys=LONG_KEYS, edges=LONG_EDGES, prompt_size=400_000, prompt_tokens=100_000, output_tokens=1)


def test_a_request_is_bound_at_once_when_a_backend_is_open() -> None:
    here = hall(1, 1)
    assert [bind(here).engine.name, bind(here).engine.name] == ["a", "b"]
    assert here.state == "a 1/1, b 1/1; 0 waiting"


def test_what_was_taken_is_given_back_once() -> None:
    here = hall(2)
    first, second = bind(here), bind(here)
    here.scheduler.release(first, 1.0)
    here.scheduler.release(first, 1.0)
    assert first.engine.load.in_flight == 1
    here.scheduler.release(second, 1.0)
    assert repr(first.engine.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"


def test_a_first_token_after_the_release_changes_nothing() -> None:
    here = hall(2)
    placed = here.scheduler.place(ask(), 0.0)
    assert isinstance(placed, Lease)
    here.scheduler.release(placed, 1.0)
    here.scheduler.first_token(placed, 2.0)
    assert placed.engine.load.decoding == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_finds_every_slot_taken_waits_and_gets_the_next_one(policy: str) -> None:
    here = hall(1, policy=policy)
    running = bind(here)
    ticket = wait(here)
    assert drain(here) == {}
    here.now = 2.0
    here.scheduler.release(running, here.now)
    [(granted, lease)] = here.scheduler.scan_queue("m", here.now)
    assert granted is ticket
    assert isinstance(lease, Lease)
    assert lease.waited_seconds == 2.0
    assert len(here.queue) == 0


def test_no_arrival_overtakes_the_queue() -> None:
    here = hall(1)
    running = bind(here)
    first = wait(here)
    here.scheduler.release(running, 0.0)
    second = wait(here)
    assert drain(here) == {first: "a"}
    assert list(here.queue) == [second]


def test_a_full_queue_refuses_with_a_retry_time() -> None:
    here = hall(1, max_requests=1)
    bind(here)
    wait(here)
    with pytest.raises(QueueFull) as error:
        here.scheduler.place(ask(), 0.0)
    assert error.value.retry_after_seconds == 1.0


def test_the_retry_time_grows_with_the_queue() -> None:
    here = hall(1)
    for now in (0.0, 3.0):
        here.now = now
        here.scheduler.release(bind(here), now)
    bind(here)
    assert here.queue.retry_after_seconds("m", 3.0) == pytest.approx(3.0)
    wait(here)
    assert here.queue.retry_after_seconds("m", 3.0) == pytest.approx(6.0)


def test_when_every_backend_goes_waiting_requests_fail_without_holding() -> None:
    here = hall(1, holds=False)
    bind(here)
    ticket = wait(here)
    here.serving["m"] = []
    here.changed()
    assert drain(here) == {ticket: "NoBackend"}
    assert len(here.queue) == 0


@pytest.mark.parametrize("holds", [True, False])
def test_when_a_model_turns_out_not_to_exist_its_waiting_requests_fail(holds: bool) -> None:
    here = hall(1, holds=holds)
    bind(here)
    ticket = wait(here)
    del here.serving["m"]
    here.changed()
    assert drain(here) == {ticket: "ModelNotFound"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_only_some_backends_can_ever_run_does_not_wait_for_the_others(policy: str) -> None:
    here = hall(2, 4, 4, policy=policy)
    assert {bind(here, ask(sequences=3)).engine.name for _ in range(2)} == {"b", "c"}
    assert isinstance(here.scheduler.place(ask(sequences=3), 0.0), Ticket)


@pytest.mark.parametrize("policy", POLICIES)
def test_nor_does_a_waiting_one_though_they_are_idle(policy: str) -> None:
    here = hall(2, 4, policy=policy)
    running = bind(here, ask(pinned="b", sequences=2))
    ticket = wait(here, ask(sequences=3))
    assert drain(here) == {}
    here.scheduler.release(running, 0.0)
    assert drain(here) == {ticket: "b"}


def test_a_retry_of_a_wide_request_does_not_go_where_it_can_never_run() -> None:
    assert bind(hall(2, 4, 4), ask(sequences=3), avoid=frozenset("b")).engine.name == "c"
    assert bind(hall(2, 4), ask(sequences=3), avoid=frozenset("b")).engine.name == "b"


def test_inputs_to_be_embedded_beyond_the_cap_take_all_slots() -> None:
    here = hall(4)
    placed = bind(here, ask(sequences=100, divisible=True))
    assert placed.engine.load.in_flight == 4


def test_a_request_larger_than_a_slow_start_allows_runs_alone() -> None:
    here = hall(8)
    here.sites[0].slots = 1
    here.changed()
    wide = bind(here, ask(sequences=4))
    ticket = wait(here)
    here.scheduler.release(wide, 0.0)
    assert drain(here) == {ticket: "a"}
    assert isinstance(here.scheduler.place(ask(sequences=4), 0.0), Ticket)


def test_a_look_up_takes_no_slot() -> None:
    here = hall(1)
    bind(here)
    assert bind(here, ask(sequences=0)).engine.load.in_flight == 1


def test_a_backend_with_too_much_prefill_ahead_is_not_open() -> None:
    here = hall(4, policy="prefix")
    long = ask(prompt_tokens=5000)
    placed = here.scheduler.place(long, 0.0)
    assert isinstance(placed, Lease)
    ticket = wait(here)
    here.scheduler.first_token(placed, 0.2)
    here.now = 0.2
    assert drain(here) == {ticket: "a"}


def test_with_prefix_routing_a_request_waits_for_the_backend_that_has_its_prompt() -> None:
    here = hall(1, 1, policy="prefix")
    wish = hold_a_very_long_prompt(here, 1)
    running = bind(here, wish)
    assert running.engine.name == "b"
    assert running.hit_tokens > 90_000
    ticket = wait(here, wish)
    small = bind_waiting(here)
    assert small == "a"
    here.scheduler.release(running, 0.0)
    assert drain(here) == {ticket: "b"}


def bind_waiting(here: Hall) -> str:
    """A small request that came later overtakes."""
    ticket = wait(here)
    bound = drain(here)
    assert set(bound) == {ticket}
    return bound[ticket]


def test_after_the_starvation_time_any_open_backend_will_do() -> None:
    here = hall(1, 1, policy="prefix")
    wish = hold_a_very_long_prompt(here, 1)
    bind(here, wish)
    ticket = wait(here, wish)
    here.now = STARVATION_SECONDS
    assert drain(here) == {}
    here.now = STARVATION_SECONDS + 0.1
    assert drain(here) == {ticket: "a"}


def test_shorter_prefills_go_first_until_waiting_outweighs_them() -> None:
    here = hall(1, policy="prefix", aging=0.05)
    running = bind(here)
    long = wait(here, ask(prompt_tokens=5000))
    here.now = 1.0
    short = wait(here)
    here.scheduler.release(running, here.now)
    [(first, lease)] = here.scheduler.scan_queue("m", here.now)
    assert first is short
    assert isinstance(lease, Lease)
    here.now = 4.0
    later = wait(here)
    here.scheduler.release(lease, here.now)
    assert drain(here) == {long: "a"}
    assert list(here.queue) == [later]


def test_the_first_of_the_whole_queue_are_scanned() -> None:
    here = hall(1, policy="prefix", scan=2)
    running = bind(here)
    long, longer, short = (wait(here, ask(prompt_tokens=tokens)) for tokens in (2000, 3000, 100))
    here.scheduler.release(running, 0.0)
    assert drain(here) == {short: "a"}
    assert list(here.queue) == [long, longer]


def test_kv_cache_that_is_taken_keeps_a_request_out_though_slots_are_free() -> None:
    here = hall(8, kv=1000)
    running = bind(here, ask(prompt_tokens=500, output_tokens=100))
    ticket = wait(here, ask(prompt_tokens=300, output_tokens=100))
    assert drain(here) == {}
    here.scheduler.release(running, 0.0)
    assert drain(here) == {ticket: "a"}


def test_kv_cache_is_filled_to_the_headroom_exactly() -> None:
    here = hall(8, kv=1000)
    here.serving["o"] = here.sites
    bind(here, ask(prompt_tokens=512, output_tokens=100))
    wait(here, ask(prompt_tokens=209, output_tokens=100))
    bind(here, ask(model="o", prompt_tokens=208, output_tokens=100))
    assert here.sites[0].kv.taken_tokens == 512 + 112 + 208 + 112 <= 950


def test_an_idle_backend_takes_a_prompt_that_is_larger_than_its_kv_cache() -> None:
    assert bind(hall(8, kv=1000), ask(prompt_tokens=5000)).engine.name == "a"


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_where_any_open_backend_will_do_one_with_room_in_its_kv_cache_is_found(policy: str) -> None:
    here = hall(8, 8, 8, policy=policy, kv=1000)
    for tokens in (800, 800, 300):
        bind(here, ask(prompt_tokens=tokens, output_tokens=100))
    assert bind(here, ask(prompt_tokens=400, output_tokens=100)).engine.name == "c"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "wide",
    [ask(sequences=4), ask(sequences=9, divisible=True), ask(prompt_tokens=100_000)],
    ids=["choices", "inputs", "a prompt larger than any KV cache"],
)
def test_a_wide_request_does_not_wait_for_ever_behind_an_unending_stream_of_narrow_ones(
    policy: str, wide: Demand
) -> None:
    here = hall(4, 4, policy=policy, kv=4000)
    running = [bind(here) for _ in range(8)]
    ticket = wait(here, wide)
    for step in range(4 * int(STARVATION_SECONDS)):
        here.now = step / 2
        wait(here)
        here.scheduler.release(running.pop(0), here.now)
        for granted, lease in here.scheduler.scan_queue("m", here.now):
            if granted is ticket:
                assert here.now <= STARVATION_SECONDS + 8
                return
            assert isinstance(lease, Lease)
            here.scheduler.first_token(lease, here.now)
            running.append(lease)
    pytest.fail("the wide request never got a place")


def test_a_backend_reserved_for_a_starving_request_leaves_the_others_open() -> None:
    here = hall(2, 2)
    running = [bind(here) for _ in range(4)]
    wide = wait(here, ask(sequences=2))
    here.now = STARVATION_SECONDS + 1
    narrow = [wait(here) for _ in range(2)]
    on_a, on_b = ([lease for lease in running if lease.engine.name == name] for name in "ab")
    here.scheduler.release(on_a[0], here.now)
    assert drain(here) == {}
    here.scheduler.release(on_b[0], here.now)
    assert drain(here) == {narrow[0]: "b"}
    here.scheduler.release(on_a[1], here.now)
    assert drain(here) == {wide: "a"}


def test_a_request_reserves_what_no_other_uses_there_whether_it_is_cached_or_not() -> None:
    """A cached block that no request uses can be evicted; one in use takes capacity as a new one does."""
    here = hall(4, policy="prefix", kv=100_000)
    known = hold_the_prompt(here, 0)
    placed = bind(here, known)
    assert placed.hit_tokens == 496  # the last token is always computed, and so is its block
    ledger = here.sites[0].kv
    assert (ledger.taken_tokens, placed.engine.load.context_tokens) == (512 + 512, 512)
    again = bind(here, known)
    assert (ledger.taken_tokens, placed.engine.load.context_tokens) == (512 + 2 * 512, 1024)
    here.scheduler.release(placed, 0.0)
    assert ledger.taken_tokens == 512 + 512
    here.scheduler.release(again, 0.0)
    assert ledger.taken_tokens == 0


def test_the_speed_of_a_backend_counts_with_its_root() -> None:
    here = hall(4, 4, policy="prefix")
    here.sites[0].slowness = 2.0  # the fleet makes it of a speed of 4
    assert bind(here).engine.name == "b"


def test_where_nothing_is_cached_what_was_sent_before_does_not_count() -> None:
    here = hall(4, 4, policy="prefix")
    wish = hold_the_prompt(here, 1)
    here.sites[1].caches_prefixes = False
    placed = bind(here, wish)
    assert (placed.engine.name, placed.hit_tokens) == ("a", 0)


def test_what_is_in_flight_is_counted_on_its_engine() -> None:
    here = hall(4)
    assert here.sites[0].load.in_flight == 0
    bind(here)
    assert here.sites[0].load.in_flight == 1


def test_a_first_token_after_a_prefill_alone_teaches_what_a_token_costs() -> None:
    here = hall(4, policy="prefix")
    before = here.calibration.of("m").model.b
    placed = here.scheduler.place(ask(prompt_tokens=1000), 0.0)
    assert isinstance(placed, Lease)
    here.scheduler.first_token(placed, 1.0)
    assert here.calibration.of("m").model.b > before


@pytest.mark.parametrize(("answered", "learns"), [(True, True), (False, False)])
def test_a_whole_answer_that_was_faster_than_predicted_teaches_too(answered: bool, learns: bool) -> None:
    here = hall(4, policy="prefix")
    before = here.calibration.of("m").model.b
    placed = here.scheduler.place(ask(prompt_tokens=1000, streams=False), 0.0)
    assert isinstance(placed, Lease)
    here.scheduler.release(placed, 0.001, answered=answered)
    assert (here.calibration.of("m").model.b < before) == learns


@pytest.mark.parametrize("pools", [True, False])
def test_the_answer_of_an_embedding_shows_its_prefill_exactly(pools: bool) -> None:
    here = hall(4, policy="prefix")
    before = here.calibration.of("m").model.b
    demand = ask(prompt_tokens=1000, output_tokens=0 if pools else 10, divisible=pools, streams=False)
    placed = here.scheduler.place(demand, 0.0)
    assert isinstance(placed, Lease)
    here.scheduler.release(placed, 1.0, answered=True)
    assert (here.calibration.of("m").model.b > before) == pools


def test_requests_waiting_for_a_backend_raise_its_cost_for_one_scan_only() -> None:
    here = hall(1, 1, policy="prefix")
    wish = hold_a_very_long_prompt(here, 1)
    bind(here, wish)

    def costs() -> list[float]:
        return sorted(verdict.cost for verdict in here.scheduler.explain(ask(), here.now))

    before = costs()
    for _ in range(3):
        wait(here, wish)
        assert drain(here) == {}
    assert costs() == before


def test_hits_of_a_waiting_request_are_predicted_again_before_it_is_bound() -> None:
    here = hall(1, 1, policy="prefix")
    running = [bind(here, ask(pinned=name)) for name in "ab"]
    ticket = wait(here, ask(keys=LONG_KEYS, edges=LONG_EDGES, prompt_size=400_000, prompt_tokens=100_000))
    here.index.record(1, LONG_KEYS, LONG_EDGES)
    here.now = 0.05
    for lease in running:
        here.scheduler.release(lease, here.now)
    assert drain(here) == {ticket: "b"}


def test_what_is_bound_meanwhile_counts_at_once_for_a_waiting_request_with_the_same_beginning() -> None:
    here = hall(1, 1, policy="prefix")
    running = {name: bind(here, ask(pinned=name)) for name in "ab"}
    prompt = ask(keys=LONG_KEYS, edges=LONG_EDGES, prompt_size=400_000, prompt_tokens=100_000)
    first, second = wait(here, prompt), wait(here, prompt)
    here.now = 0.01
    here.scheduler.release(running["a"], here.now)
    [(bound, lease)] = here.scheduler.scan_queue("m", here.now)
    assert bound is first
    assert isinstance(lease, Lease)
    assert lease.engine.name == "a"
    here.now = 0.02
    here.scheduler.release(lease, here.now)
    here.scheduler.release(running["b"], here.now)
    assert drain(here) == {second: "a"}


def test_an_explanation_has_every_backend_best_first_and_changes_nothing() -> None:
    here = hall(4, 1, policy="prefix")
    wish = hold_the_prompt(here, 1)
    bind(here, ask(pinned="b"))
    before = repr(here.scheduler)
    best, other = here.scheduler.explain(wish, here.now)
    assert (best.name, best.is_open, best.hit_tokens) == ("a", True, 0)
    assert (other.name, other.is_open, other.hit_tokens) == ("b", False, 496)
    assert best.parts is not None
    assert sum(best.parts) == pytest.approx(best.cost)
    assert repr(here.scheduler) == before
    with pytest.raises(NoBackend):
        here.scheduler.explain(ask(pinned="z"), here.now)


def test_a_request_that_does_not_fit_leaves_the_backend_to_those_that_do() -> None:
    here = hall(4, 2, policy="prefix", kv=10_000)
    for _ in range(2):
        bind(here, ask(prompt_tokens=3000, pinned="b"))
    bind(here, ask(prompt_tokens=3000, pinned="a"))
    large = wait(here, ask(prompt_tokens=9000))
    small = wait(here)
    assert drain(here) == {small: "a"}
    assert list(here.queue) == [large]


def test_engines_that_stream_slowly_cost_more() -> None:
    here = hall(8, 8)
    fast, slow = here.sites
    for second in range(100):
        for leased in (bind(here), bind(here)):
            stream_tokens(here, leased, 20, 0.03 if leased.engine is slow else 0.01)
        here.now = second + 1.0
    assert slow.relative_cost / fast.relative_cost == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize(("tokens", "client_was_slow"), [(7, False), (20, True)])
def test_streams_that_are_short_or_slowed_by_their_client_teach_no_speed(tokens: int, client_was_slow: bool) -> None:
    here = hall(8, 8)
    for _ in range(100):
        for leased in (bind(here), bind(here)):
            seconds = 0.03 if leased.engine is here.sites[1] else 0.01
            stream_tokens(here, leased, tokens, seconds, client_was_slow=client_was_slow)
    assert [engine.relative_cost for engine in here.sites] == [1.0, 1.0]


def stream_tokens(here: Hall, leased: Lease, tokens: int, seconds: float, *, client_was_slow: bool = False) -> None:
    usage = Usage(leased.demand.prompt_tokens, tokens)
    here.scheduler.first_token(leased, here.now)
    leased.on_tokens(tokens)
    leased.on_answer(UpstreamResult(200, usage, here.now, client_was_slow=client_was_slow))
    leased.on_usage(usage)
    here.scheduler.release(leased, here.now + (tokens - 1) * seconds, answered=True)


def test_a_stream_without_a_sequence_is_no_error() -> None:
    here = hall(2)
    leased = bind(here, ask(sequences=0))
    stream_tokens(here, leased, 20, 0.01)
    assert leased.released
