"""Reading the configuration: the file, environment variables and options; the later ones override."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ValidationError

from gateway.config import Config, ConfigError
from gateway.config import errors as config_errors
from gateway.config.errors import Mistake, Place
from gateway.files import MAX_CONFIG_BYTES, read_file

LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C if possible: a reload runs beside requests
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
# Kubernetes sets GATEWAY_PORT and others for a Service that is called gateway: names without __ are not settings.
_SETTING = re.compile(r"GATEWAY_([A-Z_]+?)__([A-Z0-9_]+)")


def substitute(value: Any, environ: Mapping[str, str]) -> Any:
    """Replace `${VAR}` and `${VAR:-default}` in all strings. Raises ConfigError for those without a value."""
    unset: list[Mistake] = []
    substituted = _substituted(value, environ, (), unset)
    if unset:
        raise ConfigError("\n".join(f"{config_errors.key_of(place)}: {what}" for place, what in unset))
    return substituted


def _substituted(value: Any, environ: Mapping[str, str], place: Place, unset: list[Mistake]) -> Any:
    if isinstance(value, dict):
        return {key: _substituted(item, environ, (*place, key), unset) for key, item in value.items()}
    if isinstance(value, list):
        return [_substituted(item, environ, (*place, number), unset) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        if (found := environ.get(name) or default) is None:
            unset.append((place, f"the environment variable {name} is not set and has no default"))
        return found or ""

    return _VARIABLE.sub(replace, value)


def _refuse_aliases(root: yaml.Node) -> None:
    """Raises a YAMLError at an alias: a few lines of them stand for billions of values."""
    seen, waiting = set[int](), [(root, root)]
    while waiting:
        node, place = waiting.pop()
        if id(node) in seen:
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=place.start_mark)
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            waiting += [(each, key) for key, value in reversed(node.value) for each in (value, key)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(each, node) for each in reversed(node.value)]


def parse(document: Any) -> Config:
    """Check a parsed document. Raises ConfigError with one line for each mistake."""
    if not isinstance(document, dict):
        raise ConfigError("the configuration must be a mapping with a key `backends`")
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(config_errors.error_lines(error, ()))) from error


class YamlFile:
    """A file as it was read: its document, and where its keys are. Raises ConfigError if it cannot be read."""

    def __init__(self, file: Path, environ: Mapping[str, str], max_bytes: int = MAX_CONFIG_BYTES) -> None:
        self._file = file
        self.unset: list[Mistake] = []  # keys with environment variables that have no value
        try:
            text = read_file(file, max_bytes).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: {error.strerror if isinstance(error, OSError) else error}") from error
        try:
            loader = LOADER(text)
            self._root = loader.get_single_node()
            if self._root is None:  # as while another program writes it
                raise ConfigError(f"{file}: is empty; write [] for an empty list or {{}} for an empty mapping")
            _refuse_aliases(self._root)
            self.document: Any = _substituted(loader.construct_document(self._root), environ, (), self.unset)
        except yaml.YAMLError as error:
            raise ConfigError(f"{file}:{config_errors.of_yaml(error, text)}") from error
        except RecursionError as error:
            raise ConfigError(f"{file}: is nested too deeply") from error
        if self.document is None:
            raise ConfigError(f"{file}: is null; write [] for an empty list or {{}} for an empty mapping")

    def complaints(self, found: Sequence[Mistake]) -> str:
        """All mistakes of the file and these, one a line, with their lines."""
        twice = [
            (place, f"duplicate key; it is in line {first}, too", line)
            for place, line, first in config_errors.duplicate_keys(self._root)
        ]
        lines = [f"{self._file}:{line}: {config_errors.key_of(place)}: {what}" for place, what, line in twice]
        without_value = {at for place, _ in self.unset for at in (place, place[:-1])}  # also a section without a key
        rest = [(place, what) for place, what in found if place not in without_value]
        lines += config_errors.with_lines(self._file, self._root, [*self.unset, *rest])
        return "\n".join(lines)


def _of_text(text: str) -> Any:
    """The value that a YAML text stands for. Raises YAMLError or RecursionError."""
    loader = LOADER(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _refuse_aliases(root)
    return loader.construct_document(root)


def of_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The keys that environment variables set: GATEWAY_BACKENDS, GATEWAY_API_KEYS, and GATEWAY_SECTION__KEY for others.

    Raises ConfigError for a value that is not YAML.
    """
    document: dict[str, Any] = {}
    for name, value in sorted(environ.items()):
        if name == "GATEWAY_BACKENDS":
            document["backends"] = backends_of(value.split(","))
        elif name == "GATEWAY_API_KEYS":
            document = merged(document, {"auth": {"keys": keys_of(value.split(","))}})
        elif setting := _SETTING.fullmatch(name):
            try:
                nested = _of_text(value)
            except (yaml.YAMLError, RecursionError) as error:
                raise ConfigError(f"{name}: not valid YAML, or with aliases") from error
            for key in reversed(f"{setting[1]}__{setting[2]}".lower().split("__")):
                nested = {key: nested}
            document = merged(document, nested)
    return document


def backends_of(urls: Sequence[str]) -> list[dict[str, str]]:
    return [{"url": url.strip()} for url in urls if url.strip()]


def keys_of(keys: Sequence[str]) -> list[dict[str, str]]:
    """API keys given as `key` or as `name=key`."""
    found = []
    for number, each in enumerate(filter(None, map(str.strip, keys)), start=1):
        name, _, key = each.partition("=")
        is_named = bool(key.strip("="))  # else the signs are the end of a key in base64
        found.append({"name": name, "key": key} if is_named else {"name": f"key-{number}", "key": each})
    return found


def merged(below: Any, above: Any) -> Any:
    """A document with the keys of another one over it."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def load(
    file: Path | None,
    backends: Sequence[str] = (),
    host: str | None = None,
    port: int | None = None,
    admin_port: int | Literal["off"] | None = None,
    api_keys: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    log: Mapping[str, str | None] | None = None,
) -> Config:
    """Read the file, if any; environment variables override it, and command-line values both. Raises ConfigError."""
    read = None if file is None else YamlFile(file, environ)
    document: Any = {} if read is None else read.document
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: the configuration must be a mapping with a key `backends`")
    given: dict[str, Any] = {}
    if backends:
        given["backends"] = backends_of(backends)
    if api_keys:
        given["auth"] = {"keys": keys_of(api_keys)}
    server: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if admin_port is not None:
        server["admin"] = None if admin_port == "off" else {"port": admin_port}
    if server:
        given["server"] = server
    if logs := {name: value for name, value in (log or {}).items() if value is not None}:
        given["log"] = logs
    overrides = merged(of_environment(environ), given)
    wrong = [name for name, value in overrides.items() if isinstance(value, dict) and _is_no_mapping(document, name)]
    document = merged(document, {name: value for name, value in overrides.items() if name not in wrong})
    return _checked(document, read)


def _is_no_mapping(document: dict[str, Any], section: str) -> bool:
    return not isinstance(document.get(section) or {}, dict)


def _checked(document: dict[str, Any], read: YamlFile | None) -> Config:
    found: list[Mistake] = []
    cause: ValidationError | None = None
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        cause, found = error, config_errors.mistakes(error, ())
    if complaints := read.complaints(found) if read else "\n".join(config_errors.with_lines(None, None, found)):
        raise ConfigError(complaints) from cause
    return config
