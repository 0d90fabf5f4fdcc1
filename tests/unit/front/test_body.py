"""The body of a request: bounded in size, framing and time, and counted exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ServerConfig
from gateway.core.errors import BodyTooLarge, InvalidRequest, MemoryFull, RequestTimeout
from gateway.core.front.body import Body
from gateway.core.resources import Holding, MemoryBudget

CONFIG = ServerConfig(body_grace_seconds=5, body_min_bytes_per_second=1000, body_timeout_seconds=60)


def body_of(limit_bytes: int = 1 << 30, length: int = 0, budget_bytes: int = 1 << 30) -> tuple[Body, MemoryBudget]:
    """A body whose head has just come, at time 0."""
    budget = MemoryBudget(budget_bytes)
    body = Body(Holding(budget))
    body.start(limit_bytes, length, 0.0)
    return body, budget


@given(st.lists(st.binary(min_size=1, max_size=20)))
def test_what_arrives_in_pieces_is_whole_and_counted_until_it_is_given_back(pieces: list[bytes]) -> None:
    body, budget = body_of()
    for piece in pieces:
        body.receive(piece)
    whole = b"".join(pieces)
    assert body.size_bytes == budget.used_bytes == len(whole)
    assert body.take() == whole
    assert budget.used_bytes == len(whole)
    body.drop()
    assert budget.used_bytes == len(whole)  # whoever took it gives it back


@given(st.lists(st.binary(min_size=1, max_size=20)))
def test_what_is_dropped_is_counted_no_more(pieces: list[bytes]) -> None:
    body, budget = body_of()
    for piece in pieces:
        body.receive(piece)
    body.drop()
    assert (body.take(), budget.used_bytes) == (b"", 0)


def test_a_body_over_its_limit_is_refused_before_it_is_kept() -> None:
    body, budget = body_of(limit_bytes=5)
    body.receive(b"hello")
    with pytest.raises(BodyTooLarge, match="limit of 5 bytes"):
        body.receive(b"!")
    assert budget.used_bytes == 5


def test_a_body_over_the_memory_budget_is_refused() -> None:
    body, budget = body_of(budget_bytes=7)
    body.receive(b"hello")
    with pytest.raises(MemoryFull):
        body.receive(b"you")
    body.drop()
    assert budget.used_bytes == 0


def test_what_is_still_to_come_of_a_body_of_known_length() -> None:
    body, _ = body_of(length=100_000)
    assert body.left_bytes == 100_000
    body.receive(b"x" * 99_000)
    assert body.left_bytes == 1_000
    assert body_of()[0].left_bytes == 0


# Framing.


def test_chunks_of_one_byte_are_refused_after_128_kibibytes_of_framing() -> None:
    body, _ = body_of()
    for _ in range(131072 // 4):
        body.receive(b"x")
        body.framed(6)
    body.receive(b"x")
    with pytest.raises(InvalidRequest, match="chunked-encoding overhead"):
        body.framed(6)


def test_framing_that_goes_on_without_body_is_refused_however_much_body_came_before() -> None:
    body, _ = body_of()
    body.receive(b"x" * 10_000_000)
    body.framed(10_000_000)
    for _ in range(32):
        body.framed(4096)
    with pytest.raises(InvalidRequest, match="overhead"):
        body.framed(1)


# Pace.


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=50))
def test_a_body_is_cut_once_a_window_brings_too_little_and_never_before(seconds: list[int]) -> None:
    """`seconds`: the bytes of each second; a look follows each."""
    body, _ = body_of()
    window: list[int] = []
    for now, size_bytes in enumerate(seconds, 1):
        body.receive(bytes(size_bytes))
        window.append(size_bytes)
        is_over = len(window) > 5
        is_slow = is_over and sum(window) < 1000 * len(window)
        if is_slow:
            with pytest.raises(RequestTimeout, match="under 1000 bytes/s for 6 s"):
                body.look(float(now), CONFIG, held_back=False)
            return
        body.look(float(now), CONFIG, held_back=False)
        if is_over:
            window = []


def test_who_sends_much_at_once_may_rest_for_two_windows_and_no_longer() -> None:
    body, _ = body_of()
    body.receive(bytes(31_000_000))
    body.look(5.1, CONFIG, held_back=False)
    body.look(10.1, CONFIG, held_back=False)
    with pytest.raises(RequestTimeout):
        body.look(10.3, CONFIG, held_back=False)


def test_a_body_must_be_there_after_a_time_at_any_pace() -> None:
    body, _ = body_of()
    for now in range(1, 61):
        body.receive(bytes(100_000))
        body.look(float(now), CONFIG, held_back=False)
    body.receive(bytes(100_000))
    with pytest.raises(RequestTimeout, match="over 60 s"):
        body.look(60.5, CONFIG, held_back=False)


def test_time_in_which_nothing_is_read_is_not_the_clients() -> None:
    body, _ = body_of()
    body.receive(bytes(10_000))
    body.look(1.0, CONFIG, held_back=False)
    for now in range(2, 200):
        body.look(float(now), CONFIG, held_back=True)
    body.look(203.0, CONFIG, held_back=False)
    with pytest.raises(RequestTimeout, match="under"):
        body.look(210.0, CONFIG, held_back=False)
