"""The model of time agrees with its formula."""

import pytest

from loadtest.engine.step_time import PRESETS, StepTime

MODEL = StepTime(
    1.0, 0.1, per_attention_pair_seconds=0.001, per_decode_sequence_seconds=0.01, per_context_token_seconds=0.0001
)


def test_a_prefill_chunk_pays_for_its_tokens_and_for_the_pairs_they_attend_to() -> None:
    # Tokens 3 and 4 (after 2 computed ones) attend to 3 and 4 tokens.
    assert MODEL.prefill_seconds(2, 2) == pytest.approx(0.1 * 2 + 0.001 * (3 + 4))


def test_chunks_add_up_to_the_whole_prefill() -> None:
    whole = MODEL.prefill_seconds(100, 0)
    assert MODEL.prefill_seconds(30, 0) + MODEL.prefill_seconds(70, 30) == pytest.approx(whole)


def test_a_stretch_of_decode_steps_is_the_sum_of_its_steps() -> None:
    context, total = 1000, 0.0
    for _ in range(7):
        total += MODEL.base_seconds + MODEL.decode_seconds(3, context)
        context += 3
    assert MODEL.decode_stretch_seconds(7, 3, 1000) == pytest.approx(total)


def test_the_h100_preset_meets_the_measured_prefill_times() -> None:
    preset = PRESETS["h100-8b"]
    for tokens, measured_seconds in ((1, 0.0082), (256, 0.0118), (2048, 0.0648)):
        modelled = preset.base_seconds + preset.prefill_seconds(tokens, 0)
        assert modelled == pytest.approx(measured_seconds, rel=0.3)
