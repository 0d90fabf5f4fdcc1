"""Changes of the keys file: keys are made, rotated and revoked, and the file is replaced in one step."""

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from gateway.config import ConfigError
from gateway.config.file import YamlFile, merged, of_environment
from gateway.features.keys.keys_file import read_keys
from gateway.features.keys.settings import KeyConfig, PreviousKey

_SECRET_BYTES = 32
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DURATION = re.compile(r"([0-9]{1,9})([smhdw])")
_HEAD = "# API keys by their SHA-256. `gateway keys` changes this file and keeps no comments; a gateway follows it.\n"
Keys = tuple[KeyConfig, ...]


class KeysError(Exception):
    """A change of the keys file is not possible; the message says why."""


def new_secret() -> tuple[str, str]:
    """A random API key, and its SHA-256 in hex."""
    secret = f"sk-{secrets.token_urlsafe(_SECRET_BYTES)}"
    return secret, hashlib.sha256(secret.encode()).hexdigest()


def duration_of(text: str) -> timedelta:
    """A duration such as 90d or 24h; 0 = none. Raises KeysError."""
    if text == "0":
        return timedelta()
    if not (match := _DURATION.fullmatch(text)):
        raise KeysError(f"{text!r} is no duration: use a number and s, m, h, d or w, such as 24h")
    try:
        return timedelta(**{_UNITS[match[2]]: int(match[1])})
    except OverflowError as error:
        raise KeysError(f"{text!r} is too long a duration") from error


def expiry_of(text: str, now: datetime) -> datetime | None:
    """When a key expires: after a duration, at the start of a day (UTC), or at a time with its zone; None = `never`.

    Raises KeysError.
    """
    if text == "never":
        return None
    try:
        if _DURATION.fullmatch(text):
            return (now + duration_of(text)).replace(microsecond=0)
        if len(text) == len("2027-01-31"):
            day = date.fromisoformat(text)
            found = datetime(day.year, day.month, day.day, tzinfo=UTC)
        else:
            found = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise KeysError(
            f"{text!r} is no expiry: use a duration such as 90d, a date, a time such as 2027-01-31T12:00:00Z, or never"
        ) from error
    if found.tzinfo is None:
        raise KeysError(f"{text!r} has no time zone: end it with Z for UTC")
    if found <= now:
        raise KeysError(f"{text} has passed")
    return found


class KeyStore:
    """One keys file. `configured`: the names of keys that the configuration has."""

    def __init__(self, file: Path, configured: tuple[str, ...] = ()) -> None:
        self.file = file
        self._configured = configured

    def read(self) -> Keys:
        """The keys of the file; none if it does not exist or was only created. Raises KeysError."""
        try:
            return read_keys(self.file) if self.file.exists() and self.file.stat().st_size else ()
        except (ConfigError, OSError) as error:
            raise KeysError(str(error)) from error

    def add(self, settings: dict[str, Any]) -> str:
        """Add a key with these settings, and return its secret. Raises KeysError, or ValidationError."""
        name, (secret, digest) = settings["name"], new_secret()
        key = KeyConfig.model_validate({**settings, "key_sha256": digest})
        with self._changing() as keys:
            if name in self._configured or any(each.name == name for each in keys):
                raise KeysError(f"there is a key {name!r} already: rotate it, or choose another name")
            keys.append(key)
        return secret

    def revoke(self, name: str) -> None:
        """Remove a key with all its secrets. Raises KeysError."""
        with self._changing() as keys:
            del keys[self._place_of(name, keys)]

    def rotate(self, name: str, grace: timedelta, now: datetime, expires_at: datetime | None) -> str:
        """Give a key another secret, and return it; the former secret is valid for `grace`. Raises KeysError.

        `expires_at`: the expiry of the key from now on.
        """
        secret, digest = new_secret()
        with self._changing() as keys:
            place = self._place_of(name, keys)
            key = keys[place]
            previous = [each for each in key.previous if each.expires_at > now]
            if grace:
                until = (now + grace).replace(microsecond=0)
                previous.append(PreviousKey(key_sha256=key.digest.hex(), expires_at=until))
            changes = {"key_sha256": digest, "previous": previous, "expires_at": expires_at}
            keys[place] = KeyConfig.model_validate(key.model_dump(exclude={*changes}) | changes)
        return secret

    def key(self, name: str) -> KeyConfig:
        """The key with this name. Raises KeysError."""
        keys = list(self.read())
        return keys[self._place_of(name, keys)]

    def _place_of(self, name: str, keys: list[KeyConfig]) -> int:
        for place, key in enumerate(keys):
            if key.name == name:
                return place
        where = "; it is in the configuration, where you can change it" if name in self._configured else ""
        raise KeysError(f"there is no key {name!r} in {self.file}{where}")

    @contextmanager
    def _changing(self) -> Iterator[list[KeyConfig]]:
        """The keys, to be changed in place and then written; another command waits. Raises KeysError."""
        try:
            target = self.file.resolve()
            lock = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                keys = list(self.read())
                yield keys
                _replace(target, _text_of(target, keys))
            finally:
                os.close(lock)
        except OSError as error:
            raise KeysError(f"cannot write {self.file}: {error.strerror}") from error


def _text_of(file: Path, keys: list[KeyConfig]) -> str:
    entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
    if file.suffix == ".json":
        return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    return _HEAD + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)


def _replace(file: Path, text: str) -> None:
    """Replace a file in one step: readable by its owner alone; the owner stays the same. Raises OSError."""
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            with suppress(FileNotFoundError):
                before = file.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(out.fileno(), before.st_uid, before.st_gid)  # the gateway may run as another user
            os.fsync(out.fileno())
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def store_of(file: Path | None, config: Path | None, environ: dict[str, str]) -> KeyStore:
    """The keys file with this name, or that of a configuration. Raises KeysError.

    Of the configuration only this key is read: the variables in it need no values here.
    """
    try:
        read = None if config is None else YamlFile(config, environ).document
        auth = merged({} if read is None else read, of_environment(environ)).get("auth") or {}
        named, entries = auth.get("keys_file"), auth.get("keys") or ()
        names = tuple(str(each["name"]) for each in entries if "name" in each)
    except ConfigError as error:
        raise KeysError(str(error)) from error
    except (AttributeError, TypeError) as error:
        raise KeysError(f"{config}: `gateway check -c {config}` shows what is wrong with it") from error
    if file is None and not isinstance(named, str):
        raise KeysError("which file? Pass --file FILE, or -c FILE of a configuration with auth.keys_file")
    return KeyStore(file or Path(str(named)), names)
