"""Logs of gateways that never were: a trace through modelled engines, written down as a gateway would."""

from __future__ import annotations

import random

from loadtest.engine.step_time import StepTime
from loadtest.predict.command import replayed
from loadtest.recording import Logged
from loadtest.replay.scenario import Scenario
from loadtest.workloads.trace import Row, Trace

BLOCK = 64
BYTES_PER_TOKEN = 4
STEP = StepTime(
    4e-3, 50e-6, per_attention_pair_seconds=0.0, per_decode_sequence_seconds=200e-6, per_context_token_seconds=0.0
)
SIZES = Scenario(2, 0.0, 0, kv_tokens=40_000, max_num_seqs=16, max_num_batched_tokens=1024)
START = 1_700_000_000.0  # Unix time


def traffic(rows: int = 400, per_second: float = 20.0, seed: int = 3) -> Trace:
    """Poisson arrivals of prompts under five shared openings."""
    rng = random.Random(seed)
    made, at, own = list[Row](), 0.0, 1_000_000
    for _ in range(rows):
        at += rng.expovariate(per_second)
        opening = rng.randrange(5) * 100
        blocks = rng.randint(1, 6)
        keys = (*range(opening, opening + 8), *range(own, own + blocks))
        own += blocks
        made.append(Row(round(at, 3), len(keys) * BLOCK, rng.randint(1, 60), keys=keys))
    return Trace("made-up", made, BLOCK)


def logged(trace: Trace, step_time: StepTime = STEP, overhead_seconds: float = 0.0) -> list[Logged]:
    """What the log would say if the engines were as modelled, and everything else took that long."""
    requests = replayed(trace, SIZES, step_time, "ours")
    return [
        Logged(
            START + request.arrival_seconds,
            model="m",
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            size_bytes=request.prompt_tokens * BYTES_PER_TOKEN,
            ends=tuple(BYTES_PER_TOKEN * BLOCK * (number + 1) for number in range(len(row.keys))),
            hashes=tuple(str(key) for key in row.keys),
            duration_seconds=request.e2e_seconds + overhead_seconds,
            first_seconds=request.ttft_seconds + overhead_seconds,
            queue_seconds=request.sent_seconds - request.arrival_seconds,
            backend=f"engine-{request.engine}",
            cached_tokens=request.cached_tokens,
        )
        for row, request in zip(trace.rows, requests, strict=True)
    ]
