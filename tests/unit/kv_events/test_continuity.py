import pytest

from gateway.kv_events.replay import Continuity, MessagePlace


def after(*live: int, begun: int = 0) -> Continuity:
    continuity = Continuity()
    continuity.begin(begun)
    for sequence in live:
        continuity.place(sequence)
        continuity.took(sequence, b"payload %d" % sequence)
    return continuity


@pytest.mark.parametrize(
    ("sequence", "place"),
    [
        (3, MessagePlace.NEXT),
        (4, MessagePlace.AFTER_GAP),
        (900, MessagePlace.AFTER_GAP),
        (2, MessagePlace.RESTARTED),
        (0, MessagePlace.RESTARTED),
    ],
)
def test_a_live_message_is_judged_by_the_one_before(sequence: int, place: MessagePlace) -> None:
    assert after(0, 1, 2).place(sequence) is place


def test_the_first_message_of_all_comes_after_a_gap() -> None:
    assert Continuity().place(0) is MessagePlace.AFTER_GAP


def test_a_live_message_that_a_replay_brought_before_is_no_restart() -> None:
    continuity = after(0)
    for sequence in (1, 2, 3):  # replayed
        continuity.took(sequence, b"")
    assert [continuity.place(sequence) for sequence in (2, 3, 4)] == [
        MessagePlace.REPEATED,
        MessagePlace.REPEATED,
        MessagePlace.NEXT,
    ]
    assert continuity.place(3) is MessagePlace.RESTARTED


def test_only_the_same_message_proves_the_same_process() -> None:
    continuity = after(0, 1)
    assert continuity.can_prove
    assert continuity.proves(1, b"payload 1")
    assert not continuity.proves(1, b"payload 1, of another process")
    assert not continuity.proves(0, b"payload 0")


def test_where_nothing_was_used_nothing_can_be_proved() -> None:
    continuity = after(0, 1)
    continuity.begin(7)
    assert not continuity.can_prove
    assert (continuity.expected, continuity.proves(6, b"")) == (7, False)
    continuity.reset()
    assert (continuity.expected, continuity.can_prove) == (None, False)
    assert continuity.place(0) is MessagePlace.AFTER_GAP
