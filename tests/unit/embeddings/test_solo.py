"""Who has spoilt a batch travels alone for a while."""

from gateway.embeddings.solo import Solo


def test_it_lasts_for_a_while_and_begins_anew_with_each_time() -> None:
    solo = Solo()
    solo.send("ann", 100.0)
    assert solo.holds("ann", 109.9)
    assert not solo.holds("bob", 101.0)
    solo.send("ann", 105.0)
    assert solo.holds("ann", 114.9)
    assert not solo.holds("ann", 115.1)
    assert len(solo) == 0


def test_no_more_are_remembered_than_memory_is_given() -> None:
    solo = Solo()
    for number in range(5000):
        solo.send(str(number), 100.0)
    assert len(solo) == 1024
    assert solo.holds("4999", 101.0)
