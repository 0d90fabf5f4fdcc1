import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing.engine import Engine, prefill_seconds
from gateway.core.routing.estimates import Calibration, Calibrations, CostModel
from tests.unit.routing.crowds import work

START = 28e-6


def teach(calibration: Calibration, true_b: float, times: int, tokens: int = 1000) -> None:
    """Clean samples from an engine whose constants follow `true_b`."""
    true = CostModel(true_b)
    for _ in range(times):
        predicted = prefill_seconds(calibration.model, 1.0, tokens, 0) + calibration.model.a
        calibration.first_token(tokens, predicted, prefill_seconds(true, 1.0, tokens, 0) + true.a)


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 10.0])
def test_started_ten_times_wrong_it_ends_within_a_tenth(factor: float) -> None:
    calibration = Calibration(CostModel())
    teach(calibration, START * factor, 100)
    assert calibration.model.b == pytest.approx(START * factor, rel=0.1)


def test_the_other_constants_follow() -> None:
    calibration = Calibration(CostModel(decode_weight=3.0, max_batched_tokens=2048))
    teach(calibration, START * 4, 100)
    assert calibration.model.a == pytest.approx(286 * calibration.model.b)
    assert calibration.model.decode_weight == 3.0
    assert calibration.model.max_batched_tokens == 2048


@pytest.mark.parametrize(
    ("tokens", "predicted", "seconds"), [(63, 1.0, 2.0), (1000, 0.0, 2.0), (1000, 1.0, 0.0), (1000, 1.0, -1.0)]
)
def test_samples_without_information_are_ignored(tokens: int, predicted: float, seconds: float) -> None:
    calibration = Calibration(CostModel())
    calibration.first_token(tokens, predicted, seconds)
    assert calibration.model.b == START


def test_one_outlier_moves_it_by_a_twentieth_of_its_clipped_weight() -> None:
    calibration = Calibration(CostModel())
    teach(calibration, START, 50)
    calibration.first_token(1000, 0.01, 1000.0)
    assert calibration.model.b == pytest.approx(START * 4**0.05)


def test_a_whole_answer_bounds_the_time_to_its_first_token_from_above_only() -> None:
    calibration = Calibration(CostModel())
    calibration.at_most(1000, 0.1, 0.5)
    assert calibration.model.b == START
    calibration.at_most(1000, 0.1, 0.05)
    assert calibration.model.b < START


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6), st.floats(-1, 1e6)), max_size=100),
)
def test_nothing_that_is_measured_drives_it_out_of_range(samples: list[tuple[int, float, float]]) -> None:
    calibration = Calibration(CostModel())
    for sample in samples:
        calibration.first_token(*sample)
        calibration.at_most(*sample)
    assert 1e-7 <= calibration.model.b <= 1e-1


def test_a_budget_of_prefill_is_one_engine_step_but_never_less_than_20_milliseconds() -> None:
    assert Calibration(CostModel(b=1e-6)).budget_seconds == 0.02
    assert Calibration(CostModel(b=1e-3)).budget_seconds == pytest.approx(8.192)
    assert Calibration(CostModel(b=1e-3, max_batched_tokens=2048)).budget_seconds == pytest.approx(2.048)


def test_the_budget_follows_the_learned_time_of_a_token() -> None:
    calibration = Calibration(CostModel())
    teach(calibration, START * 4, 50)
    assert calibration.budget_seconds == pytest.approx(8192 * calibration.model.b)


def test_each_model_has_its_own_and_adapters_that_of_their_base() -> None:
    start = CostModel()
    calibrations = Calibrations(start, lambda model: "base" if model == "adapter" else model)
    teach(calibrations.learning("adapter"), START * 4, 50)
    assert calibrations.of("base") is calibrations.of("adapter")
    assert calibrations.of("adapter").model.b > 3 * START
    assert calibrations.of("other").model is start
    assert calibrations.learning("other").model is start  # until it has learned: engines know by it what they have kept


def test_models_are_bounded_and_those_that_are_only_asked_for_are_not_kept() -> None:
    calibrations = Calibrations(CostModel())
    for number in range(3000):
        calibrations.of(f"made up {number}")
        calibrations.learning(f"model {number}")
    assert len(calibrations) == 1024


def test_the_relative_costs_of_engines_show_in_their_streams_whatever_their_load() -> None:
    """The slow engine has little to do; the other has a batch, and prefills for a third of its time."""
    calibration, fast, slow = Calibration(CostModel()), Engine(0, "fast"), Engine(1, "slow")
    for second in range(60):
        for engine, share in ((fast, 0.3), (slow, 0.0)):
            started = work(1, 1000, share, observable=True)
            engine.load.start(started, float(second))
            engine.load.first_token(started, second + share)
            if engine is slow:
                engine.load.finish(started, second + share)
    step = {engine: engine.terms(calibration.model).step for engine in (fast, slow)}
    for _ in range(100):
        share = fast.load.prefill_share(60.0)
        fast.streamed(calibration, step[fast] / (1 - share), 60.0)
        slow.streamed(calibration, 3 * step[slow], 60.0)
    assert slow.relative_cost / fast.relative_cost == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize("token_seconds", [0.0, -1.0])
def test_a_stream_without_a_pace_is_ignored(token_seconds: float) -> None:
    engine = Engine(0, "a")
    for _ in range(50):
        engine.streamed(Calibration(CostModel()), token_seconds, 0.0)
    assert engine.relative_cost == 1.0


def test_a_reload_of_the_start_value_counts_for_models_of_which_nothing_is_learned() -> None:
    calibrations = Calibrations(CostModel(1e-5))
    learned, fresh = calibrations.learning("learned"), calibrations.learning("fresh")
    for _ in range(20):
        learned.first_token(1000, 0.01, 0.04)
    b = learned.model.b
    calibrations.apply(CostModel(5e-5, decode_weight=3.0))
    assert (fresh.model.b, calibrations.of("new").model.b) == (5e-5, 5e-5)
    assert abs(learned.model.b - b) <= 0.03 * b
    assert [each.model.decode_weight for each in (learned, fresh, calibrations.of("new"))] == [3.0] * 3
