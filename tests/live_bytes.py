"""Finds the large bytes that are still in memory, and what keeps them there.

The gateway releases bytes where their owner ends: none may wait for a collection of cycles, which comes at any time or
never. So `starting` sets aside what is there and turns the collector off; from then on `large_bytes` returns what was
made since and has a reference, if only from garbage.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

LARGE_BYTES = 65536  # what is larger counts: read buffers and tables are not
_KINDS = (bytes, bytearray, str)
_ATOMS = frozenset((*_KINDS, int, float, bool, complex, type(None)))
_POLL_SECONDS = 0.01
_LINKS = 12
_OURS = ("gateway.", "python_multipart.", "httptools.")
_SHOWN = 5
_SHOWN_BYTES = 30


def starting() -> None:
    """Set aside all that is in memory, and keep the collector off until `ended`."""
    gc.collect()
    gc.freeze()
    gc.disable()


def ended() -> None:
    """Let the collector run again."""
    gc.enable()


def large_bytes() -> list[Any]:
    """Each large bytes, bytearray or str that an object made since `starting` refers to."""
    return [each for each in _reached(gc.get_objects()) if type(each) in _KINDS and len(each) > LARGE_BYTES]


def in_cycles() -> Counter[str]:
    """The objects of the gateway's classes, and of its parsers', that only a collection would drop, by class."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__.startswith(_OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def leak(within_seconds: float) -> str:
    """The large bytes that are still there after this time, and what refers to them; empty = none.

    Threads may need the time to drop what they work on.
    """
    ends = time.monotonic() + within_seconds
    while left := large_bytes():
        if time.monotonic() > ends:
            total = sum(map(len, left))
            return "\n".join([f"{total} bytes are still in memory, in {len(left)} objects:", *chains(left[:_SHOWN])])
        del left
        time.sleep(_POLL_SECONDS)
    return ""


def chains(targets: list[Any]) -> list[str]:
    """For each object, what refers to it, what refers to that, and so on."""
    objects = [each for each in gc.get_objects() if each is not targets]
    objects += [each for each in _reached(objects) if not _is_atom(each) and not gc.is_tracked(each)]
    return [" <- ".join(_chain(each, objects)) for each in targets]


def _reached(objects: list[Any]) -> list[Any]:
    """What these refer to, directly or through what the collector does not track: tuples and dicts of plain values."""
    found: dict[int, Any] = {}
    while objects:
        new = {id(each): each for each in gc.get_referents(*objects) if id(each) not in found}
        found.update(new)
        objects = [each for each in new.values() if not _is_atom(each) and not gc.is_tracked(each)]
    return list(found.values())


def _is_atom(each: Any) -> bool:
    return type(each) in _ATOMS


def _chain(target: Any, objects: list[Any]) -> Iterator[str]:
    yield f"{type(target).__name__} of {len(target)}, {target[:_SHOWN_BYTES]!r}"
    seen: set[int] = set()
    for _ in range(_LINKS):
        holders = (each for each in objects if any(inner is target for inner in gc.get_referents(each)))
        holder = next((each for each in holders if id(each) not in seen), None)
        if holder is None:
            return
        yield _named(holder, target)
        seen.add(id(holder))
        target = holder


def _named(holder: Any, target: Any) -> str:
    kind = type(holder).__name__
    if isinstance(holder, (list, tuple, dict, set)):
        return kind
    for name in (*dir(type(holder)), *getattr(holder, "__dict__", ())):
        try:
            if not name.startswith("__") and getattr(holder, name, None) is target:
                return f"{kind}.{name}"
        except Exception:  # a property that does not work any more
            continue
    return f"{kind} {holder!r:.100}"
