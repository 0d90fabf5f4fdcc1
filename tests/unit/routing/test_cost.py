import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing.engine import Engine, EngineLoad, Terms, cost_parts, placement_costs, prefill_seconds
from gateway.core.routing.estimates import CostModel
from tests.unit.routing.crowds import work

MODEL = CostModel()


def load_of(
    decoding: int = 0, in_prefill: int = 0, tokens_each: int = 1000, prefill_seconds_each: float = 0.03
) -> EngineLoad:
    load = EngineLoad()
    for number in range(decoding + in_prefill):
        started = work(1, tokens_each, prefill_seconds_each, observable=True)
        load.start(started, 0.0)
        if number < decoding:
            load.first_token(started, 0.0)
    return load


def cost(
    load: EngineLoad | None = None,
    *,
    model: CostModel = MODEL,
    slots: int = 256,
    kv: int | None = None,
    slowness: float = 1.0,
    prompt: int = 2000,
    hit: int = 0,
    output: float = 200.0,
) -> float:
    load = load or EngineLoad()
    engine = Engine(0, "a", slots=slots, kv_cache_tokens=kv, slowness=slowness, load=load)
    return cost_on(engine, model, prompt, min(hit, prompt - 1), output)


def cost_on(engine: Engine, model: CostModel, prompt: int, hit: int, output: float) -> float:
    """Its cost, without interruptions by later prefills."""
    engine.load.recent_share = 0.0
    [found], _ = placement_costs(model, [engine], [hit], prompt, output, 0.0)
    return found


def test_the_step_constants_follow_b_in_the_measured_proportions() -> None:
    assert pytest.approx(0.008, rel=0.01) == MODEL.a
    assert pytest.approx(14e-6) == MODEL.c
    assert pytest.approx(47e-9, rel=0.01) == MODEL.d
    assert pytest.approx(1.3e-9, rel=0.01) == MODEL.e
    assert pytest.approx(2 * MODEL.a) == CostModel(b=56e-6).a


def test_on_an_idle_backend_the_cost_is_prefill_plus_one_step_a_chunk() -> None:
    assert cost(prompt=1000) == pytest.approx(2 * (28e-6 * 1000 + 4.6e-5 * 28e-6 * 1000 * 500) + MODEL.a)
    assert cost(prompt=8193) - 2 * prefill_seconds(MODEL, 1.0, 8193, 0) == pytest.approx(2 * MODEL.a)


def test_the_cost_of_a_busy_backend_is_that_of_the_written_formula() -> None:
    load = load_of(decoding=3, in_prefill=2)
    u, batch, context, decoding, output = 1500, 5, 5000, 3, 200.0
    own = 28e-6 * u + MODEL.e * u * (2000 - u / 2)
    step = MODEL.a + MODEL.c * decoding + MODEL.d * context
    expected = 2 * 0.03  # prefill ahead
    expected += own * (2 + 0.25 * batch)
    expected += step * (1 + 2 + 0.5)
    expected += 0.3 * output * (2 * MODEL.c * batch + MODEL.d * context + MODEL.d * batch * 2000)
    assert cost(load, prompt=2000, hit=500) == pytest.approx(expected)


@given(
    prompt=st.integers(1, 200_000), hit=st.integers(0, 200_000), more=st.integers(1, 1000), slowness=st.floats(0.1, 10)
)
def test_a_larger_hit_never_costs_more(prompt: int, hit: int, more: int, slowness: float) -> None:
    load = load_of(decoding=2, in_prefill=1)
    smaller = cost(load, prompt=prompt, hit=min(hit, prompt), slowness=slowness)
    larger = cost(load, prompt=prompt, hit=min(hit + more, prompt), slowness=slowness)
    assert larger <= smaller + 1e-12


@given(prompt=st.integers(1, 100_000))
def test_at_least_one_token_is_computed_however_much_is_held(prompt: int) -> None:
    assert prefill_seconds(MODEL, 1.0, prompt, prompt) == prefill_seconds(MODEL, 1.0, prompt, prompt - 1) > 0


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (load_of(decoding=1), load_of(decoding=2)),
        (load_of(decoding=2), load_of(decoding=1, in_prefill=1)),
        (load_of(in_prefill=1), load_of(in_prefill=2)),
        (load_of(decoding=4, tokens_each=500), load_of(decoding=4, tokens_each=5000)),
    ],
    ids=["fewer decoding", "no prefill ahead", "less prefill ahead", "less context"],
)
def test_a_less_loaded_backend_costs_less(better: EngineLoad, worse: EngineLoad) -> None:
    assert cost(better) < cost(worse)


def test_a_slower_backend_costs_more_even_when_idle() -> None:
    assert cost() < cost(slowness=1.5)


def test_a_full_backend_costs_the_wait_for_a_slot() -> None:
    load = load_of(decoding=4)
    step = MODEL.a + MODEL.c * 4 + MODEL.d * 4000
    assert cost(load, slots=4) - cost(load, slots=5) == pytest.approx(1 * 200.0 * step / 4)


def test_missing_kv_cache_costs_the_wait_for_it() -> None:
    load = load_of(decoding=4)
    step = MODEL.a + MODEL.c * 4 + MODEL.d * 4000
    assert cost(load, kv=100_000) == pytest.approx(cost(load))
    room = 5000 - 4000 - 4 * 100
    assert cost(load, kv=5000) - cost(load) == pytest.approx((2000 - room) * 200.0 * step / 4000)


@pytest.mark.parametrize("output", [0.0, 1.0])
def test_answers_of_no_length_have_a_cost_too(output: float) -> None:
    assert cost(load_of(decoding=4), kv=1, slots=1, output=output) > 0


def test_with_a_decode_weight_of_zero_only_the_time_to_the_first_token_counts() -> None:
    ttft = CostModel(decode_weight=0.0)
    load = load_of(decoding=4)
    step = ttft.a + ttft.c * 4 + ttft.d * 4000
    assert cost(load, model=ttft) == pytest.approx(2 * prefill_seconds(ttft, 1.0, 2000, 0) + 1.5 * step)


def test_a_step_without_prefill_takes_longer_with_each_sequence_and_each_token_of_context() -> None:
    assert Terms(MODEL, EngineLoad(), 1, None, 1.0).step == MODEL.a
    assert Terms(MODEL, load_of(decoding=3), 1, None, 2.0).step == pytest.approx(
        2 * (MODEL.a + 3 * MODEL.c + 3000 * MODEL.d)
    )


@given(
    prompt=st.integers(1, 200_000),
    share=st.floats(0, 1),
    slowness=st.floats(0.1, 10),
    slots=st.integers(1, 8),
    kv=st.none() | st.integers(1, 100_000),
    output=st.floats(0, 5000),
    decoding=st.integers(0, 6),
    in_prefill=st.integers(0, 3),
)
def test_the_parts_of_a_cost_are_all_of_it(
    prompt: int, share: float, slowness: float, slots: int, kv: int | None, output: float, decoding: int,
    in_prefill: int,
) -> None:  # fmt: skip
    load, hit = load_of(decoding, in_prefill), min(int(share * prompt), prompt - 1)
    engine = Engine(0, "a", slots=slots, kv_cache_tokens=kv, slowness=slowness, load=load)
    found = cost_on(engine, MODEL, prompt, hit, output)
    own, ahead = prefill_seconds(MODEL, slowness, prompt, hit), load.prefill_ahead_seconds(0.0)
    chunks = -((hit - prompt) // MODEL.max_batched_tokens)
    parts = cost_parts(engine.terms(MODEL), prompt, own, chunks, output, ahead)
    assert sum(parts) == pytest.approx(found, rel=1e-9)
    assert all(part >= 0 for part in parts if part is not parts.slowdown)  # a faster backend slows down less than none


def test_the_parts_of_a_cost_are_separate() -> None:
    load = load_of(decoding=4, in_prefill=1)
    terms = Terms(MODEL, load, 5, 6000, 1.0)
    parts = cost_parts(terms, 2000, 0.06, 1, 200.0, 0.03)
    step = MODEL.a + MODEL.c * 4 + MODEL.d * 5000
    assert (parts.ahead, parts.prefill) == (0.03, 0.06)
    assert parts.stall == pytest.approx(0.06 * 0.25 * 5)
    assert parts.steps == pytest.approx(step * 2.5)
    assert parts.slot == pytest.approx(200 * step / 4)
    assert parts.memory == pytest.approx(200 * step / 5000 * (2000 - 1000 + 200 * 2.5))
