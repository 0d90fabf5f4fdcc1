"""What two answers must have in common: everything but the text, the numbers and the ids."""

import json
from typing import Any

from tests.contract.exchange import Answer

# Strings that are part of the protocol: these must be equal, others need only be strings.
FIXED_TEXTS = frozenset(
    {"object", "type", "role", "finish_reason", "stop_reason", "param", "status", "owned_by", "reason"}
)
FIXED_NUMBERS = frozenset({"code", "index"})
SET_BY_THE_SERVER_LIBRARY = frozenset({"date", "server", "vary", "content-length"})
ACTED_ON: tuple[str, ...] = ("content-type", "allow")

Shape = Any


def shape(value: Any, key: str = "") -> Shape:
    """Keys in order and types of values; a list becomes its elements' shapes without repetition."""
    if isinstance(value, dict) and value and all(isinstance(item, float) for item in value.values()):
        return {"*": "float"}  # keyed by tokens' texts
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [*dict.fromkeys(json.dumps(shape(item, key)) for item in value)]
    if (isinstance(value, str) and key in FIXED_TEXTS) or (isinstance(value, int) and key in FIXED_NUMBERS):
        return value
    return type(value).__name__


def event_shape(event: str) -> str:
    """One server-sent event: its field names, and the shape of its data."""
    lines = []
    for line in event.split("\n"):
        name, separator, text = line.partition(": ")
        fixed = name != "data" or text == "[DONE]"
        lines.append(f"{name}{separator}{text if fixed else json.dumps(shape(json.loads(text)))}")
    return "\n".join(lines)


def choice_of(event: str) -> int | None:
    """Which choice an event belongs to; None for events about the whole answer."""
    _, _, text = event.rpartition("data: ")
    choices = {} if text == "[DONE]" else json.loads(text).get("choices")
    return int(choices[0]["index"]) if choices else None


def stream_shape(events: list[str]) -> dict[int | None, list[str]]:
    """The shapes of each choice's events in order, as how choices interleave is chance.

    Equal neighbours count once: how many tokens share an event is chance too.
    """
    shapes: dict[int | None, list[str]] = {}
    for event in events:
        seen = shapes.setdefault(choice_of(event), [])
        if not seen or seen[-1] != event_shape(event):
            seen.append(event_shape(event))
    return shapes


def header_shape(headers: list[list[str]] | list[tuple[str, str]]) -> dict[str, str]:
    """Header names, with the values that clients act on."""
    names = {name.lower(): value for name, value in headers}
    framing = "length" if "content-length" in names else names.get("transfer-encoding", "close")
    acted_on: dict[str, str] = {name: names[name] for name in ACTED_ON if name in names}
    others = dict.fromkeys(sorted(names.keys() - SET_BY_THE_SERVER_LIBRARY - {"connection", "transfer-encoding"}), "")
    return {**others, **acted_on, "framing": framing}


def answer_shape(answer: Answer) -> dict[str, Shape]:
    """The shape of a whole answer."""
    if "events" in answer:
        body: Shape = stream_shape(answer["events"])
    elif "json" in answer:
        body = shape(answer["json"])
    else:
        body = type(answer["text"]).__name__ if answer["text"] else ""
    return {"status": answer["status"], "headers": header_shape(answer["headers"]), "body": body}
