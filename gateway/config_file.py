"""Reading the configuration: the file, environment variables, options, and messages about what is invalid."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ValidationError

from gateway.config import SECRETS, Config, ConfigError

LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where it can be: a reload reads beside requests
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_PLAINLY = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
}


def substitute(value: Any, environ: dict[str, str], path: str = "") -> Any:
    """Replace `${VAR}` and `${VAR:-default}` in all strings. Raises ConfigError for one without a value."""
    if isinstance(value, dict):
        return {key: substitute(item, environ, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [substitute(item, environ, f"{path}.{number}") for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        if (found := environ.get(name) or default) is None:
            raise ConfigError(f"{path.lstrip('.')}: the environment variable {name} is not set and has no default")
        return found

    return _VARIABLE.sub(replace, value)


def parse(document: Any) -> Config:
    """Check a parsed document. Raises ConfigError with one line for each mistake."""
    if not isinstance(document, dict):
        raise ConfigError("the configuration must be a mapping with a key `backends`")
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(error_lines(error))) from error


def error_lines(error: ValidationError) -> list[str]:
    """One line for each mistake, which begins with its key."""
    return [f"{'.'.join(map(str, place)) or 'configuration'}: {text}" for place, text in mistakes(error)]


def mistakes(error: ValidationError) -> list[tuple[tuple[int | str, ...], str]]:
    """The key and the text of each mistake, in order, each once."""
    wrong = error.errors(include_url=False)
    or_auto = {item["loc"][:-1] for item in wrong if item["loc"][-1:] == ("literal['auto']",)}
    found: dict[tuple[tuple[int | str, ...], str], None] = {}
    for item in wrong:
        place, kind = item["loc"], item["type"]
        if kind == "too_short" and len(wrong) > 1:
            continue  # only says again that an element is wrong
        if place[-2:-1] == ("kv_events",) and kind == "literal_error":
            continue  # the message of the other form follows
        text = _PLAINLY.get(kind) or item["msg"].removeprefix("Value error, ")
        if place[:-1] in or_auto:
            place, text = place[:-1], "must be a whole number, or auto"
        elif place[-2:] == ("kv_events", "KvEventsConfig"):
            place, text = place[:-1], "must be auto, off, or a mapping such as {endpoint: tcp://10.0.0.11:5557}"
        elif kind == "model_type" and place[0] == "backends":
            text += " with a url, such as {url: http://10.0.0.11:8000}"
        found[tuple(part for part in place if part != "KvEventsConfig"), text] = None
    return list(found)


def mistakes_with_lines(file: Path, text: str, error: ValidationError) -> str:
    """The mistakes, one a line, with file and line; those of the command line's values have no line."""
    root, lines = yaml.compose(text, Loader=LOADER), []
    for place, what in mistakes(error):
        line = line_of(root, place)
        where = f"{file}:{line}: " if line else ""
        lines.append(f"{where}{'.'.join(map(str, place)) or 'configuration'}: {what}")
    return "\n".join(lines)


def line_of(root: yaml.Node | None, place: Iterable[int | str]) -> int | None:
    """The line of a key, or of what should have it, from 1 on; None = nothing of it is in the file."""
    node, line = root, None
    for part in place:
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def version_of(file: Path) -> tuple[int, ...]:
    """What changes when the file, or the target of its link, does. Raises OSError."""
    status = os.stat(file)
    return status.st_mtime_ns, status.st_size, status.st_ino


def load(
    file: Path | None,
    backends: list[str],
    host: str | None = None,
    port: int | None = None,
    admin_port: int | Literal["off"] | None = None,
) -> Config:
    """Read the file, if any, and let command-line values override it. Raises ConfigError."""
    document: Any = {}
    text = ""
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
            document = yaml.load(text, Loader=LOADER) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{file}: {why}") from error
        document = substitute(document, dict(os.environ))
    if isinstance(document, dict):
        if backends:
            document["backends"] = [{"url": url} for url in backends]
        server = document.get("server") or {}
        if isinstance(server, dict):  # else parsing fails
            given: dict[str, Any] = {"host": host, "port": port}
            overrides = {name: value for name, value in given.items() if value is not None}
            admin = server.get("admin") or {}
            if admin_port == "off":
                overrides["admin"] = None
            elif admin_port is not None and isinstance(admin, dict):
                overrides["admin"] = admin | {"port": admin_port}
            if overrides:
                document["server"] = server | overrides
        if not (document.get("backends") or document.get("discovery")):
            raise ConfigError(
                "no backends: pass --backend http://host:8000 (repeatable) or list them in a configuration file"
            )
    try:
        return parse(document)
    except ConfigError as error:
        if file is None or not isinstance(error.__cause__, ValidationError):
            raise
        raise ConfigError(mistakes_with_lines(file, text, error.__cause__)) from error


def masked(document: Any) -> Any:
    """A configuration as it may be shown: secrets are `***`."""
    if isinstance(document, dict):
        return {key: "***" if key in SECRETS and item else masked(item) for key, item in document.items()}
    return [masked(item) for item in document] if isinstance(document, list) else document
