from hypothesis import given
from hypothesis import strategies as st

from gateway.core.scheduling.fair_share import FairTurns, Share

APART = 100.0
SHARES = st.lists(st.tuples(st.floats(0, 1000), st.sampled_from([0.5, 1.0, 3.0])), max_size=12)


@given(SHARES, st.lists(st.floats(0, 500), min_size=1, max_size=3), st.data())
def test_shares_come_by_their_start_whatever_moves(
    given_shares: list[tuple[float, float]], passing: list[float], data: st.DataObject
) -> None:
    turns, now = FairTurns[int](APART), 0.0
    shares = [Share(weight, end) for end, weight in given_shares]
    for number, share in enumerate(shares):
        turns.join(share, number, number)
    for virtual in passing:
        now += virtual
        expected = sorted((max(share.end, now - APART / share.weight), number) for number, share in enumerate(shares))
        assert [(start, what) for start, _, _, what in turns.after(now)] == expected
        if shares:
            moved = data.draw(st.sampled_from(shares))
            moved.end = data.draw(st.floats(0, 1500))
            turns.moved(moved)
    for share in shares:
        assert share in turns.entries
        turns.leave(share)
    assert (turns.entries, list(turns.after(now))) == ({}, [])
