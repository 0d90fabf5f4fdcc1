"""Stars out secrets, also doubtful ones, in commands, environments, URLs and documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

HIDDEN = "***"
_HEADER_OPTION = "--header"  # of loadtest itself, with NAME:VALUE

# Whole words of a name: `--tokenizer` and `max_tokens` are no secrets, `HF_TOKEN` is.
_SECRET_WORDS = (
    "key keys apikey token secret secrets password passwd pwd passphrase pass credential credentials auth authorization"
    " bearer cookie dsn"
)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_USER = re.compile(r"(://)[^/\s@]+@")
_QUERY = re.compile(r"([?&;])([\w.-]+)=([^&;#\s\"']+)")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|x-api-key|api-key|cookie)(\"?\s*[:=]\s*\"?)[^\"'\n]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}")
_WELL_KNOWN = re.compile(
    r"\b(?:sk-[\w-]{8,}|hf_\w{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}|xox[a-z]-[\w-]{8,}|"
    r"(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)


def is_secret(name: str) -> bool:
    """Whether the value of this name (an option, a variable, a field) must not be shown."""
    return any(word.lower() in _SECRET_WORDS.split() for word in _WORDS.findall(name))


def text(value: str) -> str:
    """The text without likely secrets at any place: users of URLs, keys of queries, known shapes."""
    value = _USER.sub(rf"\1{HIDDEN}@", value)
    value = _QUERY.sub(lambda found: f"{found[1]}{found[2]}={HIDDEN}" if is_secret(found[2]) else found[0], value)
    value = _HEADER.sub(rf"\1\2{HIDDEN}", value)
    value = _BEARER.sub(rf"\1 {HIDDEN}", value)
    return _WELL_KNOWN.sub(HIDDEN, value)


def command(words: Sequence[str]) -> list[str]:
    """The command; all values of a secret option are starred out, in both spellings, and those of every header."""
    shown: list[str] = []
    hide = is_header = False
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if is_header or (equals and name == _HEADER_OPTION):
            option, header = ("", word) if is_header else (f"{name}=", value)
            shown.append(f"{option}{header.partition(':')[0]}:{HIDDEN}" if ":" in header else option + HIDDEN)
            is_header = False
            continue
        is_header = word == _HEADER_OPTION
        if hide and not is_option:
            shown.append(HIDDEN)
        elif equals and is_secret(name) and re.fullmatch(r"[\w.-]+", name):
            shown.append(f"{name}={HIDDEN}")
        elif equals and is_option:
            shown.append(f"{name}={_value(value)}")
        else:
            shown.append(_value(word))
        if is_option:
            hide = not equals and is_secret(name)
    return shown


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, by name, with secret ones starred out."""
    return {name: HIDDEN if is_secret(name) and value else _value(value) for name, value in sorted(variables.items())}


def document(value: Any) -> Any:
    """A parsed document; values under secret names are starred out as a whole."""
    if isinstance(value, Mapping):
        return {
            str(name): HIDDEN if is_secret(str(name)) and _hides(str(name), inner) else document(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [document(inner) for inner in value]
    return text(value) if isinstance(value, str) else value


def _hides(name: str, value: Any) -> bool:
    """A list of sections is looked into by the names in it; a number is a secret only where a name says so plainly."""
    if isinstance(value, Mapping) or not value or isinstance(value, bool):
        return False
    if isinstance(value, list | tuple):
        return not any(isinstance(inner, Mapping) for inner in value)
    return not isinstance(value, int | float) or "pass" in name.lower() or "secret" in name.lower()


def _value(word: str) -> str:
    """A word of a command; JSON in it is looked into."""
    if word[:1] in ("{", "["):
        try:
            found = orjson.loads(word)
        except orjson.JSONDecodeError:
            return text(word)
        return orjson.dumps(document(found)).decode() if document(found) != found else word
    return text(word)
