"""The keys file: API keys of clients by their digests, as a list of entries like `auth.keys`."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gateway.config import Config, ConfigError
from gateway.config.errors import Mistake, mistakes
from gateway.config.file import YamlFile
from gateway.features.keys.settings import KeyConfig, conflicts

_KEYS = TypeAdapter(tuple[KeyConfig, ...])


def read_keys(file: Path, configured: Sequence[KeyConfig] = ()) -> tuple[KeyConfig, ...]:
    """The keys of the file. Raises ConfigError with a line for each mistake, also for conflicts with the configured
    keys.
    """
    read = YamlFile(file, {})
    if not isinstance(read.document, list):
        raise ConfigError(f"{file}: must be a list of keys, such as [{{name: team-a, key_sha256: ...}}]")
    keys, found = tuple[KeyConfig, ...](), list[Mistake]()
    try:
        keys = _KEYS.validate_python(read.document)
    except ValidationError as error:
        found = mistakes(error, within=("auth", "keys"))
    plain = "must not be in this file in plain text; set key_sha256, as `gateway keys new` does"
    found += [((number, "key"), plain) for number, key in enumerate(keys) if key.key]
    if complaints := read.complaints(found):
        raise ConfigError(complaints)
    if wrong := conflicts((*configured, *keys)):
        raise ConfigError("\n".join(f"{file}: {each}" for each in wrong))
    return keys


def checked(config: Config) -> Config:
    """The configuration, if its keys file can be used. Raises ConfigError."""
    if config.auth.keys_file is not None:
        file = Path(config.auth.keys_file)
        if not file.exists():
            raise ConfigError(f"auth.keys_file: {file} does not exist; `gateway keys new NAME --file {file}` makes it")
        read_keys(file, config.auth.keys)
    return config
