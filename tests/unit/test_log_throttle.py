from gateway.core.supervisor import LogThrottle


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def test_each_subject_is_logged_once_a_minute() -> None:
    clock = Clock()
    throttle = LogThrottle(clock)
    assert throttle.allows("a")
    clock.now += 59.0
    assert not throttle.allows("a")
    assert throttle.allows("b")
    clock.now += 1.0
    assert throttle.allows("a")
    assert not throttle.allows("b")
