"""Small traces and fleets for replays."""

from __future__ import annotations

import random
from collections.abc import Sequence

from loadtest.replay.engine import ReplayEngine, ReplayRequest
from loadtest.replay.policies import RouterContext
from loadtest.replay.router import EngineView
from loadtest.replay.scenario import Scenario
from loadtest.replay.simulation import engines_of
from loadtest.workloads.trace import Row, Trace

BLOCK = 64


def scenario(engines: int = 2, rate: float = 20.0, seed: int = 0, **others: object) -> Scenario:
    """A small fleet of fast engines with little memory."""
    fields: dict[str, object] = {"kv_tokens": 20_000, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
    return Scenario(engines, rate, seed, **(fields | others))  # type: ignore[arg-type]


def conversation_trace(rows: int = 300, seed: int = 1) -> Trace:
    """Groups of prompts that share an opening, some of them follow-up turns, ten a second."""
    rng, made, key = random.Random(seed), list[Row](), 1_000_000
    openings = [tuple(range(group * 100, group * 100 + 6)) for group in range(5)]
    for number in range(rows):
        earlier = rng.choice(made) if made and rng.random() < 0.4 else None
        keys = earlier.keys if earlier is not None and len(earlier.keys) < 30 else rng.choice(openings)
        own = rng.randint(1, 6)
        keys = (*keys, *range(key, key + own))
        key += own
        made.append(Row(number / 10, len(keys) * BLOCK + rng.randint(0, BLOCK - 1), rng.randint(1, 80), keys=keys))
    return Trace("made-up", made, BLOCK)


def session_trace(sessions: int = 6, turns: int = 4, think_seconds: float = 0.5) -> Trace:
    """Sessions that start a second apart; each turn extends the prompt by two blocks."""
    rows = [
        Row(
            float(session),
            BLOCK * 2 * turn + 10,
            20,
            keys=tuple(range(session * 100, session * 100 + 2 * turn)),
            session=session,
            think_seconds=think_seconds if turn > 1 else 0.0,
        )
        for session in range(sessions)
        for turn in range(1, turns + 1)
    ]
    return Trace("sessions", rows, BLOCK, sessions=True)


def request(
    number: int = 0, prompt_tokens: int = 640, output_tokens: int = 10, keys: Sequence[int] | None = None
) -> ReplayRequest:
    """A request at time zero; its keys are its own unless given."""
    own = range(number * 10_000, number * 10_000 + prompt_tokens // BLOCK)
    return ReplayRequest(
        number,
        arrival_seconds=0.0,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        keys=tuple(own if keys is None else keys),
    )


def site(at: Scenario) -> RouterContext:
    """Engines for a scenario, and lots."""
    return RouterContext(at, BLOCK, engines_of(at, BLOCK), rng=random.Random(0))


def views(engines: Sequence[ReplayEngine]) -> list[EngineView]:
    """How a rule sees engines."""
    return [EngineView(index, engine) for index, engine in enumerate(engines)]
