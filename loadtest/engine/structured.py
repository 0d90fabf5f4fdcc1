"""Answers whose form the request prescribes: JSON by a schema, one of several texts, and calls of tools.

The values are as random as the words of other answers, but valid. Of JSON Schema, the keywords that clients' libraries
write are followed; `pattern` and conditions are not.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from random import Random
from typing import Any, Final

_WORDS: Final = ("red", "oak", "sea", "owl", "ink", "fox", "ice", "map", "cup", "sky")
_FORMATS: Final = {
    "date": "2026-11-26",
    "date-time": "2026-11-26T12:30:00Z",
    "time": "12:30:00Z",
    "duration": "PT90S",
    "email": "fox@example.com",
    "hostname": "oak.example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/owl",
    "uuid": "0b0f5a3e-6f0e-4c86-9d0a-3f6f1d2c9a57",
}
_DEEP: Final = 6  # beyond this depth, only required parts: schemas may refer to themselves
_DEEPEST: Final = 24
_MOST_ITEMS: Final = 64
_SPREAD: Final = 9  # of numbers, in steps
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prescription:
    """The form of an answer: JSON by a schema or one of some texts; the arguments of a tool, if one is named."""

    schema: Any = None
    _: KW_ONLY
    texts: tuple[str, ...] = ()
    tool: str | None = None
    must_call: bool = False  # the client left it to the model which tool is called

    def text(self, seed: int) -> str:
        """The whole answer; equal seeds give equal ones."""
        random = Random(seed)
        if self.texts:
            return random.choice(self.texts)
        return json.dumps(Instances(self.schema, random).make(self.schema))


def read_prescription(body: Mapping[str, Any]) -> Prescription | None:
    """The form prescribed by `tools`, `response_format`, `text.format` or `structured_outputs`; None = any text."""
    tool = _chosen_tool(body)
    if tool is not None:
        return tool
    for form in (body.get("response_format"), _mapping(body.get("text")).get("format")):
        given = _mapping(form)
        kind = given.get("type")
        if kind == "json_object":
            return Prescription({"type": "object"})
        if kind == "json_schema":
            return Prescription(_mapping(given.get("json_schema", given)).get("schema", {}))
    wanted = _mapping(body.get("structured_outputs"))
    if isinstance(wanted.get("choice"), list) and wanted["choice"]:
        return Prescription(texts=tuple(map(str, wanted["choice"])))
    if wanted.get("json") is not None:
        schema = wanted["json"]
        return Prescription(json.loads(schema) if isinstance(schema, str) else schema)
    return Prescription({"type": "object"}) if wanted.get("json_object") else None


def _chosen_tool(body: Mapping[str, Any]) -> Prescription | None:
    """The tool that must be called. With `auto`, the simulated model calls none."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    functions = [_mapping(_mapping(tool).get("function")) for tool in tools] if isinstance(tools, list) else []
    named = _mapping(_mapping(choice).get("function")).get("name")
    for function in functions:
        if isinstance(function.get("name"), str) and (choice == "required" or function["name"] == named):
            schema = function.get("parameters") or {"type": "object"}
            return Prescription(schema, tool=function["name"], must_call=choice == "required")
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(slots=True)
class Instances:
    """Makes values that are valid by a schema, if simple means suffice. `root` has the targets of `$ref`."""

    root: Any
    random: Random

    def make(self, schema: Any, depth: int = 0) -> Any:
        """A value that is valid by this part of the schema."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return None
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self.random.choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.make(self._option(schema[key], depth), depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "string")
        if isinstance(kind, list):
            others = [each for each in kind if each != "null"]
            kind = others[0] if others and (depth < _DEEP or "null" not in kind) else "null"
        makers = {"object": self._object, "array": self._array, "string": self._string}
        if kind in makers:
            return makers[kind](schema, depth)
        if kind in ("integer", "number"):
            return self._number(schema, whole=kind == "integer")
        return self.random.random() < 0.5 if kind == "boolean" else None

    def _resolved(self, schema: Schema) -> Schema:
        """The schema with its `$ref` and `allOf` put in their places."""
        for _ in range(_DEEPEST):
            if "$ref" not in schema:
                break
            found: Any = self.root
            for step in str(schema["$ref"]).lstrip("#/").split("/"):
                found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"), {}) if step else found
            schema = {**_mapping(found), **{key: value for key, value in schema.items() if key != "$ref"}}
        for part in map(_mapping, schema.get("allOf") or ()):
            part = self._resolved(part)
            properties = {**_mapping(schema.get("properties")), **_mapping(part.get("properties"))}
            required = [*schema.get("required", ()), *part.get("required", ())]
            schema = {**schema, **part, "properties": properties, "required": required}
        return schema

    def _option(self, options: Sequence[Any], depth: int) -> Any:
        """The first that is more than null; null where it is deep already."""
        is_null = [_mapping(option).get("type") == "null" for option in options]
        if depth >= _DEEP and True in is_null:
            return options[is_null.index(True)]
        return options[is_null.index(False)] if False in is_null else options[0]

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties, required = _mapping(schema.get("properties")), schema.get("required") or ()
        made = {
            name: self.make(each, depth + 1) for name, each in properties.items() if name in required or depth < _DEEP
        }
        return made | {name: None for name in required if name not in properties}

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        first = [self.make(each, depth + 1) for each in schema.get("prefixItems") or ()]
        least = schema.get("minItems", 0)
        wanted = max(least, 0 if depth >= _DEEP else min(2, schema.get("maxItems", 2)))
        items, made = schema.get("items", {"type": "string"}), first
        for _ in range(_MOST_ITEMS):
            if len(made) >= wanted or items is False:
                break
            value = self.make(items, depth + 1)
            if not (schema.get("uniqueItems") and value in made):
                made.append(value)
        return made

    def _string(self, schema: Schema, depth: int) -> str:  # noqa: ARG002
        if (known := _FORMATS.get(str(schema.get("format")))) is not None:
            return known
        text = " ".join(self.random.choices(_WORDS, k=2))
        while len(text) < min(schema.get("minLength", 0), 4096):
            text += " " + self.random.choice(_WORDS)
        return text[: schema.get("maxLength", len(text))]

    def _number(self, schema: Schema, *, whole: bool) -> float:
        """A small number within its bounds; a multiple, if required."""
        step = schema.get("multipleOf") or (1 if whole else 0.5)
        lows = [-(-schema["minimum"] // step)] if "minimum" in schema else []
        lows += [schema["exclusiveMinimum"] // step + 1] if "exclusiveMinimum" in schema else []
        highs = [schema["maximum"] // step] if "maximum" in schema else []
        highs += [-(-schema["exclusiveMaximum"] // step) - 1] if "exclusiveMaximum" in schema else []
        low = max(lows, default=min([0, *[high - _SPREAD for high in highs if high < 0]]))
        room = min([_SPREAD, *[high - low for high in highs]])
        value = (low + self.random.randint(0, max(0, int(room)))) * step
        return int(value) if whole else float(value)
