"""Which rerank and score requests may be cut: only those whose every field acts on each document by itself.

A request with anything else is not understood here, and is sent on as it is.
"""

from typing import Any

import orjson

from gateway.embeddings.grouping import common_fields
from gateway.request import Pairs

_COMMON: dict[str, type] = {
    "model": str,
    "user": str,
    "truncate_prompt_tokens": int,
    "truncation_side": str,
    "padding": str,
    "max_tokens_per_query": int,
    "max_tokens_per_doc": int,
    "use_activation": bool,
    "instruction": str,
    "chat_template_kwargs": dict,
    "priority": int,
    "cache_salt": str,
    "return_documents": bool,
}
_BYTES_A_CHARACTER = 3  # where not all of them are ASCII
MOST_DOCUMENTS = 16384  # longer lists are sent on as they are
_RERANK = (("query", "documents"),)
_SCORE = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def pairs_of(endpoint: str, document: dict[str, Any], model: str) -> Pairs | None:
    """The pairs of a rerank or score request of several documents, if it may be cut between any two; else None.

    `model` is the name that backends use.
    """
    ranks = endpoint == "rerank"
    names = next((pair for pair in (_RERANK if ranks else _SCORE) if pair[0] in document and pair[1] in document), None)
    if names is None:
        return None
    queries, documents, top_n = document[names[0]], document[names[1]], document.get("top_n", 0)
    if not _are_texts(documents) or len(documents) > MOST_DOCUMENTS or type(top_n) is not int or top_n < 0:
        return None
    if type(queries) is not str and (ranks or not _are_texts(queries) or len(queries) not in (1, len(documents))):
        return None
    fields = common_fields(document, _COMMON, (*names, "top_n") if ranks else names)
    if fields is None:
        return None
    partners = list(map(_size, [queries] if type(queries) is str else queries))
    if len(partners) == 1:
        partners *= len(documents)  # measured once: a client chooses the length of both
    sizes = [a + b for a, b in zip(partners, map(_size, documents), strict=True)]
    return Pairs(names, queries, documents, sizes, fields | {"model": model}, ranks, top_n)


def body_of(pairs: Pairs, part: range) -> bytes:
    """The body that asks for these documents alone. What is not among the best of a part is not among those of all."""
    queries = pairs.queries if pairs.share_query else pairs.queries[part.start : part.stop]
    asked = pairs.fields | dict(zip(pairs.names, (queries, pairs.documents[part.start : part.stop]), strict=True))
    wanted = wanted_of(pairs, len(part))
    return orjson.dumps(asked if wanted == len(part) else asked | {"top_n": wanted})


def scored_bytes(document: dict[str, Any], size_bytes: int, documents: int) -> int:
    """About how many bytes a model scores: most models read the one query again with each document."""
    for name, _ in _RERANK + _SCORE:
        query = document.get(name)
        if type(query) is list and len(query) == 1:
            query = query[0]
        if type(query) is str:
            return size_bytes + max(0, documents - 1) * len(query) * (1 if query.isascii() else _BYTES_A_CHARACTER)
    return size_bytes


def repeated_bytes(pairs: Pairs) -> int:
    """What the body of each piece repeats: everything but documents, and but queries that are one for each."""
    return len(body_of(pairs, range(0)))


def wanted_of(pairs: Pairs, documents: int) -> int:
    """How many of so many documents are to be answered."""
    return pairs.top_n if 0 < pairs.top_n < documents else documents


def query_body(pairs: Pairs) -> bytes:
    """The body that asks for the query scored against itself, cut short by the rules for queries on both sides."""
    fields = {name: value for name, value in pairs.fields.items() if name != "max_tokens_per_doc"}
    if "max_tokens_per_query" in fields:
        fields["max_tokens_per_doc"] = fields["max_tokens_per_query"]
    query = pairs.queries if type(pairs.queries) is str else pairs.queries[0]
    return orjson.dumps(fields | {pairs.names[0]: query, pairs.names[1]: [query]})


def _are_texts(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) == {str}


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
