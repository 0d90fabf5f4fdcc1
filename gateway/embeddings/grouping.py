"""Which embeddings requests may share a batch: only what is provably the same for each input, whoever asks for it.

Each field that is known to act on one input at a time may be there, with a value of its type, and becomes part of what
requests must have in common. A request with anything else is not understood here, and is sent on as it is.
"""

from collections.abc import Collection
from typing import Any

import orjson

from gateway.request import EmbeddingInputs

MOST_INPUTS = 2048  # OpenAI's limit; longer lists are sent on as they are
_COMMON: dict[str, type] = {
    "model": str,
    "dimensions": int,
    "truncate_prompt_tokens": int,
    "truncation_side": str,
    "add_special_tokens": bool,
    "use_activation": bool,
    "priority": int,
    "cache_salt": str,
}
_OWN = frozenset(("input", "user", "encoding_format"))  # may differ between the requests of a batch
_ID_BYTES = 4  # an id stands for about as many bytes of text


def inputs_of(document: dict[str, Any], model: str, isolation: str = "") -> EmbeddingInputs | None:
    """The inputs of a request, if they can be told apart from those of others in one batch; else None.

    `model` is the name that backends use.
    """
    common = common_fields(document, _COMMON, _OWN)
    if common is None:
        return None
    wanted, user = document.get("encoding_format"), document.get("user")
    if (wanted is not None and wanted not in ("float", "base64")) or not isinstance(user, str | None):
        return None
    read = _read(document.get("input"))
    if read is None:
        return None
    items, are_ids, sizes = read
    template = orjson.dumps(common | {"model": model, "encoding_format": "base64"}, option=orjson.OPT_SORT_KEYS)
    return EmbeddingInputs(items, are_ids, sizes, template[:-1] + b',"input":', wanted != "base64", isolation)


def common_fields(document: dict[str, Any], kinds: dict[str, type], own: Collection[str]) -> dict[str, Any] | None:
    """The fields besides its `own`, where each is known and has a value of its kind; else None. Null is no value."""
    common: dict[str, Any] = {}
    for name, value in document.items():
        kind = kinds.get(name)
        if kind is not None:
            if type(value) is kind:
                common[name] = value
            elif value is not None:
                return None
        elif name not in own:
            return None
    return common


def body_of(template: bytes, items: list[str] | list[list[int]]) -> bytes:
    """The body that asks for these inputs together."""
    return b"%b%b}" % (template, orjson.dumps(items))


def _read(value: Any) -> tuple[list[str] | list[list[int]], bool, list[int]] | None:
    """The inputs as a list, whether they are token ids, and the size of each; None = not of one clear kind."""
    if type(value) is str:
        return [value], False, [_size(value)]
    if type(value) is not list or not value:
        return None
    kinds = set(map(type, value))
    if kinds == {int}:
        return ([value], True, [_ID_BYTES * len(value)]) if _are_ids(value) else None
    if len(value) > MOST_INPUTS:
        return None
    if kinds == {str}:
        return value, False, list(map(_size, value))
    if kinds == {list} and all(each and set(map(type, each)) == {int} and _are_ids(each) for each in value):
        return value, True, [_ID_BYTES * len(each) for each in value]
    return None


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _are_ids(values: list[int]) -> bool:
    return min(values) >= 0 and max(values) < 1 << 31
