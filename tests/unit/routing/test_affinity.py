import pytest

from gateway.core.request import Demand
from gateway.core.routing.cache_view import HitAccuracy, PrefixIndex
from gateway.core.routing.engine import Engine
from gateway.core.routing.estimates import Estimates
from gateway.core.routing.policy import Affinity, HitPredictor, PrefixPolicy
from tests.unit.routing.crowds import options_of, work

KEYS, EDGES = (1, 2), (1600, 16_000)


class Scene:
    """Three idle engines under the prefix policy."""

    def __init__(self) -> None:
        self.index = PrefixIndex([1 << 30] * 3)
        self.engines = [Engine(number, "abc"[number]) for number in range(3)]
        self.policy = PrefixPolicy(HitPredictor(self.index, HitAccuracy()), Estimates(), Affinity())
        self.hinted_at("c")

    def hinted_at(self, name: str) -> None:
        self.policy.placed(Demand("m", hint=7), self._engine(name))

    def _engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def best(self, hint: int = 7, keys: tuple[int, ...] = KEYS) -> str:
        ask = Demand("m", keys=keys, edges=EDGES, prompt_size=16_000, prompt_tokens=4000, hint=hint)
        return min(options_of(self.policy, ask, self.engines, 0.0), key=lambda option: option.cost).engine.name

    def send(self, name: str, count: int = 1, prefill_seconds: float = 0.0) -> None:
        load = self._engine(name).load
        for _ in range(count):
            started = work(1, 1000, prefill_seconds, observable=True)
            load.start(started, 0.0)
            if not prefill_seconds:
                load.first_token(started, 0.0)


def test_between_equally_cold_engines_the_one_that_had_the_hint_last_is_taken() -> None:
    scene = Scene()
    assert [scene.best(hint) for hint in (7, 8, 0)] == ["c", "a", "a"]
    scene.hinted_at("b")
    assert scene.best() == "b"


def test_a_hint_never_decides_against_an_engine_that_holds_more_of_the_prompt() -> None:
    scene = Scene()
    scene.index.record(1, KEYS[:1], EDGES[:1])
    assert scene.best() == "b"


def test_between_engines_that_hold_the_same_a_hint_decides() -> None:
    scene = Scene()
    for engine in (1, 2):
        scene.index.record(engine, KEYS[:1], EDGES[:1])
    assert scene.best() == "c"


@pytest.mark.parametrize(("count", "prefill_seconds"), [(1, 0.1), (4, 0.0)], ids=["a prefill ahead", "a few decoding"])
def test_a_hint_never_decides_against_a_real_difference_in_load(count: int, prefill_seconds: float) -> None:
    scene = Scene()
    scene.send("c", count, prefill_seconds)
    assert scene.best() == "a"


def test_a_hint_to_an_engine_that_is_not_there_changes_nothing() -> None:
    scene = Scene()
    del scene.engines[2]
    assert scene.best() == "a"
    assert Affinity().favoured(7, [], []) is None


def test_old_hints_are_forgotten() -> None:
    affinity, engine = Affinity(), Engine(0, "a")
    for hint in range(70_000):
        affinity.placed(hint, engine)
    assert affinity.favoured(1, [engine], [0]) is None
    assert affinity.favoured(69_999, [engine], [0]) == 0
