from gateway.features.exact.caches import PATIENCE_SECONDS, StaleEventDetector


def test_events_are_stale_after_a_long_wait_for_them() -> None:
    detector = StaleEventDetector()
    detector.answered(0, 100.0)
    detector.answered(0, 102.0)  # the first one counts
    assert detector.newly_stale(100.0 + PATIENCE_SECONDS) == []
    assert 0 not in detector
    assert detector.newly_stale(100.1 + PATIENCE_SECONDS) == [0]
    assert 0 in detector
    assert detector.newly_stale(200.0) == []


def test_an_event_in_time_keeps_an_engine_from_being_stale() -> None:
    detector = StaleEventDetector()
    for engine in (0, 1):
        detector.answered(engine, 100.0)
    assert not detector.heard(0)
    assert detector.newly_stale(200.0) == [1]
    assert 0 not in detector


def test_a_later_event_ends_staleness() -> None:
    detector = StaleEventDetector()
    detector.answered(0, 100.0)
    assert detector.newly_stale(200.0) == [0]
    assert detector.heard(0)
    assert 0 not in detector
    assert not detector.heard(0)
    detector.answered(0, 300.0)
    assert detector.newly_stale(400.0) == [0]
