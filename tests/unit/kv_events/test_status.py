from gateway.kv_events.stream import Status


def test_a_status_tells_how_long_ago_the_last_event_was() -> None:
    told = Status("a", 1, "live", last_event_at=10.0, gaps=2).told(engine=7, now=12.5)
    assert (told["engine"], told["backend"], told["rank"], told["state"], told["gaps"]) == (7, "a", 1, "live", 2)
    assert told["last_event_seconds"] == 2.5
    assert "last_event_at" not in told


def test_before_the_first_event_nothing_is_told_of_the_last() -> None:
    assert Status("a", 0).told(0, 5.0)["last_event_seconds"] is None
