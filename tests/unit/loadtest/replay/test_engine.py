"""The lazily advanced engine does what one does that takes every step."""

from __future__ import annotations

import math
import random

import pytest

from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.scheduler import Limits
from loadtest.engine.step_time import PRESETS
from loadtest.replay.engine import ReplayEngine
from tests.unit.loadtest.engine.support import VirtualEngine

STEP = PRESETS["h100-8b"]


def _sequences(count: int, seed: int) -> list[tuple[float, SequenceState]]:
    rng, at, made = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(15.0)
        shared = tuple(range(rng.randint(0, 3) * 100, rng.randint(0, 3) * 100 + 5))
        prompt = rng.randint(100, 900)
        keys = (*shared, *range(number * 1000 + 10_000, number * 1000 + 10_100))[: prompt // 16]
        made.append((at, SequenceState(number, prompt, rng.randint(1, 120), prompt_keys=keys)))
    return made


def _run_lazily(engine: ReplayEngine, arrivals: list[tuple[float, SequenceState]]) -> None:
    coming = list(arrivals)
    while coming or engine.next_event_seconds < math.inf:
        if coming and coming[0][0] < engine.next_event_seconds:
            at, sequence = coming.pop(0)
            engine.submit(sequence, at)
        else:
            engine.advance()


@pytest.mark.parametrize("blocks", [4000, 150], ids=["enough memory", "preempting"])
def test_ends_are_those_of_an_engine_that_takes_single_steps(blocks: int) -> None:
    limits = Limits(max_num_seqs=12, max_num_batched_tokens=512, num_blocks=blocks)
    lazy, plain = ReplayEngine(limits, STEP), VirtualEngine(limits, STEP)
    ones, others = _sequences(150, 3), _sequences(150, 3)
    _run_lazily(lazy, ones)
    for at, sequence in others:
        plain.advance(at)
        plain.submit(sequence)
    plain.advance(math.inf)
    assert [s.finished_seconds for _, s in ones] == pytest.approx([s.finished_seconds for _, s in others], abs=1e-6)
    assert [s.cached_tokens for _, s in ones] == [s.cached_tokens for _, s in others]
    assert [s.preemptions for _, s in ones] == [s.preemptions for _, s in others]
    assert (sum(s.preemptions for _, s in ones) > 0) == (blocks == 150)
    assert lazy.scheduler.pool.num_used == 0


def test_one_request_takes_what_the_step_model_says() -> None:
    engine = ReplayEngine(Limits(max_num_batched_tokens=1000), STEP)
    sequence = SequenceState(0, 2500, 11)
    engine.submit(sequence, 5.0)
    while engine.next_event_seconds < math.inf:
        engine.advance()
    prefill = 3 * STEP.base_seconds + STEP.prefill_seconds(2500, 0)
    assert sequence.first_token_seconds - 5.0 == pytest.approx(prefill, abs=1e-9)
    decode = STEP.decode_stretch_seconds(10, 1, 2500)
    assert sequence.finished_seconds - sequence.first_token_seconds == pytest.approx(decode, abs=1e-9)


def test_an_arrival_joins_the_step_after_the_one_that_runs() -> None:
    engine = ReplayEngine(Limits(), STEP)
    first, second = SequenceState(0, 100, 1000), SequenceState(1, 100, 1)
    engine.submit(first, 0.0)
    engine.advance()
    start, step = first.first_token_seconds, STEP.decode_stretch_seconds(1, 1, 100)
    engine.submit(second, start + 2.5 * step)
    engine.advance()
    while second.finished_seconds < 0:
        engine.advance()
    three = STEP.decode_stretch_seconds(3, 1, 100)
    mixed = STEP.base_seconds + STEP.prefill_seconds(100, 0) + STEP.decode_seconds(1, 103)
    assert second.finished_seconds == pytest.approx(start + three + mixed, abs=1e-9)


def test_a_lost_cache_hits_nothing() -> None:
    engine, keys = ReplayEngine(Limits(), STEP), tuple(range(6))

    def run(number: int, at: float) -> int:
        sequence = SequenceState(number, 100, 2, prompt_keys=keys)
        engine.submit(sequence, at)
        while engine.next_event_seconds < math.inf:
            engine.advance()
        return sequence.cached_tokens

    assert [run(0, 0.0), run(1, 10.0)] == [0, 96]
    engine.forget_cache()
    assert [run(2, 20.0), run(3, 30.0)] == [0, 96]
    assert engine.scheduler.pool.num_used == 0
