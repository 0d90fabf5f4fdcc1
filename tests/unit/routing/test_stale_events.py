from gateway.routing.cache_view import PATIENCE_SECONDS, StaleEventDetector


def test_an_engine_is_silent_after_it_was_waited_for_in_vain() -> None:
    silence = StaleEventDetector()
    silence.answered(0, 100.0)
    silence.answered(0, 102.0)  # the first one counts
    assert silence.fallen(100.0 + PATIENCE_SECONDS) == []
    assert 0 not in silence
    assert silence.fallen(100.1 + PATIENCE_SECONDS) == [0]
    assert 0 in silence
    assert silence.fallen(200.0) == []


def test_who_is_heard_in_time_does_not_fall_silent() -> None:
    silence = StaleEventDetector()
    for engine in (0, 1):
        silence.answered(engine, 100.0)
    assert not silence.heard(0)
    assert silence.fallen(200.0) == [1]
    assert 0 not in silence


def test_who_is_heard_again_is_not_silent_any_more() -> None:
    silence = StaleEventDetector()
    silence.answered(0, 100.0)
    assert silence.fallen(200.0) == [0]
    assert silence.heard(0)
    assert 0 not in silence
    assert not silence.heard(0)
    silence.answered(0, 300.0)
    assert silence.fallen(400.0) == [0]
