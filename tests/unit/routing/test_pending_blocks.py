from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.cache_view import LIFE_SECONDS, PendingBlocks

KEYS = (11, 12, 13, 14)


def expecting(*engines: int) -> PendingBlocks:
    coming = PendingBlocks()
    for engine in engines:
        coming.expect(engine, KEYS)
    return coming


def test_blocks_that_were_sent_follow_each_other_on_their_way() -> None:
    coming = expecting(0, 65)
    for engine in (0, 65):
        assert [coming.run(engine, KEYS, start) for start in range(5)] == [4, 3, 2, 1, 0]
        assert coming.run(engine, (11, 12, 99, 13), 0) == 2
    assert coming.run(1, KEYS, 0) == 0


def test_what_events_have_told_is_on_its_way_no_more() -> None:
    coming = expecting(0, 1)
    coming.told(0, (12, 99))
    assert [coming.run(engine, KEYS, 0) for engine in (0, 1)] == [1, 4]
    assert coming.run(0, KEYS, 2) == 2
    for engine in (0, 1):
        coming.told(engine, KEYS)
    assert not coming


def test_nothing_is_on_its_way_to_an_engine_whose_cache_is_gone() -> None:
    coming = expecting(0, 1)
    coming.age(LIFE_SECONDS)
    coming.expect(0, (77,))
    coming.forget(0)
    assert [coming.run(engine, (*KEYS, 77), 0) for engine in (0, 1)] == [0, 4]


@given(begins=st.floats(0, 1e6), steps=st.lists(st.floats(0.01, 2 * LIFE_SECONDS), max_size=20))
def test_what_is_never_told_is_given_up_after_a_while(begins: float, steps: list[float]) -> None:
    coming, now = PendingBlocks(), begins
    coming.age(begins)
    coming.expect(0, KEYS)
    for step in steps:
        now += step
        coming.age(now)
        if now - begins < LIFE_SECONDS * 0.999:
            assert coming.run(0, KEYS, 0) == 4
    for _ in range(2):
        now += LIFE_SECONDS * 1.001
        coming.age(now)
    assert not coming


def test_what_is_sent_again_lives_again() -> None:
    coming = expecting(0)
    for turn in range(1, 6):
        coming.age(turn * LIFE_SECONDS)
        coming.expect(0, KEYS[:2])
    assert coming.run(0, KEYS, 0) == 2
    coming.told(0, KEYS)
    assert not coming
