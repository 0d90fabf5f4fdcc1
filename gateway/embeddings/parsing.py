"""Parsing what a backend answered, in bounded time: a parser takes 100 times as long for values as for long strings."""

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.errors import WrongAnswer

_SHORT_BYTES = 1048576  # parsed within 25 ms, whatever it holds


def parse_answer(body: bytes, most: Mapping[bytes, int]) -> Any:
    """The document. Raises WrongAnswer if it is none, or a long one in which one of these marks is more often."""
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
