"""Reading the configuration: the file, environment variables, options, and messages about what is invalid."""

import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from gateway.config import Config, ConfigError

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
    wrong = error.errors(include_url=False)
    or_auto = {item["loc"][:-1] for item in wrong if item["loc"][-1:] == ("literal['auto']",)}
    lines: dict[str, None] = {}  # in order, each once
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
        shown = ".".join(str(part) for part in place if part != "KvEventsConfig")
        lines[f"{shown or 'configuration'}: {text}"] = None
    return list(lines)


def load(
    file: Path | None,
    backends: list[str],
    host: str | None = None,
    port: int | None = None,
    admin_port: int | Literal["off"] | None = None,
) -> Config:
    """Read the file, if any, and let command-line values override it. Raises ConfigError."""
    document: Any = {}
    if file is not None:
        try:
            document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
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
        if not document.get("backends"):
            raise ConfigError(
                "no backends: pass --backend http://host:8000 (repeatable) or list them in a configuration file"
            )
    return parse(document)
