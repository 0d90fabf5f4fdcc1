import pytest

from gateway.features.exact.stream import Continuity, MessagePlace


def after(*live: int) -> Continuity:
    continuity = Continuity()
    continuity.begin()
    for sequence in live:
        continuity.place(sequence)
        continuity.took(sequence, b"payload %d" % sequence)
    return continuity


@pytest.mark.parametrize(
    ("sequence", "place"),
    [
        (3, "next"),
        (4, "after_gap"),
        (900, "after_gap"),
        (2, "restarted"),
        (0, "restarted"),
    ],
)
def test_a_live_message_is_judged_by_the_one_before(sequence: int, place: MessagePlace) -> None:
    assert after(0, 1, 2).place(sequence) == place


def test_the_first_message_of_all_comes_after_a_gap() -> None:
    assert Continuity().place(0) == "after_gap"


def test_a_live_message_that_a_replay_brought_before_is_no_restart() -> None:
    continuity = after(0)
    for sequence in (1, 2, 3):  # replayed
        continuity.took(sequence, b"")
    assert [continuity.place(sequence) for sequence in (2, 3, 4)] == [
        "repeated",
        "repeated",
        "next",
    ]
    assert continuity.place(3) == "restarted"


def test_only_the_same_message_proves_the_same_process() -> None:
    continuity = after(0, 1)
    assert continuity.proves(1, b"payload 1")
    assert not continuity.proves(1, b"payload 1, of another process")
    assert not continuity.proves(0, b"payload 0")


def test_where_nothing_was_used_nothing_can_be_proved() -> None:
    assert not Continuity().proves(0, b"")
    assert not after().proves(0, b"")
