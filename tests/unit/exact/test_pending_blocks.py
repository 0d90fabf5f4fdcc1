from hypothesis import given
from hypothesis import strategies as st

from gateway.features.exact.caches import LIFE_SECONDS, PendingBlocks

KEYS = (11, 12, 13, 14)


def expecting(*engines: int) -> PendingBlocks:
    pending = PendingBlocks()
    for engine in engines:
        pending.expect(engine, KEYS)
    return pending


def test_blocks_that_were_sent_follow_each_other_on_their_way() -> None:
    pending = expecting(0, 65)
    for engine in (0, 65):
        assert [pending.run(engine, KEYS, start) for start in range(5)] == [4, 3, 2, 1, 0]
        assert pending.run(engine, (11, 12, 99, 13), 0) == 2
    assert pending.run(1, KEYS, 0) == 0


def test_reported_blocks_are_not_pending_any_more() -> None:
    pending = expecting(0, 1)
    pending.reported(0, (12, 99))
    assert [pending.run(engine, KEYS, 0) for engine in (0, 1)] == [1, 4]
    assert pending.run(0, KEYS, 2) == 2
    for engine in (0, 1):
        pending.reported(engine, KEYS)
    assert not pending


def test_nothing_is_on_its_way_to_an_engine_whose_cache_is_gone() -> None:
    pending = expecting(0, 1)
    pending.age(LIFE_SECONDS)
    pending.expect(0, (77,))
    pending.forget(0)
    assert [pending.run(engine, (*KEYS, 77), 0) for engine in (0, 1)] == [0, 4]


@given(begins=st.floats(0, 1e6), steps=st.lists(st.floats(0.01, 2 * LIFE_SECONDS), max_size=20))
def test_blocks_that_are_never_reported_are_forgotten_after_a_while(begins: float, steps: list[float]) -> None:
    pending, now = PendingBlocks(), begins
    pending.age(begins)
    pending.expect(0, KEYS)
    for step in steps:
        now += step
        pending.age(now)
        if now - begins < LIFE_SECONDS * 0.999:
            assert pending.run(0, KEYS, 0) == 4
    for _ in range(2):
        now += LIFE_SECONDS * 1.001
        pending.age(now)
    assert not pending


def test_what_is_sent_again_lives_again() -> None:
    pending = expecting(0)
    for turn in range(1, 6):
        pending.age(turn * LIFE_SECONDS)
        pending.expect(0, KEYS[:2])
    assert pending.run(0, KEYS, 0) == 2
    pending.reported(0, KEYS)
    assert not pending
