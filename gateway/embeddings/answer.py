"""Reading a backend's answer to a batch, and writing each client's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.embeddings.parsing import parse_answer
from gateway.embeddings.vectors import NotVectors, as_base64, as_floats
from gateway.errors import WrongAnswer
from gateway.request import Usage

_PIECE_BYTES = 131072
_FLOAT_BYTES, _BASE64_BYTES = 21, 6  # of one number
_MOST_BYTES = 16777216  # of the answer to a batch: parsed within 50 ms
_MOST_NUMBERS = 500_000  # of vectors that came as lists of numbers
_ITEM_BYTES = 524288
_REST_BYTES = 1048576


@dataclass(frozen=True, slots=True)
class Vectors:
    """What a backend answered: one entry of `data` for each input, in the order of the inputs."""

    document: dict[str, Any]  # the rest of the answer
    data: list[dict[str, Any]]
    prompt_tokens: int
    counts: Sequence[int] | None = None  # tokens of each input, where they were counted


def most_bytes(items: int) -> int:
    """Bytes that the answer to so many inputs may have."""
    return min(_MOST_BYTES, _REST_BYTES + items * _ITEM_BYTES)


def read_vectors(body: bytes, items: int) -> Vectors:
    """An answer that holds a vector for each of so many inputs. Raises WrongAnswer for any other."""
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
    usage = document.get("usage")
    tokens = usage.get("prompt_tokens") if type(usage) is dict else None
    if type(tokens) is not int or tokens < 0:
        raise WrongAnswer("The backend's response reports no token usage.")
    return Vectors(document, data, tokens)


def answer_pieces(
    request_id: str, document: dict[str, Any], data: list[dict[str, Any]], tokens: int, *, floats: bool
) -> Iterator[bytes]:
    """The answer to one client, as the backend would have written it, in pieces of some 100 KB at most.

    `document` is what a backend answered to all. Raises WrongAnswer.
    """
    usage = {**document["usage"], "prompt_tokens": tokens, "total_tokens": tokens}
    whole = {**document, "id": f"embd-{request_id}", "data": None, "usage": usage}
    names = list(whole)
    place = names.index("data")
    before, after = ({name: whole[name] for name in part} for part in (names[:place], names[place + 1 :]))
    yield orjson.dumps(before)[:-1] + (b',"data":[' if before else b'"data":[')
    step = max(1, _PIECE_BYTES // _size_of(data[0], floats=floats))
    for start in range(0, len(data), step):
        entries = data[start : start + step]
        try:
            vectors = (as_floats if floats else as_base64)([entry["embedding"] for entry in entries])
        except NotVectors as error:
            raise WrongAnswer(str(error)) from error
        own = [
            {**entry, "index": index, "embedding": vector}
            for index, (entry, vector) in enumerate(zip(entries, vectors, strict=True), start)
        ]
        written = orjson.dumps(own)[1:-1]
        yield b"," + written if start else written
    yield b"]," + orjson.dumps(after)[1:]


def size_of(data: list[dict[str, Any]], *, floats: bool) -> int:
    """About how many bytes the answer to one client has."""
    return len(data) * _size_of(data[0], floats=floats)


def _size_of(entry: dict[str, Any], *, floats: bool) -> int:
    vector = entry["embedding"]
    count = len(vector) * 3 // 16 if type(vector) is str else len(vector)
    return max(1, count * (_FLOAT_BYTES if floats else _BASE64_BYTES))


def usage_of(tokens: int) -> Usage:
    """The same usage, as the gateway counts it."""
    return Usage(tokens, 0)
