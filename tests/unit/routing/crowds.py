"""Engines under any load, and requests of any size, for property tests."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from gateway.core.request import Demand
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import CostModel
from gateway.core.routing.kv_reservations import KvLedger, Reservation
from gateway.core.routing.policy import Policy

NOW = 5.0
AskedFor = tuple[int, float, list[int]]  # prompt tokens, output tokens, hits
MODELS = st.builds(
    CostModel, st.sampled_from([28e-6, 1e-3]), st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from([512, 8192])
)


class Option(NamedTuple):
    """What one engine means for a request."""

    engine: Engine
    cost: float
    prefill_seconds: float
    hit_tokens: int


def options_of(
    policy: Policy, demand: Demand, among: Sequence[Engine], now: float, model: CostModel | None = None
) -> list[Option]:
    options = policy.options(demand, among, model or CostModel(), now)
    columns = options.engines, options.costs, options.prefill_seconds, options.hit_tokens
    return [Option._make(each) for each in zip(*columns, strict=True)]


def work(sequences: int, prompt_tokens: int, prefill_seconds: float, observable: bool) -> Reservation:
    """What a request of that many sequences holds on an engine; its first token is seen if `observable`."""
    demand = Demand("m", sequences=sequences, prompt_tokens=prompt_tokens, streams=observable)
    return Reservation(demand, sequences, prefill_seconds)


def reserve(ledger: KvLedger, demand: Demand, output_tokens: int) -> Reservation:
    reservation = Reservation(demand, demand.sequences, 0.0)
    ledger.reserve(reservation, output_tokens)
    return reservation


WORKS = st.builds(
    work,
    sequences=st.integers(0, 4),
    prompt_tokens=st.integers(1, 20_000),
    prefill_seconds=st.sampled_from([0.0, 0.01, 0.3, 10.0]),
    observable=st.booleans(),
)


def _asked_for(prompt_tokens: int) -> st.SearchStrategy[AskedFor]:
    hits = st.lists(st.integers(0, prompt_tokens - 1), min_size=5, max_size=5)
    return st.tuples(st.just(prompt_tokens), st.floats(0, 2000), hits)


ASKS = st.integers(1, 200_000).flatmap(_asked_for)


@st.composite
def engines(draw: st.DrawFn) -> list[Engine]:
    made = []
    for number in range(draw(st.integers(1, 5))):
        engine = Engine(
            number,
            "abcde"[number],
            slots=draw(st.integers(1, 6)),
            kv_cache_tokens=draw(st.sampled_from([None, 500, 30_000, 1_000_000])),
            slowness=draw(st.sampled_from([0.5, 1.0, 3.0])),
            placed=draw(st.integers(0, 3)),
        )
        for started in draw(st.lists(WORKS, max_size=5)):
            engine.kv.held.add(started)
            engine.load.start(started, draw(st.sampled_from([0.0, 4.9])))
            if draw(st.booleans()):
                engine.load.first_token(started, 4.9)
        made.append(engine)
    return made
