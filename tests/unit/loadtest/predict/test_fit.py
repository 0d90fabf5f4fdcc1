import pytest

from loadtest.engine.step_time import StepTime
from loadtest.predict.fit import FEWEST_IDLE, NoFit, Served, fit, overhead_of, served
from tests.unit.loadtest.predict.worlds import SIZES, STEP, logged, traffic

BUDGET = SIZES.max_num_batched_tokens


def seen(overhead_seconds: float = 0.0, per_second: float = 20.0) -> list[Served]:
    return list(served(logged(traffic(per_second=per_second), STEP, overhead_seconds)))


def test_the_step_time_that_made_the_times_is_found() -> None:
    found = fit(seen(overhead_seconds=0.002), BUDGET)
    assert found.step_time.base_seconds == pytest.approx(STEP.base_seconds, rel=0.1)
    assert found.step_time.per_prefill_token_seconds == pytest.approx(STEP.per_prefill_token_seconds, rel=0.15)
    assert found.step_time.per_decode_sequence_seconds == pytest.approx(STEP.per_decode_sequence_seconds, rel=0.5)
    assert found.overhead_seconds == pytest.approx(0.002, abs=0.001)
    assert found.answers > 300


def test_an_engine_twice_as_slow_is_fitted_twice_as_slow() -> None:
    slow = StepTime(
        8e-3, 100e-6, per_attention_pair_seconds=0.0, per_decode_sequence_seconds=400e-6, per_context_token_seconds=0.0
    )
    found = fit(list(served(logged(traffic(per_second=10.0), slow))), BUDGET)
    assert found.step_time.base_seconds == pytest.approx(8e-3, rel=0.1)
    assert found.step_time.per_prefill_token_seconds == pytest.approx(100e-6, rel=0.15)


def test_nothing_is_fitted_to_be_negative() -> None:
    shrinking = [
        Served(
            "a",
            number,
            first=number + 0.5 - tokens / 10_000,
            end=number + 0.9,
            cached_tokens=0,
            computed_tokens=tokens,
            output_tokens=9,
        )
        for number, tokens in enumerate(range(100, 2600, 100))
    ]
    step = fit(shrinking, BUDGET).step_time
    assert min(step.base_seconds, step.per_prefill_token_seconds, step.per_decode_sequence_seconds) >= 0


def test_too_few_requests_are_not_fitted_to() -> None:
    with pytest.raises(NoFit, match="20 streamed answers"):
        fit(seen()[:10], BUDGET)


def test_overhead_is_what_an_idle_engine_does_not_explain() -> None:
    found = overhead_of(seen(overhead_seconds=0.003, per_second=4.0), STEP, BUDGET)
    assert found.overhead_seconds == pytest.approx(0.003, abs=1e-4)
    assert found.idle_requests > 50


def test_overhead_is_left_out_where_engines_are_never_idle() -> None:
    crowded = [
        Served("a", 0.0, first=1.0 + number / 100, end=9.0, cached_tokens=0, computed_tokens=100, output_tokens=9)
        for number in range(2 * FEWEST_IDLE)
    ]
    assert overhead_of(crowded, STEP, BUDGET).overhead_seconds is None


def test_other_engines_do_not_disturb() -> None:
    apart = [
        Served(str(number), 0.0, first=1.0, end=9.0, cached_tokens=0, computed_tokens=100, output_tokens=9)
        for number in range(FEWEST_IDLE)
    ]
    assert overhead_of(apart, STEP, BUDGET).idle_requests == FEWEST_IDLE


def test_what_the_log_has_too_little_of_is_left_out() -> None:
    [whole, streamed] = logged(traffic(2))
    unstreamed = type(whole)(
        whole.at_seconds,
        model="m",
        prompt_tokens=1,
        output_tokens=1,
        size_bytes=4,
        ends=(),
        hashes=(),
        duration_seconds=1.0,
        cached_tokens=0,
    )
    assert len(list(served([unstreamed, streamed]))) == 1
