"""What is wrong with a configuration, in plain words."""

from pydantic import ValidationError

_PLAINLY = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
}


def complaints(error: ValidationError) -> list[str]:
    """One line for each thing that is wrong, each thing once."""
    wrong = error.errors(include_url=False)
    or_auto = {item["loc"][:-1] for item in wrong if item["loc"][-1:] == ("literal['auto']",)}
    lines: dict[str, None] = {}  # in order, each once
    for item in wrong:
        place, kind = item["loc"], item["type"]
        if kind == "too_short" and len(wrong) > 1:
            continue  # only says again that an element is wrong
        if place[-2:-1] == ("kv_events",) and kind == "literal_error":
            continue  # the other form's complaint follows
        told = _PLAINLY.get(kind) or item["msg"].removeprefix("Value error, ")
        if place[:-1] in or_auto:
            place, told = place[:-1], "must be a whole number, or auto"
        elif place[-2:] == ("kv_events", "KvEventsConfig"):
            place, told = place[:-1], "must be auto, off, or a mapping such as {endpoint: tcp://10.0.0.11:5557}"
        elif kind == "model_type" and place[0] == "backends":
            told += " with a url, such as {url: http://10.0.0.11:8000}"
        shown = ".".join(str(part) for part in place if part != "KvEventsConfig")
        lines[f"{shown or 'configuration'}: {told}"] = None
    return list(lines)
