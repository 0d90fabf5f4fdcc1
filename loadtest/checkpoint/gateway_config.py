"""The configuration with which a local gateway was started, from its command, secrets starred out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.config import ConfigError, parse
from gateway.config_file import substitute
from loadtest.checkpoint import redaction


def effective(words: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Any:
    """As the gateway reads it, defaults included. A text that says why, where that cannot be told."""
    if "serve" not in words:
        return "its command is not `gateway serve`"
    file = next(iter(_values(words, "-c", "--config")), None)
    try:
        document = {} if file is None else yaml.safe_load((directory / file).read_text(encoding="utf-8"))
        document = substitute(document or {}, dict(environment))
        if backends := _values(words, "--backend"):
            document["backends"] = [{"url": url} for url in backends]
        return redaction.document(parse(document).model_dump(mode="json"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError, TypeError) as error:
        return redaction.text(f"{file or 'no file'}: cannot be read as the gateway did: {error}")


def _values(words: Sequence[str], *options: str) -> list[str]:
    found = []
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word in options and place + 1 < len(words):
            found.append(words[place + 1])
        elif equals and name in options:
            found.append(value)
    return found
