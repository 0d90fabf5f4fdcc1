"""All that waits is counted once, and together."""

import pytest

from gateway.core.scheduling.fair_share import Backlog


def test_requests_and_bytes_are_bounded_together() -> None:
    backlog = Backlog(2, 100)
    backlog.join(60)
    assert not backlog.is_full_for(40, guarded=False)
    assert backlog.is_full_for(41, guarded=False)
    backlog.join(0)
    assert backlog.is_full_for(0, guarded=False)
    backlog.leave(60)
    assert not backlog.is_full_for(100, guarded=False)
    assert repr(backlog) == "<Backlog 1 requests, 0 bytes>"


@pytest.mark.parametrize(("guarded", "requests", "size_bytes"), [(False, 32, 1600), (True, 30, 1500)])
def test_the_last_sixteenth_is_guarded(guarded: bool, requests: int, size_bytes: int) -> None:
    backlog = Backlog(32, 1600)
    assert not backlog.is_full_for(size_bytes, guarded=guarded)
    assert backlog.is_full_for(size_bytes + 1, guarded=guarded)
    for _ in range(requests - 1):
        backlog.join(0)
    assert not backlog.is_full_for(0, guarded=guarded)
    backlog.join(0)
    assert backlog.is_full_for(0, guarded=guarded)
