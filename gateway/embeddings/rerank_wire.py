"""Wire format of rerank and score requests: which may be cut, how tokens count, reading and writing answers.

A request may be cut if each of its fields acts on each document by itself. Any other request is sent on as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import isfinite
from typing import Any

import orjson

from gateway.embeddings.wire import COMMON, answer_around, common_fields, parse_answer, prompt_tokens_of, text_bytes
from gateway.errors import WrongAnswer
from gateway.request import Pairs, most_prompt_tokens

_FIELDS = COMMON | {
    **dict.fromkeys(("user", "padding", "instruction"), str),
    **dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc"), int),
    "chat_template_kwargs": dict,
    "return_documents": bool,
}
_BYTES_A_CHARACTER = 3  # where not all of them are ASCII
MOST_DOCUMENTS = 16384  # longer lists are sent on as they are
_RERANK = (("query", "documents"),)
_SCORE = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def pairs_of(endpoint: str, document: dict[str, Any], model: str) -> Pairs | None:
    """The pairs of a rerank or score request, if its documents may be cut anywhere. `model`: its name for backends."""
    ranks = endpoint == "rerank"
    names = next((pair for pair in (_RERANK if ranks else _SCORE) if pair[0] in document and pair[1] in document), None)
    if names is None:
        return None
    queries, documents, top_n = document[names[0]], document[names[1]], document.get("top_n", 0)
    if not _are_texts(documents) or len(documents) > MOST_DOCUMENTS or type(top_n) is not int or top_n < 0:
        return None
    if type(queries) is not str and (ranks or not _are_texts(queries) or len(queries) not in (1, len(documents))):
        return None
    fields = common_fields(document, _FIELDS, (*names, "top_n") if ranks else names)
    if fields is None:
        return None
    partners = list(map(text_bytes, [queries] if type(queries) is str else queries))
    if len(partners) == 1:
        partners *= len(documents)  # measured once: a client chooses the length of both
    sizes = [a + b for a, b in zip(partners, map(text_bytes, documents), strict=True)]
    return Pairs(names, queries, documents, sizes, fields | {"model": model}, ranks, top_n)


def body_of(pairs: Pairs, part: range) -> bytes:
    """The body for these documents alone. A document not in the top n of a part is not in the top n of all."""
    queries = pairs.queries if pairs.share_query else pairs.queries[part.start : part.stop]
    asked = pairs.fields | dict(zip(pairs.names, (queries, pairs.documents[part.start : part.stop]), strict=True))
    wanted = wanted_of(pairs, len(part))
    return orjson.dumps(asked if wanted == len(part) else asked | {"top_n": wanted})


def scored_bytes(document: dict[str, Any], size_bytes: int, documents: int) -> int:
    """The approximate bytes that a model scores: most models read the query again with each document."""
    for name, _ in _RERANK + _SCORE:
        query = document.get(name)
        if type(query) is list and len(query) == 1:
            query = query[0]
        if type(query) is str:
            return size_bytes + max(0, documents - 1) * len(query) * (1 if query.isascii() else _BYTES_A_CHARACTER)
    return size_bytes


def wanted_of(pairs: Pairs, documents: int) -> int:
    return pairs.top_n if 0 < pairs.top_n < documents else documents


def query_body(pairs: Pairs) -> bytes:
    """The body that scores the query against itself, truncated by the rules for queries on both sides."""
    fields = {name: value for name, value in pairs.fields.items() if name != "max_tokens_per_doc"}
    if "max_tokens_per_query" in fields:
        fields["max_tokens_per_doc"] = fields["max_tokens_per_query"]
    query = pairs.queries if type(pairs.queries) is str else pairs.queries[0]
    return orjson.dumps(fields | {pairs.names[0]: query, pairs.names[1]: [query]})


def _are_texts(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) == {str}


class Counting(StrEnum):
    """What a model reads to score several documents."""

    PAIRS = "pairs"  # query and document together, for each document: cross-encoders
    QUERY_ONCE = "query_once"  # the query once, and each document: embeddings that are compared afterwards
    UNKNOWN = "unknown"  # perhaps all documents in one prompt, where each one's score depends on the others

    @classmethod
    def of(cls, once_tokens: int, twice_tokens: int) -> "Counting":
        """What the tokens of the two probes show."""
        if twice_tokens == 2 * once_tokens:
            return cls.PAIRS
        return cls.QUERY_ONCE if 2 * twice_tokens == 3 * once_tokens else cls.UNKNOWN


def probes(model: str, pairs: Pairs) -> list[bytes]:
    """Bodies that score a text against itself, once and twice, in the form that these pairs have."""
    query, documents = pairs.names
    return [orjson.dumps({"model": model, query: "x", documents: ["x"] * count}) for count in (1, 2)]


_LIST_AND_SCORE = {True: ("results", "relevance_score"), False: ("data", "score")}  # by whether documents are ranked
_ENTRIES_AT_ONCE = 64
_MOST_BYTES = 33554432  # of the answer to a piece
_ENTRY_BYTES = 4096  # of an entry, besides the document in it
_ESCAPED = 6  # times the bytes of a text, at most, when JSON escapes it
_REST_BYTES = 1048576


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some documents, with the order and indexes of the client's answer."""

    document: dict[str, Any]  # the answer without its entries
    entries: list[dict[str, Any]]
    prompt_tokens: int
    size_bytes: int


def most_bytes(documents: int, size_bytes: int) -> int:
    """The maximum size of an answer to these documents, which it may repeat."""
    return min(_MOST_BYTES, _REST_BYTES + documents * _ENTRY_BYTES + _ESCAPED * size_bytes)


def read_scores(body: bytes, pairs: Pairs, part: range) -> Scores:
    """Raises WrongAnswer unless the answer has the scores of this part of the documents."""
    texts = pairs.documents[part.start : part.stop]
    marks = ((b"{", 8), (b"[", 8), (b",", 64))
    most = {mark: each * len(texts) + 64 + sum(text.count(mark.decode()) for text in texts) for mark, each in marks}
    document = parse_answer(body, most)
    list_name, score_name = _LIST_AND_SCORE[pairs.ranks]
    given = document.get(list_name) if type(document) is dict else None
    if type(given) is not list:
        raise WrongAnswer("The backend's response contains no list of scores.")
    wanted = wanted_of(pairs, len(part))
    if len(given) != wanted:
        raise WrongAnswer(f"The backend returned {len(given)} scores where {wanted} were requested.")
    seen = set()
    for entry in given:
        index = entry.get("index") if type(entry) is dict else None
        if type(index) is not int or not 0 <= index < len(part) or index in seen:
            raise WrongAnswer("The scores in the backend's response have missing or duplicate indexes.")
        score = entry.get(score_name)
        if type(score) not in (int, float) or not isfinite(score):
            raise WrongAnswer(f"The backend's response contains no score for document {index}.")
        seen.add(index)
        entry["index"] = part.start + index
    size_bytes = sum(pairs.sizes_bytes[part.start : part.stop])
    tokens = min(prompt_tokens_of(document), most_prompt_tokens(len(part), size_bytes))
    given.sort(key=lambda entry: (-entry[score_name] if pairs.ranks else 0, entry["index"]))
    return Scores({**document, list_name: None}, given, tokens, len(body))


def tokens_in(body: bytes) -> int:
    """The tokens that an answer to one pair reports. Raises WrongAnswer."""
    return prompt_tokens_of(parse_answer(body, {b"{": 64, b"[": 64, b",": 1024}))


def answer_pieces(request_id: str, pairs: Pairs, parts: list[Scores], tokens: int) -> Iterator[bytes]:
    """The answer as one backend would have written it. `parts` are in the order of the documents."""
    list_name, score_name = _LIST_AND_SCORE[pairs.ranks]
    entries = list(chain.from_iterable(part.entries for part in parts))
    if pairs.ranks:
        entries.sort(key=lambda entry: -entry[score_name])  # stable, as in vLLM: equal scores stay in order
        del entries[wanted_of(pairs, len(entries)) :]
    written = (orjson.dumps(entries[n : n + _ENTRIES_AT_ONCE]) for n in range(0, len(entries), _ENTRIES_AT_ONCE))
    return answer_around(parts[0].document, f"score-{request_id}", list_name, tokens, written)
