"""A reload: the configuration is read again, checked as a whole, and applied in one step, or nothing changes."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from gateway.config import Config
from gateway.config_file import version_of

_SECRETS = ("api_key", "key", "key_sha256", "cache_salt_secret")
_NAMED_LISTS = ("backends", "auth.keys")  # compared by name, not by place
# What a running gateway can take over: whole sections, or keys of them.
APPLIED = (
    "backends", "auth.keys", "models.aliases", "admission.tenant_header", "server.max_body_bytes",
    "server.max_upload_bytes", "server.memory_budget_bytes", "server.max_connections", "server.max_json_depth",
    "server.max_json_containers", "server.max_json_strings", "server.max_json_values", "server.allow_media_urls",
    "server.max_sequences", "server.header_timeout_seconds", "server.body_timeout_seconds",
    "server.body_grace_seconds", "server.body_min_bytes_per_second", "server.keep_alive_seconds",
    "server.write_stall_seconds", "server.drain_delay_seconds", "server.drain_timeout_seconds",
)  # fmt: skip


class ConfigChange(NamedTuple):
    """One key with another value. Secrets are shown as `***`; a whole entry of a list by its name alone."""

    path: str
    before: Any
    after: Any

    @property
    def applies(self) -> bool:
        """Whether a running gateway can take it over."""
        return any(self.path == each or self.path.startswith(f"{each}.") for each in APPLIED)

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def differences(old: Config, new: Config) -> list[ConfigChange]:
    """What differs, in the order of the schema."""
    return list(_compared("", _plain(old), _plain(new)))


def applicable(old: Config, new: Config) -> Config:
    """The old configuration with those values of the new one that a running gateway can take over."""
    sections: dict[str, Any] = {}
    for path in APPLIED:
        section, _, key = path.partition(".")
        value = getattr(new, section)
        if key:
            before: BaseModel = sections.get(section, getattr(old, section))
            value = before.model_copy(update={key: getattr(value, key)})
        sections[section] = value
    return old.model_copy(update=sections)


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
        is_secret = path.rpartition(".")[2] in _SECRETS
        yield ConfigChange(path, "***" if is_secret else old, "***" if is_secret else new)


def _by_name(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in entries}


_LOOK_SECONDS = 1.0


class FileWatch:
    """Looks at a file again and again, and calls `changed` when it has changed."""

    def __init__(self, file: Path, changed: Callable[[], None]) -> None:
        self._file = file
        self._changed = changed
        self._version = version_of(file)

    async def step(self) -> None:
        """Wait, and look once. A file that is missing is not read: it may be about to be replaced."""
        await asyncio.sleep(_LOOK_SECONDS)
        with suppress(FileNotFoundError):
            version = await asyncio.to_thread(version_of, self._file)
            if version != self._version:
                self._version = version
                self._changed()


class Reloads:
    """Owner of the configuration that is in effect. `load` reads it anew, in a thread; `apply` makes the gateway follow
    it."""

    def __init__(self, config: Config, load: Callable[[], Config], apply: Callable[[Config], None]) -> None:
        self._config = config
        self._load = load
        self._apply = apply
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> dict[str, Any]:
        """Apply what has changed. What needs a restart stays as it is, and is listed. Raises ConfigError."""
        async with self._one_at_a_time:
            config = await asyncio.to_thread(self._load)
            found = await asyncio.to_thread(differences, self._config, config)
            return self._take(config, found)

    def _take(self, config: Config, found: list[ConfigChange]) -> dict[str, Any]:
        applied = [each for each in found if each.applies]
        if applied:
            self._config = applicable(self._config, config)
            self._apply(self._config)
        return {
            "changed": [each.as_dict() for each in applied],
            "needs_restart": [each.as_dict() for each in found if not each.applies],
        }
