"""Messages about an invalid configuration: one line for each mistake, with the key, and file and line."""

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import yaml
from pydantic import ValidationError

from gateway.config import Config

Place = tuple[int | str, ...]  # a key, from the top of the document
Mistake = tuple[Place, str]

_PLAINLY = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "string_type": "must be text; put it in quotes",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}
_UNQUOTED = re.compile(r"[\[{,:]\s*(\$\{\w+[^}]*\})")


def key_of(place: Place) -> str:
    return ".".join(map(str, place)) or "configuration"


def error_lines(error: ValidationError, within: Place | None = None) -> list[str]:
    """One line for each mistake, which begins with its key; `within` as in `mistakes`."""
    return [f"{key_of(place)}: {text}" for place, text in mistakes(error, within)]


def mistakes(error: ValidationError, within: Place | None = None) -> list[Mistake]:
    """The key and the text of each mistake, in order, each once. `within`: the place of the checked part in the
    configuration, to find the key that an unknown one may mean; None = outside a configuration.
    """
    wrong = error.errors(include_url=False)
    or_auto = {item["loc"][:-1] for item in wrong if item["loc"][-1:] == ("literal['auto']",)}
    found: dict[Mistake, None] = {}
    for item in wrong:
        place, kind = item["loc"], item["type"]
        if kind == "too_short" and len(wrong) > 1:
            continue  # only says again that an element is wrong
        if place[-2:-1] == ("kv_events",) and kind == "literal_error":
            continue  # the message of the other form follows
        text = _PLAINLY[kind].format_map(item.get("ctx", {})) if kind in _PLAINLY else item["msg"]
        text = text.removeprefix("Value error, ")
        if place[:-1] in or_auto:
            place, text = place[:-1], "must be a whole number, or auto"
        elif place[-2:] == ("kv_events", "KvEventsConfig"):
            place, text = place[:-1], "must be auto, off, or a mapping such as {endpoint: tcp://10.0.0.11:5557}"
        elif kind == "model_type" and place[0] == "backends":
            text += " with a url, such as {url: http://10.0.0.11:8000}"
        place = tuple(part for part in place if part != "KvEventsConfig")
        if kind == "extra_forbidden" and within is not None:
            text += _meant((*within, *place))
        for line in text.splitlines():
            found[place, line] = None
    return list(found)


@cache
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _meant(place: Place) -> str:
    """A hint about an unknown key: a key with a similar name, or the section that has it."""
    siblings, name = _names_at(place[:-1]), str(place[-1])
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"; did you mean {near[0]}?"
    elsewhere = [f"{section}.{name}" for section in _names_at(()) if name in _names_at((section,))]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else ""


def _names_at(place: Place) -> list[str]:
    """The names of the keys that a mapping at this place may have."""
    schemas = [_schema()]
    for part in place:
        schemas = [each for schema in _forms(schemas) for each in _below(schema, part)]
    return [name for schema in _forms(schemas) for name in schema.get("properties", ())]


def _forms(schemas: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The schemas, with references and alternatives resolved."""
    for schema in schemas:
        if reference := schema.get("$ref"):
            yield from _forms([_schema()["$defs"][reference.rpartition("/")[2]]])
        elif alternatives := schema.get("anyOf"):
            yield from _forms(alternatives)
        else:
            yield schema


def _below(schema: dict[str, Any], part: int | str) -> list[dict[str, Any]]:
    if isinstance(part, int):
        return [schema["items"]] if "items" in schema else []
    others = schema.get("additionalProperties")
    found = schema.get("properties", {}).get(part, others)
    return [found] if isinstance(found, dict) else []


def duplicate_keys(node: yaml.Node | None, place: Place = ()) -> Iterator[tuple[Place, int, int]]:
    """Keys that a mapping has twice: the key, its line, and the line where it is first."""
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in first and key.value != "<<":
                    yield (*place, key.value), line, first[key.value]
                first.setdefault(key.value, line)
                yield from duplicate_keys(value, (*place, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from duplicate_keys(value, (*place, number))


def of_yaml(error: yaml.YAMLError, text: str) -> str:
    """The line and the reason why a text is not valid YAML, such as ` line 3: ...`."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f" {error}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    what = getattr(error, "problem", None) or "invalid"
    context = getattr(error, "context", None)
    reason = f"not valid YAML: {f'{context}, ' if context else ''}{what}"
    if variable := _UNQUOTED.search(line):
        reason = f'{variable[1]} needs quotes inside {{ }} or [ ]: "{variable[1]}"'
    return f"{mark.line + 1}: {reason}"


def with_lines(file: object, root: yaml.Node | None, found: Iterable[Mistake]) -> list[str]:
    """The mistakes, each with file and line; mistakes in options and environment variables have no line."""
    lines = []
    for place, what in found:
        line = line_of(root, place)
        where = f"{file}:{line}: " if line else ""
        lines.append(f"{where}{key_of(place)}: {what}" if place else what)
    return lines


def line_of(root: yaml.Node | None, place: Place) -> int | None:
    """The line of a key, or of its innermost parent in the file, from 1 on; None = the file has no part of it."""
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
