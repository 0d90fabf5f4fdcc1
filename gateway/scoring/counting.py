"""How a model counts the tokens of pairs, which also tells whether it scores each document by itself."""

from enum import StrEnum

import orjson

from gateway.request import Pairs


class Counting(StrEnum):
    """What a model has to be given for several documents."""

    PAIRS = "pairs"  # query and document together, for each document: cross-encoders
    QUERY_ONCE = "query_once"  # the query once, and each document: embeddings that are compared afterwards
    UNKNOWN = "unknown"  # perhaps all documents in one prompt, where each one's score depends on the others


def probes(model: str, pairs: Pairs) -> tuple[bytes, bytes]:
    """Bodies that ask for a text against itself, once and twice, in the form that these pairs have."""
    once, twice = (
        orjson.dumps({"model": model, pairs.names[0]: "x", pairs.names[1]: ["x"] * count}) for count in (1, 2)
    )
    return once, twice


def counting_of(once_tokens: int, twice_tokens: int) -> Counting:
    """What the tokens of the two probes tell."""
    if twice_tokens == 2 * once_tokens:
        return Counting.PAIRS
    if 2 * twice_tokens == 3 * once_tokens:
        return Counting.QUERY_ONCE
    return Counting.UNKNOWN
