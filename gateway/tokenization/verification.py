"""Compares the tokens that are told here with those that a backend tells of the same prompts."""

from array import array
from collections.abc import Awaitable, Callable
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


async def counts_alike(model: str, backend: Backend, client: ControlClient, ours: list[int]) -> tuple[bool, str]:
    """Whether the backend counts the texts of `EMBEDDED` like this when it embeds them; if it embeds, what differs.

    Raises ControlError if it is worth another try.
    """
    for text, count in zip(EMBEDDED, ours, strict=True):
        try:
            answer = await client.post(backend, EMBEDDINGS_PATH, {"model": model, "input": text})
            theirs = answer["usage"]["prompt_tokens"]
        except ControlError as error:
            if error.status in _PASSING:
                raise
            return False, ""
        except (KeyError, TypeError):
            return False, f"{EMBEDDINGS_PATH} returned no usage"
        if theirs != count:
            return False, f"{EMBEDDINGS_PATH} counts {theirs} tokens where the gateway counts {count}"
    return True, ""


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
        raise CannotCompare(f"{PATH} returned no list of tokens")
    return tokens


def _ids(tokens: bytes | None) -> list[int] | None:
    return None if tokens is None else array("I", tokens).tolist()
