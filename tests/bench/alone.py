"""One comparison at a time, which leaves nothing behind when it is ended."""

import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tests.bench.place import Place


@contextmanager
def alone(place: Place, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other comparison uses the place. Inside, SIGTERM leaves through the `with` blocks."""
    place.root.mkdir(parents=True, exist_ok=True)
    with place.lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another comparison that holds {place.lock}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        usual = signal.signal(signal.SIGTERM, _leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, usual)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
