"""The state that a gateway leaves to its successor: caches, estimates, accounts, shares, changes by hand.

A snapshot is a file of sections, each after its length. The event loop reads the owners of the state in short steps. It
only lists long sections (the records of caches); a thread packs them.
"""

import asyncio
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

from gateway.core.backends.facts import Facts
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.membership import Membership
from gateway.core.feedback import CacheState
from gateway.core.routing.estimates import Calibrations
from gateway.core.scheduling.wait_queue import Queue
from gateway.core.threads import Threads
from gateway.features.handover.slots import engines_by_key
from gateway.features.keys.limits import AllLimits
from gateway.features.keys.usage import KeyUsage
from gateway.features.responses.stored import Place, StoredResponses

FORMAT = 1  # changes with the format of sections
FILE_NAME = "gateway.snapshot"
_MAGIC = b"gateway snapshot "
_MOST_RUNS = 50_000  # of an engine, the last used ones: more would block the event loop
_MOST_SECTION_BYTES = 1 << 30
_SAVE_SECONDS = 60.0  # between snapshots
_LAST_SECONDS = 10.0  # timeout of the last snapshot: the file system may hang
Run = tuple[tuple[int, ...], list[int]]


class SnapshotError(Exception):
    """A snapshot is unusable; the message says why."""


@dataclass(frozen=True)
class Knowledge:
    """The owners of the state in a snapshot."""

    fleet: Fleet
    _: KW_ONLY
    membership: Membership
    sources: Callable[[], Collection[str]]  # of discovery, by name
    cache_state: CacheState
    calibrations: Calibrations
    queue: Queue
    limits: AllLimits
    stored: StoredResponses
    usage: KeyUsage
    secret: Callable[[], bytes]  # of cache salts
    unix_seconds: Callable[[], float]

    async def take(self) -> dict[str, Any]:
        """All sections; `write` packs the long ones."""
        sections: dict[str, Any] = {"unix_seconds": self.unix_seconds(), "secret": self.secret()}
        for name, read in (
            ("membership", self.membership.state),
            ("backends", self._backends),
            ("estimates", self.cache_state.estimates.learned),
            ("lengths", self.cache_state.output_lengths.learned),
            ("calibrations", self.calibrations.learned),
            ("accounts", self.limits.accounts),
            ("spent", self.limits.spent),
            ("usage", self.usage.state),
            ("stored", partial(self.stored.since, 0)),
        ):
            sections[name] = read()
            await asyncio.sleep(0)
        served: dict[str, Any] = {}
        for model, tenants in self.queue.tenants.items():
            served[model] = tenants.served()
            await asyncio.sleep(0)
        records: dict[str, list[Run]] = {}
        for key, _, engine in [*engines_by_key(self.fleet.backends)]:
            records[key] = self.cache_state.index.runs(engine.index, _MOST_RUNS)
            await asyncio.sleep(0)
        return sections | {"served": served, "records": records}

    def _backends(self) -> dict[str, Any]:
        accuracy = self.cache_state.hit_accuracy
        return {
            backend.config.url: {
                "facts": backend.facts.plain(),
                "limit": (backend.limiter.limit, backend.limiter.upper),
                "engines": [(*engine.learned, accuracy.share(engine.index)) for engine in backend.all_engines],
            }
            for backend in self.fleet.backends
        }

    def restore(self, sections: dict[str, Any], *, same_engines: bool) -> None:
        """Take over all sections. `same_engines`: the engines are known not to have restarted since.

        To be called before the gateway serves. Skips backends that have left the fleet.
        """
        ago_seconds = max(0.0, self.unix_seconds() - sections["unix_seconds"])
        self.membership.restore(sections["membership"], self.sources())
        known = self._restore_backends(sections["backends"], same_engines=same_engines)
        self.cache_state.estimates.start_from(*sections["estimates"])
        self.cache_state.output_lengths.start_from(sections["lengths"])
        self.calibrations.start_from(sections["calibrations"])
        self.cache_state.follow_sizes()
        for key, _, engine in engines_by_key(self.fleet.backends):
            if key in sections["records"] and engine.index in known:
                for keys, edges in _runs(sections["records"][key]):
                    self.cache_state.index.record(engine.index, keys, edges)
        for model, served in sections["served"].items():
            self.queue.tenants.of(model).restore(served)
        self.limits.restore(sections["accounts"], ago_seconds)
        self.limits.restore_spent(sections.get("spent", {}))  # absent in snapshots of earlier versions
        if "usage" in sections:
            self.usage.restore(sections["usage"])
        self.restore_stored(sections["stored"])

    def use(self) -> dict[str, Any]:
        """The use of keys until now, for `use_since`."""
        return {"spent": self.limits.spent(), "usage": self.usage.today()}

    def use_since(self, before: dict[str, Any]) -> dict[str, Any]:
        """The use of keys since `use` returned `before`, for `restore_use`. Empty = all of today's."""
        spent: dict[str, dict[str, list[int]]] = {}
        for name, periods in self.limits.spent().items():
            known = before.get("spent", {}).get(name, {})
            spent[name] = {
                period: [first_day, used - (known[period][1] if known.get(period, [None])[0] == first_day else 0)]
                for period, (first_day, used) in periods.items()
            }
        return {"spent": spent, "usage": self.usage.since(*before.get("usage", (self.usage.today()[0], [])))}

    def restore_use(self, use: dict[str, Any]) -> None:
        """Add the use of keys in another process meanwhile."""
        self.limits.restore_spent(use["spent"])
        for day, rows in use["usage"]:
            self.usage.add([(key, model, counts) for key, model, counts in rows], day)

    def restore_stored(self, stored: list[Any]) -> None:
        """Take over the locations of stored responses."""
        self.stored.restore(
            (name, Place(backend, model, (key, tenant), alias=alias[0] if alias else ""))
            for name, backend, model, key, tenant, *alias in stored
        )

    def stored_since(self, noted: int) -> list[Any]:
        """The locations of responses stored after the first `noted` ones, for `restore_stored`."""
        return [_plain(*each) for each in self.stored.since(noted)]

    def _restore_backends(self, backends: dict[str, Any], *, same_engines: bool) -> set[int]:
        """Returns the engines whose caches are unchanged, unless their next probe shows another process."""
        known: set[int] = set()
        for backend in self.fleet.backends:
            if (saved := backends.get(backend.config.url)) is None:
                continue
            facts = Facts.of_plain(saved["facts"])
            self.fleet.resume(backend, facts)
            backend.limiter.start_from(*saved["limit"])
            for engine, (log_cost, paces, share) in zip(backend.all_engines, saved["engines"], strict=False):
                engine.start_from((log_cost, paces))
                self.cache_state.hit_accuracy.start_from(engine.index, share)
                if same_engines or facts.process_start_seconds is not None:
                    known.add(engine.index)
        return known


def write(sections: dict[str, Any], out: BinaryIO, breathe: Callable[[], None]) -> None:
    """Write a snapshot, section by section, in a thread. `breathe` yields to the event loop."""
    out.write(_MAGIC + f"{FORMAT}\n".encode())
    for name, content in sections.items():
        if name == "stored":
            content = [_plain(*each) for each in content]
        if name != "records":
            _put(out, [name, content])
            breathe()
    for key, runs in sections["records"].items():
        _put(out, ["records", key, _packed(runs, breathe)])
        breathe()
    out.flush()


def in_memory(sections: dict[str, Any], breathe: Callable[[], None]) -> int:
    """The snapshot as the descriptor of an anonymous file in memory."""
    file = os.memfd_create("gateway-snapshot", os.MFD_CLOEXEC)
    with open(os.dup(file), "wb") as out:
        write(sections, out, breathe)
    return file


def _plain(name: str, place: Place) -> list[str]:
    alias = [place.alias] if place.alias else []  # an older version knows no alias
    return [name, place.backend, place.model, *place.owner, *alias]


def _put(out: BinaryIO, section: list[Any]) -> None:
    data = msgspec.msgpack.encode(section)
    out.write(len(data).to_bytes(8, "big"))
    out.write(data)


def _packed(runs: Iterable[Run], breathe: Callable[[], None]) -> list[bytes]:
    lengths, keys, sizes = array("I"), array("Q"), array("I")
    for run_keys, run_sizes in runs:
        run_sizes = run_sizes[:]  # its last ones may be removed meanwhile
        lengths.append(len(run_sizes))
        keys.extend(run_keys[: len(run_sizes)])
        sizes.extend(run_sizes)
        breathe()
    return [lengths.tobytes(), keys.tobytes(), sizes.tobytes()]


def _runs(packed: list[bytes]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Keys and edges of each run."""
    lengths, keys, sizes = array("I", packed[0]), array("Q", packed[1]), array("I", packed[2])
    start = 0
    for length in lengths:
        end, edge, edges = start + length, 0, list[int]()
        for size in sizes[start:end]:
            edge += size
            edges.append(edge)
        if length:
            yield tuple(keys[start:end]), tuple(edges)
        start = end


def read(source: BinaryIO) -> dict[str, Any]:
    """The sections of a snapshot. Raises SnapshotError."""
    head = source.readline(64)
    if not head.startswith(_MAGIC):
        raise SnapshotError("it is not a snapshot")
    if head[len(_MAGIC) :].strip() != str(FORMAT).encode():
        raise SnapshotError("another version of the gateway wrote it")
    sections: dict[str, Any] = {"records": {}}
    try:
        while size := source.read(8):
            length = int.from_bytes(size, "big")
            data = source.read(length) if length <= _MOST_SECTION_BYTES else b""
            if len(data) < length or len(size) < 8 or not data:
                raise SnapshotError("it is incomplete")
            name, *content = msgspec.msgpack.decode(data)
            if name == "records":
                sections["records"][content[0]] = content[1]
            else:
                sections[name] = content[0]
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, OSError) as error:
        raise SnapshotError(f"it cannot be read: {error}") from error
    return sections


def save(sections: dict[str, Any], folder: Path, breathe: Callable[[], None]) -> None:
    """Replace the snapshot in a folder, which is created if missing. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = folder / f"{FILE_NAME}.{os.getpid()}.new"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            write(sections, out, breathe)
            os.fsync(out.fileno())
        new.replace(folder / FILE_NAME)
    finally:
        new.unlink(missing_ok=True)


def load(folder: Path) -> dict[str, Any] | None:
    """The snapshot of a folder; None = there is none. Raises SnapshotError."""
    try:
        with (folder / FILE_NAME).open("rb") as source:
            return read(source)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(str(error)) from error


class SnapshotFolder:
    """Keeps snapshots in the folder that is configured at the time, if any."""

    def __init__(self, breathe: Callable[[], None]) -> None:
        self._breathe = breathe
        self._threads = Threads("snapshot")
        self._log = structlog.get_logger("gateway")

    async def load(self, folder: str | None) -> dict[str, Any] | None:
        """The state of the last process; None = no usable snapshot."""
        try:
            return None if folder is None else await self._threads.run(load, Path(folder))
        except SnapshotError as error:
            self._log.warning("snapshot_ignored", folder=folder, reason=str(error))
            return None

    async def save(self, folder: str | None, knowledge: Knowledge) -> None:
        """Write a snapshot. Errors are logged."""
        if folder is None:
            return
        sections = await knowledge.take()
        try:
            await self._threads.run(save, sections, Path(folder), self._breathe)
        except OSError as error:
            self._log.error("snapshot_failed", folder=folder, reason=str(error))

    async def save_later(self, folder: Callable[[], str | None], knowledge: Knowledge) -> None:
        """Wait for the snapshot interval, then write one."""
        await asyncio.sleep(_SAVE_SECONDS)
        await self.save(folder(), knowledge)

    async def save_last(self, folder: str | None, knowledge: Knowledge) -> None:
        """Write a snapshot before the process ends, if the file system answers."""
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                await self.save(folder, knowledge)
        except TimeoutError:
            self._log.error("snapshot_failed", folder=folder, reason=f"not written within {_LAST_SECONDS:g} s")
