"""Follows a chat through the gateway: the functions that it enters, in order. `python -m tools.path` prints the page.

The gateway runs as Python, between the fake transports of the instruction counts, with its default configuration.
"""

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

import gateway
from tests.bench.instructions import workloads

PACKAGE = Path(gateway.__file__).parent
_EVENTS = 3
_DEFAULTS = {"prefix_report": {"enabled": False}}
_RESUMED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Trail:
    """The calls of the gateway's functions; a coroutine that goes on is no call."""

    def __init__(self) -> None:
        self.calls: dict[CodeType, int] = {}
        self._begun: set[FrameType] = set()

    def begin(self) -> None: ...

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._entered)
        try:
            yield
        finally:
            sys.setprofile(None)

    def end(self, name: str) -> None: ...

    def _entered(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.endswith("comp>"):
            return
        if code.co_flags & _RESUMED:
            if frame in self._begun:
                return
            self._begun.add(frame)
        self.calls[code] = self.calls.get(code, 0) + 1


def walked(*, streams: bool) -> Trail:
    """The trail of one chat of 1 KB, when the gateway has answered many."""
    trail = Trail()
    if streams:
        workloads.streamed(trail, _EVENTS, 1, sections=_DEFAULTS)
    else:
        workloads.chat(trail, "1k", 1, sections=_DEFAULTS)
    return trail


def file_of(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


def rows(codes: list[CodeType]) -> Iterator[tuple[str, str]]:
    """Each package that is entered, and what runs there: files with their functions."""
    for package, entered in groupby(codes, lambda code: file_of(code).rpartition("/")[0]):
        files = [(file, [*group]) for file, group in groupby(entered, file_of)]
        named = (f"[{Path(file).stem}](../gateway/{file}) " + ", ".join(map(name_of, group)) for file, group in files)
        yield package, "; ".join(named)


def name_of(code: CodeType) -> str:
    return f"`{code.co_qualname.replace('.<locals>', '')}`"


def main() -> None:
    """Print both trails, and their figures, as JSON."""
    plain, streamed = walked(streams=False), walked(streams=True)
    told = {
        "calls": sum(plain.calls.values()),
        "functions": len(plain.calls),
        "files": sorted({*map(file_of, plain.calls)}),
        "plain": [*rows([*plain.calls])],
        "streamed": [*rows([code for code in streamed.calls if code not in plain.calls])],
    }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
