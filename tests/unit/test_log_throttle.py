from gateway.supervisor import LogThrottle


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def test_a_thing_is_told_of_once_a_minute_whatever_is_told_of_others() -> None:
    clock = Clock()
    quiet = LogThrottle(clock)
    assert quiet.tells("a")
    clock.now += 59.0
    assert not quiet.tells("a")
    assert quiet.tells("b")
    clock.now += 1.0
    assert quiet.tells("a")
    assert not quiet.tells("b")
