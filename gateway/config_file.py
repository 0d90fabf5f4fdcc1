"""How the configuration file is read, with variables of the environment and what the command line says."""

import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml

from gateway.config import Config, ConfigError, parse

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def substitute(value: Any, environ: dict[str, str], path: str = "") -> Any:
    """Replace `${VAR}` and `${VAR:-default}` in every string of a parsed document.

    Raises ConfigError for a variable that is not set and has no default.
    """
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
        if isinstance(server, dict) and (
            told := _told(server, host, port, admin_port)
        ):  # else parsing says what is wrong
            document["server"] = server | told
        if not document.get("backends"):
            raise ConfigError(
                "no backends: pass --backend http://host:8000 (repeatable) or list them in a configuration file"
            )
    return parse(document)


def _told(
    server: dict[str, Any], host: str | None, port: int | None, admin_port: int | Literal["off"] | None
) -> dict[str, Any]:
    """What the command line says of the section `server`."""
    told: dict[str, Any] = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    admin = server.get("admin") or {}
    if admin_port == "off":
        told["admin"] = None
    elif admin_port is not None and isinstance(admin, dict):
        told["admin"] = admin | {"port": admin_port}
    return told
