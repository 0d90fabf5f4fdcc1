import pytest

from gateway.request import Demand
from gateway.routing.cache_view import HitAccuracy, HitPredictor, PrefixIndex
from gateway.routing.engine import CostModel, Engine, Option, Work
from gateway.routing.estimates import Calibrations, Estimates
from gateway.routing.policy import Affinity, PrefixPolicy

KEYS, EDGES = (1, 2), (1600, 16_000)


class Scene:
    """Three idle engines under the prefix policy."""

    def __init__(self) -> None:
        self.index = PrefixIndex([1 << 30] * 3)
        self.engines = [Engine(number, "abc"[number]) for number in range(3)]
        self.policy = PrefixPolicy(
            Calibrations(CostModel()), HitPredictor(self.index, HitAccuracy()), Estimates(), Affinity()
        )
        self.hinted_at("c")

    def hinted_at(self, name: str) -> None:
        self.policy.placed(Demand("m", hint=7), self._option(name))

    def _option(self, name: str) -> Option:
        return Option(next(engine for engine in self.engines if engine.name == name), 0.0, 0.0, 0)

    def best(self, hint: int = 7, keys: tuple[int, ...] = KEYS) -> str:
        ask = Demand("m", keys=keys, edges=EDGES, prompt_size=16_000, prompt_tokens=4000, hint=hint)
        return min(self.policy.options(ask, self.engines, 0.0), key=lambda option: option.cost).engine.name

    def send(self, name: str, count: int = 1, prefill_seconds: float = 0.0) -> None:
        load = self._option(name).engine.load
        for _ in range(count):
            work = Work(1, 1000, prefill_seconds, observable=True)
            load.start(work, 0.0)
            if not prefill_seconds:
                load.first_token(work, 0.0)


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
    Affinity().favour(7, [])


def test_old_hints_are_forgotten() -> None:
    affinity, engine = Affinity(), Engine(0, "a")
    for hint in range(70_000):
        affinity.placed(hint, engine)
    options = [Option(engine, 1.0, 1.0, 0)]
    affinity.favour(1, options)
    assert options[0].cost == 1.0
    affinity.favour(69_999, options)
    assert options[0].cost == 0.8
