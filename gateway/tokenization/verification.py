"""Compares the tokens that are told here with those that a backend tells of the same prompts."""

from array import array
from base64 import b64decode
from collections.abc import Awaitable, Callable
from math import hypot
from operator import mul
from typing import Any, Final

from gateway.backends.backend import Backend
from gateway.backends.control import ControlClient, ControlError
from gateway.tokenization.conversation import ContentFormat
from gateway.tokenization.probes import EMBEDDED, PROBES, Comparison, Probe, compare

PATH = "/tokenize"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
_NOT_THERE = (404, 405, 501)
_REFUSED = (400, 422)  # the backend cannot render this prompt
_PASSING = (None, 429, 503)  # ask again
_LEAST_COSINE: Final = 0.999  # of the same tokens: engines of 16-bit floats are not always of one opinion

TellOurs = Callable[[Probe, ContentFormat], Awaitable[bytes | None]]


class CannotCompare(Exception):
    """The backend does not tell its tokens, and will not: the message says why."""


async def compared(
    model: str, backend: Backend, client: ControlClient, tell_ours: TellOurs
) -> dict[ContentFormat, Comparison]:
    """What is alike for each content format. Raises CannotCompare, or ControlError if it is worth another try."""
    theirs = [await _theirs(model, backend, client, probe) for probe in PROBES]
    comparisons = {}
    for content_format in ContentFormat:
        ours = [_ids(await tell_ours(probe, content_format)) for probe in PROBES]
        comparisons[content_format] = compare(ours, theirs)
    return comparisons


def best_format(comparisons: dict[ContentFormat, Comparison]) -> ContentFormat:
    """The content format under which most is alike."""
    return max(comparisons, key=lambda each: (comparisons[each].alike, len(comparisons[each].features)))


async def embeds_alike(model: str, backend: Backend, client: ControlClient, ids: list[list[int]]) -> tuple[bool, str]:
    """Whether the backend embeds the texts of `EMBEDDED` and these ids of theirs alike; if it embeds, what differs.

    Raises ControlError if it is worth another try.
    """
    try:
        of_texts, text_tokens = await _embedded(model, backend, client, EMBEDDED)
        of_ids, id_tokens = await _embedded(model, backend, client, ids)
    except ControlError as error:
        if error.status in _PASSING:
            raise
        return False, ""
    except (KeyError, TypeError, ValueError) as error:
        return False, f"{EMBEDDINGS_PATH} answered without vectors ({type(error).__name__})"
    counts = (sum(map(len, ids)), text_tokens, id_tokens)
    if len(set(counts)) > 1:
        return False, f"{counts[0]} tokens here, {text_tokens} of the texts there and {id_tokens} of their ids"
    alike = all(_cosine(left, right) >= _LEAST_COSINE for left, right in zip(of_texts, of_ids, strict=True))
    return (True, "") if alike else (False, "the vector of a text there is another than that of its tokens here")


async def _embedded(
    model: str, backend: Backend, client: ControlClient, given: Any
) -> tuple[list["array[float]"], int]:
    """The vectors of some inputs, and how many tokens the backend counts."""
    asked = {"model": model, "input": given, "encoding_format": "base64"}
    answer = await client.post(backend, EMBEDDINGS_PATH, asked)
    entries = sorted(answer["data"], key=lambda entry: int(entry["index"]))
    vectors = [array("f", b64decode(entry["embedding"])) for entry in entries]
    if len(vectors) != len(given) or len(set(map(len, vectors))) != 1:
        raise ValueError
    return vectors, int(answer["usage"]["prompt_tokens"])


def _cosine(left: "array[float]", right: "array[float]") -> float:
    product: float = sum(map(mul, left, right))
    return product / ((hypot(*left) * hypot(*right)) or 1.0)


async def _theirs(model: str, backend: Backend, client: ControlClient, probe: Probe) -> list[int] | None:
    try:
        answer = await client.post(backend, PATH, {"model": model, **probe.document})
    except ControlError as error:
        if error.status in _REFUSED:
            return None
        if error.status in _NOT_THERE:
            raise CannotCompare(str(error)) from error
        raise
    return _checked(answer)


def _checked(answer: Any) -> list[int]:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise CannotCompare(f"{PATH} answered without a list of tokens")
    return tokens


def _ids(tokens: bytes | None) -> list[int] | None:
    return None if tokens is None else array("I", tokens).tolist()
