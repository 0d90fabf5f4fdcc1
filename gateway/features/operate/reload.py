"""A reload: the configuration is read again, checked as a whole, and applied as a whole, or nothing changes."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from gateway.config import Config, ConfigError, Listen, masked
from gateway.core.threads import Threads
from gateway.features.coordination.settings import CoordinationConfig
from gateway.files import version_of

_NAMED_LISTS = ("backends", "auth.keys")  # compared by name, not by place
_BATCHES = ("path", "database", "s3_endpoint", "s3_region")
# Where the gateway listens, where it keeps batches, and where it meets other gateways: a running one cannot change it.
NEEDS_RESTART = (
    *(f"batches.{key}" for key in _BATCHES),
    *(f"coordination.{key}" for key in CoordinationConfig.model_fields),
    *("server.host", "server.port", "server.workers"),
    *("server.admin", "server.admin.host", "server.admin.port"),
    *("server.metrics", "server.metrics.host", "server.metrics.port"),
    *("server.tls", "server.tls.certificate", "server.tls.key", "server.tls.client_ca"),
)


class ConfigChange(NamedTuple):
    """One key with another value. Secrets are shown as `***`; a whole entry of a list by its name alone."""

    path: str
    before: Any
    after: Any

    @property
    def applies(self) -> bool:
        """Whether a running gateway can take it over."""
        return self.path not in NEEDS_RESTART

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def differences(old: Config, new: Config) -> list[ConfigChange]:
    """The differing keys, in the order of the schema."""
    return list(_compared("", _plain(old), _plain(new)))


def applicable(old: Config, new: Config) -> Config:
    """The new configuration, with the old values of keys that need a restart."""
    was = old.server
    ports = {"admin": _at(was.admin, new.server.admin), "metrics": _at(was.metrics, new.server.metrics)}
    server = new.server.model_copy(
        update={"host": was.host, "port": was.port, "workers": was.workers, "tls": was.tls, **ports}
    )
    batches = new.batches.model_copy(update={key: getattr(old.batches, key) for key in _BATCHES})
    return new.model_copy(update={"server": server, "batches": batches, "coordination": old.coordination})


def _at(old: Listen | None, new: Listen | None) -> Listen | None:
    """The new settings of a port that stays where it is."""
    if old is None or new is None:
        return old
    return new.model_copy(update={"host": old.host, "port": old.port})


def _plain(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _compared(path: str, old: Any, new: Any) -> Iterator[ConfigChange]:
    if old == new:
        return
    if path in _NAMED_LISTS:
        old, new = _by_name(old), _by_name(new)
        for name in old.keys() - new.keys():
            yield ConfigChange(f"{path}.{name}", "removed", None)
        for name in new.keys() - old.keys():
            yield ConfigChange(f"{path}.{name}", None, "added")
        for name in [name for name in new if name in old]:
            yield from _compared(f"{path}.{name}", old[name], new[name])
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _compared(f"{path}.{key}" if path else key, old.get(key), new.get(key))
    else:
        key = path.rpartition(".")[2]
        yield ConfigChange(path, masked(old, key), masked(new, key))


def _by_name(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in entries}


_LOOK_SECONDS = 1.0
_SWITCH_SECONDS = 0.0002


class FileWatch:
    """Looks at a file again and again, and calls `changed` when it has changed while `is_on`."""

    def __init__(self, file: Path, changed: Callable[[], None], is_on: Callable[[], bool]) -> None:
        self._file = file
        self._changed = changed
        self._is_on = is_on
        self._threads = Threads("config_watch")
        self._version: tuple[int, ...] = ()
        with suppress(OSError):
            self._version = version_of(file)

    async def step(self) -> None:
        """Wait, and look once. A file that is missing is not read: it may be about to be replaced."""
        await asyncio.sleep(_LOOK_SECONDS)
        with suppress(OSError):
            version = await self._threads.run(version_of, self._file)
            if version != self._version:
                self._version = version
                if self._is_on():
                    self._changed()


@contextmanager
def yielding() -> Iterator[None]:
    """Let the event loop have the interpreter soon, again and again: else it waits 5 ms for each of its callbacks."""
    usual_seconds = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_seconds)


class Reloads:
    """Owner of the configuration that is in effect. `load` reads it anew, in a thread; `apply` has it take effect."""

    def __init__(self, config: Config, load: Callable[[], Config], apply: Callable[[Config], Awaitable[None]]) -> None:
        self.config = config
        self._load = load
        self._apply = apply
        self._threads = Threads("reload")
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> dict[str, Any]:
        """Apply the changes. Keys that need a restart stay unchanged, and are listed. Raises ConfigError."""
        async with self._one_at_a_time:
            new, changes = await self._threads.run(self._read)
            if changes["changed"]:
                await self._apply(new)
                self.config = new
            return changes

    async def on_hangup(self, hangups: asyncio.Event) -> None:
        """Reload on SIGHUP, and log the result."""
        await hangups.wait()
        hangups.clear()
        log = structlog.get_logger("gateway")
        try:
            done = await self.reload()
        except ConfigError as error:
            log.error("reload_refused", reasons=str(error).splitlines(), hint="nothing was changed")
        else:
            changed, restart = ([each["path"] for each in done[what]] for what in ("changed", "needs_restart"))
            log.info("reloaded", changed=changed, needs_restart=restart)

    async def preview(self) -> dict[str, Any]:
        """The changes that `reload` would make and list now. Raises ConfigError."""
        async with self._one_at_a_time:
            _, changes = await self._threads.run(self._read)
            return changes

    def _read(self) -> tuple[Config, dict[str, Any]]:
        """The configuration to follow, and the answer that lists the changes. Runs in a thread."""
        with yielding():
            read = self._load()
            found = differences(self.config, read)
        changes = {
            "changed": [each.as_dict() for each in found if each.applies],
            "needs_restart": [each.as_dict() for each in found if not each.applies],
        }
        return applicable(self.config, read), changes
