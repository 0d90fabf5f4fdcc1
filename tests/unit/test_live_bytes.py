"""Large bytes that are left in memory are found wherever they are, and named with what refers to them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import live_bytes

SIZE = live_bytes.LARGE_BYTES + 1


class Holder:
    """Something with a reference."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.itself = self


def in_a_traceback() -> Holder:
    held = b"y" * SIZE
    try:
        raise ValueError(len(held))
    except ValueError as error:
        return Holder(error)


def in_a_generator() -> Holder:
    def frame(held: bytes) -> Iterator[int]:
        yield len(held)

    steps = frame(b"y" * SIZE)
    next(steps)
    return Holder(steps)


GARBAGE: dict[str, Callable[[], Any]] = {
    "an attribute": lambda: Holder(b"y" * SIZE),
    "a bytearray": lambda: Holder(bytearray(SIZE)),
    "a text": lambda: Holder("y" * SIZE),
    "a tuple of plain values in a dict of those": lambda: Holder({"one": (1, b"y" * SIZE)}),
    "a view": lambda: Holder(memoryview(b"y" * SIZE)),
    "a traceback": in_a_traceback,
    "a generator": in_a_generator,
}


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    live_bytes.starting()
    yield
    live_bytes.ended()


@pytest.mark.parametrize("kind", GARBAGE)
def test_bytes_in_a_cycle_are_found_and_what_holds_them_is_named(kind: str) -> None:
    GARBAGE[kind]()
    left = live_bytes.leak(0.0)
    assert left.startswith(f"{SIZE} bytes are still in memory, in 1 objects")
    assert "Holder.held" in left


def test_bytes_without_a_cycle_small_ones_and_those_from_before_are_not() -> None:
    before = [Holder(b"y" * SIZE)]
    live_bytes.starting()
    small, freed = Holder(b"y" * (SIZE - 1)), [b"y" * SIZE]
    del freed
    assert live_bytes.leak(0.0) == ""
    assert (len(small.held), len(before)) == (SIZE - 1, 1)
