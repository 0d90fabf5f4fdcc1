"""The API keys in effect: from the configuration, and from the keys file, which is followed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway.config import ConfigError
from gateway.core.threads import Threads
from gateway.features.keys.keys_file import read_keys
from gateway.features.keys.settings import AuthConfig, KeyConfig
from gateway.features.operate.reload import yielding
from gateway.files import version_of

_LOOK_SECONDS = 1.0


class ClientKeys:
    """Owner of the keys that clients may use. `changed` is called when the file brings others."""

    def __init__(self, auth: AuthConfig, changed: Callable[[], None]) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._auth = auth
        self._changed = changed
        self._log = structlog.get_logger("gateway")
        self._version: tuple[int, ...] = ()
        self._complaint = ""
        self._threads = Threads("keys_file")
        self._listed: tuple[KeyConfig, ...] = ()
        self._ahead: tuple[AuthConfig, tuple[KeyConfig, ...] | ConfigError] | None = None  # of a future key
        if auth.keys_file is not None:
            self._listed = self._read(Path(auth.keys_file), auth)

    @property
    def keys(self) -> tuple[KeyConfig, ...]:
        return (*self._auth.keys, *self._listed)

    @property
    def names(self) -> list[str]:
        return [key.name for key in self.keys]

    @property
    def are_needed(self) -> bool:
        """Whether a request needs a key. An empty file admits no client."""
        return not self._auth.is_open

    def read_ahead(self, auth: AuthConfig) -> None:
        """Read the file for `apply`, if it will: in a thread, as a file system may hang."""
        if not self._reads_anew(auth):
            return
        try:
            self._ahead = auth, () if auth.keys_file is None else read_keys(Path(auth.keys_file), auth.keys)
        except ConfigError as error:
            self._ahead = auth, error

    def apply(self, auth: AuthConfig) -> None:
        """Take over the keys of a configuration, and its file; an invalid file leaves the former keys in effect."""
        if self._reads_anew(auth):
            if self._ahead is None or self._ahead[0] != auth:
                self.read_ahead(auth)
            assert self._ahead is not None
            if isinstance(listed := self._ahead[1], ConfigError):
                self._complain(listed)
            else:
                self._listed = listed
            self._version = ()  # the next step sees later changes
        self._ahead = None
        self._auth = auth

    def _reads_anew(self, auth: AuthConfig) -> bool:
        """Whether the file is another one, or is checked against other keys."""
        return (auth.keys_file, auth.keys) != (self._auth.keys_file, self._auth.keys)

    async def step(self) -> None:
        """Wait, and look at the file once. One that is missing may be about to be replaced: its keys stay."""
        await asyncio.sleep(_LOOK_SECONDS)
        auth = self._auth
        if auth.keys_file is None:
            return
        file = Path(auth.keys_file)
        try:
            if await self._threads.run(version_of, file) == self._version:
                return
            listed, changes = await self._threads.run(self._read_again, file, auth, self._listed)
        except OSError as error:
            self._complain(ConfigError(f"{file}: {error.strerror}"))
        except ConfigError as error:
            self._complain(error)
        else:
            if self._auth is auth:
                self._take(listed, changes)
            else:  # a concurrent reload
                self._version = ()

    def _read_again(
        self, file: Path, auth: AuthConfig, before: tuple[KeyConfig, ...]
    ) -> tuple[tuple[KeyConfig, ...], dict[str, list[str]]]:
        """The keys of the file and the changes; runs in a thread."""
        with yielding():
            listed = self._read(file, auth)
            return listed, _changes(before, listed)

    def _read(self, file: Path, auth: AuthConfig) -> tuple[KeyConfig, ...]:
        """The keys of the file. Its version is noted first: a change meanwhile is seen the next time."""
        try:
            self._version = version_of(file)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        return read_keys(file, auth.keys)

    def _take(self, listed: tuple[KeyConfig, ...], changes: dict[str, list[str]]) -> None:
        self._complaint = ""
        if any(changes.values()):
            self._listed = listed
            self._changed()
            self._log.info("keys_changed", file=self._auth.keys_file, **changes)

    def _complain(self, error: ConfigError) -> None:
        """Log why the file cannot be used, once for each reason."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            self._log.error("keys_file_ignored", reasons=str(error).splitlines(), hint="the keys stay as they were")


def _changes(before: tuple[KeyConfig, ...], after: tuple[KeyConfig, ...]) -> dict[str, list[str]]:
    """The names of keys that were added, removed and changed."""
    old, new = ({key.name: key for key in keys} for keys in (before, after))
    return {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(name for name in new.keys() & old.keys() if new[name] != old[name]),
    }
