"""One comparison at a time, which says on standard error how it goes and leaves nothing behind when it is ended."""

import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

from tests.bench.place import Place


def say(text: str) -> None:
    """On standard error: standard output is for results."""
    typer.echo(text, err=True)


def fail(why: str) -> NoReturn:
    """Say it, and end the command with 1."""
    say(why)
    raise typer.Exit(1)


@contextmanager
def alone(place: Place) -> Iterator[None]:
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
