from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.features.exact.index import ExactIndex


def index_of(**holds: set[int]) -> ExactIndex:
    index = ExactIndex()
    for engine, keys in enumerate(holds.values()):
        index.update(engine, keys, ())
        index.set_live(engine, True)
    return index


def test_depth_is_the_number_of_leading_blocks() -> None:
    index = index_of(a={1, 2, 3}, b={1, 2}, c={2, 3}, d=set())
    assert index.depths([1, 2, 3, 4]) == [3, 2, 0, 0]
    assert index.depths([1, 2]) == [2, 2, 0, 0]
    assert index.depths([]) == [0, 0, 0, 0]


def test_a_prefix_ends_at_a_hole() -> None:
    index = index_of(a={1, 3, 4})
    assert index.depths([1, 2, 3, 4]) == [1]


def test_an_engine_that_is_not_live_has_no_depth_and_keeps_its_blocks() -> None:
    index = index_of(a={1}, b={1})
    index.set_live(0, False)
    assert index.depths([1]) == [0, 1]
    assert (index.live(0), index.live(1), index.live(7)) == (False, True, False)
    index.set_live(0, True)
    assert index.depths([1]) == [1, 1]


def test_an_engine_that_comes_later_gets_the_next_place() -> None:
    index = index_of(a={1})
    index.set_live(200, True)
    index.update(200, [1], [])
    assert index.depths([1]) == [1] + [0] * 199 + [1]


def test_keys_that_no_engine_holds_are_forgotten() -> None:
    index = index_of(a={1, 2}, b={2, 3})
    index.clear(0)
    assert len(index) == 2
    index.update(1, [], [2, 3, 99])
    assert len(index) == 0


def test_removing_what_another_engine_holds_leaves_it_there() -> None:
    index = index_of(a={1}, b=set())
    index.update(1, (), [1])
    assert index.depths([1]) == [1, 0]


def test_its_size_is_the_number_of_keys() -> None:
    assert repr(index_of(a={1}, b={1, 2})) == "<ExactIndex 2 keys of 2 engines, live: 11>"


ENGINES = st.integers(0, 9)
KEYS = st.lists(st.integers(0, 12), max_size=8)


class IndexMachine(RuleBasedStateMachine):
    """Against a set of keys for each engine."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ExactIndex()
        self.sets: dict[int, set[int]] = {}
        self.live: set[int] = set()

    @rule(engine=ENGINES, added=KEYS, removed=KEYS)
    def changes(self, engine: int, added: list[int], removed: list[int]) -> None:
        gone = set(removed) - set(added)
        self.index.update(engine, added, gone)
        self.sets[engine] = self.sets.get(engine, set()) - gone | set(added)

    @rule(engine=ENGINES)
    def is_cleared(self, engine: int) -> None:
        self.index.clear(engine)
        self.sets[engine] = set()

    @rule(engine=ENGINES, live=st.booleans())
    def comes_or_goes(self, engine: int, live: bool) -> None:
        self.index.set_live(engine, live)
        self.sets.setdefault(engine, set())
        (self.live.add if live else self.live.discard)(engine)

    @rule(keys=KEYS)
    def is_asked(self, keys: list[int]) -> None:
        depths = self.index.depths(keys)
        assert len(depths) == max(self.sets, default=-1) + 1
        for engine, depth in enumerate(depths):
            held = self.sets.get(engine, set()) if engine in self.live else set()
            assert depth == next((place for place, key in enumerate(keys) if key not in held), len(keys))

    @invariant()
    def holds_no_key_of_nobody(self) -> None:
        assert len(self.index) == len(set().union(*self.sets.values()))


TestIndex = IndexMachine.TestCase
