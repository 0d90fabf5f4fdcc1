"""Wire format of embeddings: which requests may share a batch, cutting lists, reading and writing answers.

Only what provably acts on each input by itself may share a batch: each such field, with a value of its type, is part of
what requests must have in common. A request with any other field is sent on as it is. Backends are asked for base64;
clients get the encoding they asked for, to the last bit. Floats are written as vLLM does: each 32-bit float as the
shortest decimal of the 64-bit float of the same value. Parsing time is bounded: a parser takes 100 times as long for
values as for long strings.
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from gateway.errors import WrongAnswer
from gateway.request import Demand, EmbeddingInputs, InferenceRequest

_NO_NUMBERS = "An embedding in the backend's response is not a list of numbers."


def as_floats(vector: Any) -> Any:
    """A vector as a list of numbers, ready to be written by orjson. Raises WrongAnswer."""
    if type(vector) is str:
        return orjson.Fragment(orjson.dumps(_decoded(vector).astype(np.float64), option=orjson.OPT_SERIALIZE_NUMPY))
    if not set(map(type, vector)) <= {float, int}:
        raise WrongAnswer(_NO_NUMBERS)
    return vector


def as_base64(vector: Any) -> str:
    """A vector in base64, as it is if it came so. Raises WrongAnswer."""
    if type(vector) is str:
        return vector
    try:
        return b64encode(np.array(vector, "<f4").tobytes()).decode()
    except (TypeError, ValueError) as error:
        raise WrongAnswer(_NO_NUMBERS) from error


def is_sound(vector: Any) -> bool:
    """Whether it is base64 of finite 32-bit floats."""
    try:
        return type(vector) is str and bool(np.isfinite(_decoded(vector)).all())
    except WrongAnswer:
        return False


def _decoded(vector: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    try:
        return np.frombuffer(b64decode(vector, validate=True), "<f4")
    except (binascii.Error, ValueError) as error:
        raise WrongAnswer("An embedding in the backend's response is not base64 of 32-bit floats.") from error


MOST_INPUTS = 2048  # OpenAI's limit; longer lists are sent on as they are
COMMON: dict[str, type] = {
    **dict.fromkeys(("model", "truncation_side", "cache_salt"), str),
    **dict.fromkeys(("truncate_prompt_tokens", "priority"), int),
    "use_activation": bool,
}
_FIELDS = COMMON | {"dimensions": int, "add_special_tokens": bool}
_OWN = frozenset(("input", "user", "encoding_format"))  # may differ between the requests of a batch
_ID_BYTES = 4  # an id stands for about as many bytes of text


def inputs_of(document: dict[str, Any], model: str, isolation: str = "") -> EmbeddingInputs | None:
    """The inputs of a request, if they may share a batch with those of others. `model` is its name for backends."""
    common = common_fields(document, _FIELDS, _OWN)
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
    """The fields besides its `own`, if each is known and has a value of its type; else None. Null counts as absent."""
    others = {name: value for name, value in document.items() if name not in own}
    if not all(name in kinds and (value is None or type(value) is kinds[name]) for name, value in others.items()):
        return None
    return {name: value for name, value in others.items() if value is not None}


def body_of(template: bytes, items: Sequence[str | list[int]]) -> bytes:
    return b"%b%b}" % (template, orjson.dumps(items))


def part_of(request: InferenceRequest, body: bytes, sequences: int, suffix: str = "") -> InferenceRequest:
    """A request for a part of another one. `suffix` is added to its id: engines need a different one for each part."""
    name, headers = request.request_id, request.headers
    if suffix:
        name = f"{name[:112]}-{suffix}"
        headers = b"x-request-id: %b\r\n%b" % (name.encode(), headers.partition(b"\r\n")[2])
    of_whole, endpoint, kind = request.demand, request.endpoint, request.kind
    demand = Demand(
        of_whole.model,
        sequences=sequences,
        divisible=True,
        output_tokens=0,
        size_bytes=len(body),
        tenant=of_whole.tenant,
        weight=of_whole.weight,
        batch=of_whole.batch,
        deadline_seconds=of_whole.deadline_seconds,
    )
    return InferenceRequest(endpoint, kind, request.method, request.target, demand, name, body=body, headers=headers)


def _read(value: Any) -> tuple[list[str] | list[list[int]], bool, list[int]] | None:
    """The inputs as a list, whether they are token ids, and the size of each; None = mixed or unknown types."""
    if type(value) is str:
        return [value], False, [text_bytes(value)]
    if type(value) is not list or not value:
        return None
    kinds = set(map(type, value))
    if kinds == {int}:
        return ([value], True, [_ID_BYTES * len(value)]) if _are_ids(value) else None
    if len(value) > MOST_INPUTS:
        return None
    if kinds == {str}:
        return value, False, list(map(text_bytes, value))
    if kinds == {list} and all(each and set(map(type, each)) == {int} and _are_ids(each) for each in value):
        return value, True, [_ID_BYTES * len(each) for each in value]
    return None


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _are_ids(values: list[int]) -> bool:
    return min(values) >= 0 and max(values) < 1 << 31


def pieces(tokens: Sequence[int], max_items: int, piece_items: int, max_tokens: int, replicas: int = 1) -> list[range]:
    """The pieces of a list, in order; one, if the list keeps to `max_items` and `max_tokens`.

    A list that has to be cut is cut into at least as many pieces as there are replicas, if it has as many inputs. An
    input over the budget is a piece of its own.
    """
    count, total = len(tokens), sum(tokens)
    if count <= max_items and (total <= max_tokens or count == 1):
        return [range(count)]
    wanted = max(-(-count // piece_items), -(-total // max_tokens), min(replicas, count))
    fair_items, fair_tokens = min(piece_items, -(-count // wanted)), min(max_tokens, -(-total // wanted))
    cut: list[range] = []
    start = filled = 0
    for number, needed in enumerate(tokens):
        over = filled + needed > max_tokens or number - start >= fair_items or filled >= fair_tokens
        if number > start and over:
            cut.append(range(start, number))
            start, filled = number, 0
        filled += needed
    cut.append(range(start, count))
    return cut


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the weights (largest remainders)."""
    whole = sum(weights, 0.0)
    if not whole:
        weights, whole = [1.0] * len(weights), float(len(weights))
    exact = [total * weight / whole for weight in weights]
    parts = [int(each) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda number: parts[number] - exact[number])
    for number in by_rest[: total - sum(parts)]:
        parts[number] += 1
    return parts


_SHORT_BYTES = 1048576  # parsed within 25 ms, whatever it holds


def parse_answer(body: bytes, most: Mapping[bytes, int]) -> Any:
    """Raises WrongAnswer for invalid JSON, and for a long document with more of a mark than `most` has."""
    if len(body) > _SHORT_BYTES:
        for mark, count in most.items():
            if body.count(mark) > count:
                raise WrongAnswer(
                    f"The backend's response contains over {count} {mark.decode()!r}: more than requested."
                )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WrongAnswer(f"The backend's response is not valid JSON: {error}.") from error


def prompt_tokens_of(document: Any) -> int:
    """The tokens that an answer reports. Raises WrongAnswer."""
    usage = document.get("usage") if type(document) is dict else None
    tokens = usage.get("prompt_tokens") if type(usage) is dict else None
    if type(tokens) is not int or tokens < 0:
        raise WrongAnswer("The backend's response reports no token usage.")
    return tokens


def answer_around(
    document: dict[str, Any], request_id: str, list_name: str, tokens: int, entries: Iterable[bytes]
) -> Iterator[bytes]:
    """The answer to one client, in pieces. `entries` are parts of the list, each written as a list."""
    usage = {**document["usage"], "prompt_tokens": tokens, "total_tokens": tokens}
    whole = {"id": None, **document} | {"id": request_id, "usage": usage}
    names = list(whole)
    place = names.index(list_name)
    before, after = ({name: whole[name] for name in part} for part in (names[:place], names[place + 1 :]))
    yield b'%b,"%b":[' % (orjson.dumps(before)[:-1], list_name.encode())
    for number, written in enumerate(entries):
        yield b"," + written[1:-1] if number else written[1:-1]
    yield b"]," + orjson.dumps(after)[1:] if after else b"]}"


_PIECE_BYTES = 131072
_FLOAT_BYTES, _BASE64_BYTES = 21, 6  # of one number
_MOST_BYTES = 16777216  # of the answer to a batch: parsed within 50 ms
_MOST_NUMBERS = 500_000  # of vectors that came as lists of numbers
_ITEM_BYTES = 524288
_REST_BYTES = 1048576


@dataclass(frozen=True, slots=True)
class Vectors:
    """The answer to a batch or a request: one entry of `data` for each input, in the order of the inputs."""

    document: dict[str, Any]  # the rest of the answer
    data: list[dict[str, Any]]
    prompt_tokens: int
    counts: Sequence[int] | None = None  # tokens of each input, where they were counted
    exact: bool = True  # the tokens are this request's own, not its share of a batch's


def most_bytes(items: int) -> int:
    return min(_MOST_BYTES, _REST_BYTES + items * _ITEM_BYTES)


def read_vectors(body: bytes, items: int) -> Vectors:
    """Raises WrongAnswer unless the answer has one vector for each input."""
    document = parse_answer(body, {b"{": 4 * items + 64, b"[": 2 * items + 64, b",": _MOST_NUMBERS + 8 * items})
    given = document.get("data") if type(document) is dict else None
    if type(given) is not list:
        raise WrongAnswer("The backend's response contains no list of embeddings.")
    if len(given) != items:
        raise WrongAnswer(f"The backend returned {len(given)} embeddings for {items} inputs.")
    data: list[Any] = [None] * items
    for entry in given:
        index = entry.get("index") if type(entry) is dict else None
        if type(index) is not int or not 0 <= index < items or data[index] is not None:
            raise WrongAnswer("The embeddings in the backend's response have missing or duplicate indexes.")
        if type(entry.get("embedding")) not in (str, list) or not entry["embedding"]:
            raise WrongAnswer(f"The backend's response contains no embedding for input {index}.")
        data[index] = entry
    lengths = {(type(entry["embedding"]), len(entry["embedding"])) for entry in data}
    if len(lengths) > 1:
        raise WrongAnswer("The embeddings in the backend's response differ in size.")
    return Vectors(document, data, prompt_tokens_of(document))


def answer_pieces(
    request_id: str, document: dict[str, Any], data: list[dict[str, Any]], tokens: int, *, floats: bool
) -> Iterator[bytes]:
    """The answer to one client, as the backend would have written it, in pieces of some 100 KB. Raises WrongAnswer."""
    step, form = max(1, _PIECE_BYTES // size_of(data[:1], floats=floats)), as_floats if floats else as_base64

    def written(start: int) -> bytes:
        entries = enumerate(data[start : start + step], start)
        return orjson.dumps([{**entry, "index": n, "embedding": form(entry["embedding"])} for n, entry in entries])

    return answer_around(document, f"embd-{request_id}", "data", tokens, map(written, range(0, len(data), step)))


def size_of(data: list[dict[str, Any]], *, floats: bool) -> int:
    """The approximate size of the answer to one client, in bytes."""
    vector = data[0]["embedding"]
    count = len(vector) * 3 // 16 if type(vector) is str else len(vector)
    return len(data) * max(1, count * (_FLOAT_BYTES if floats else _BASE64_BYTES))
