"""Engines under any load, and requests of any size, for property tests."""

from hypothesis import strategies as st

from gateway.routing.engine import CostModel, Engine, Work

NOW = 5.0
AskedFor = tuple[int, float, list[int]]  # prompt tokens, output tokens, hits
MODELS = st.builds(
    CostModel, st.sampled_from([28e-6, 1e-3]), st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from([512, 8192])
)
WORKS = st.builds(
    Work,
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
        for work in draw(st.lists(WORKS, max_size=5)):
            engine.load.start(work, draw(st.sampled_from([0.0, 4.9])))
            if draw(st.booleans()):
                engine.load.first_token(work, 4.9)
        made.append(engine)
    return made
