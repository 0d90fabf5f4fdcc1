import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from gateway.core.front.handler import request_ids


def made(next_id: Callable[[], str], count: int) -> list[str]:
    return [next_id() for _ in range(count)]


def test_ids_are_24_hex_digits_and_never_the_same() -> None:
    ids = made(request_ids(), 1000)
    assert all(len(each) == 24 and int(each, 16) >= 0 for each in ids)
    assert len(set(ids)) == 1000


def test_no_id_reveals_the_next_one() -> None:
    ids = [int(each, 16) for each in made(request_ids(), 2000)]
    for bit in range(96):
        changed = sum((one ^ other) >> bit & 1 for one, other in pairwise(ids))
        assert 700 < changed < 1300  # 1000 expected; 13 standard deviations


def test_each_gateway_has_its_own() -> None:
    assert request_ids()() != request_ids()()


def test_threads_that_ask_at_the_same_time_never_get_the_same() -> None:
    next_id, usual_seconds = request_ids(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            ids = [each for part in threads.map(made, [next_id] * 4, [20_000] * 4) for each in part]
    finally:
        sys.setswitchinterval(usual_seconds)
    assert len(set(ids)) == 80_000
