"""Reading a backend's answer to some of the documents, and writing the answer to all."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

import orjson

from gateway.embeddings.parsing import parse_answer
from gateway.errors import WrongAnswer
from gateway.request import Pairs, most_prompt_tokens
from gateway.scoring.pairs import wanted_of

_ENTRIES_AT_ONCE = 64
_MOST_BYTES = 33554432  # of the answer to a piece
_ENTRY_BYTES = 4096  # of an entry, besides the document in it
_ESCAPED = 6  # times the bytes of a text, at most, when JSON escapes it
_REST_BYTES = 1048576


@dataclass(frozen=True, slots=True)
class Scores:
    """What a backend answered of some documents: entries in the order of the client's answer, by the client's count."""

    document: dict[str, Any]  # the answer, with nothing where its entries were
    entries: list[dict[str, Any]]
    prompt_tokens: int
    size_bytes: int


def most_bytes(documents: int, size_bytes: int) -> int:
    """Bytes that the answer to so many documents of this size may have: it may repeat them."""
    return min(_MOST_BYTES, _REST_BYTES + documents * _ENTRY_BYTES + _ESCAPED * size_bytes)


def read_scores(body: bytes, pairs: Pairs, part: range) -> Scores:
    """An answer that holds the scores of this part of the documents. Raises WrongAnswer for any other."""
    texts = pairs.documents[part.start : part.stop]
    marks = ((b"{", 8), (b"[", 8), (b",", 64))
    most = {mark: each * len(texts) + 64 + sum(text.count(mark.decode()) for text in texts) for mark, each in marks}
    document = parse_answer(body, most)
    given = document.get(_list_of(pairs)) if type(document) is dict else None
    if type(given) is not list:
        raise WrongAnswer("The backend's response contains no list of scores.")
    wanted = wanted_of(pairs, len(part))
    if len(given) != wanted:
        raise WrongAnswer(f"The backend returned {len(given)} scores where {wanted} were requested.")
    score_name, seen = _score_of(pairs), set()
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
    tokens = min(_tokens_of(document), most_prompt_tokens(len(part), size_bytes))
    given.sort(key=lambda entry: (-entry[score_name] if pairs.ranks else 0, entry["index"]))
    return Scores({**document, _list_of(pairs): None}, given, tokens, len(body))


def tokens_in(body: bytes) -> int:
    """The tokens that an answer to some pair tells of. Raises WrongAnswer."""
    return _tokens_of(parse_answer(body, {b"{": 64, b"[": 64, b",": 1024}))


def answer_pieces(request_id: str, pairs: Pairs, parts: list[Scores], tokens: int) -> Iterator[bytes]:
    """The answer to the client, as one backend would have written it. `parts` are in the order of the documents."""
    entries = list(chain.from_iterable(part.entries for part in parts))
    if pairs.ranks:
        name = _score_of(pairs)
        entries.sort(key=lambda entry: -entry[name])  # stable, as vLLM's: of equals the first document comes first
    del entries[wanted_of(pairs, len(entries)) if pairs.ranks else len(entries) :]
    document = parts[0].document
    usage = {**document["usage"], "prompt_tokens": tokens, "total_tokens": tokens}
    whole = {"id": None, **document} | {"id": f"score-{request_id}", "usage": usage}
    names = list(whole)
    place = names.index(_list_of(pairs))
    before, after = ({name: whole[name] for name in part} for part in (names[:place], names[place + 1 :]))
    yield b'%b,"%b":[' % (orjson.dumps(before)[:-1], names[place].encode())
    for start in range(0, len(entries), _ENTRIES_AT_ONCE):
        written = orjson.dumps(entries[start : start + _ENTRIES_AT_ONCE])[1:-1]
        yield b"," + written if start else written
    yield b"]," + orjson.dumps(after)[1:] if after else b"]}"


def _list_of(pairs: Pairs) -> str:
    return "results" if pairs.ranks else "data"


def _score_of(pairs: Pairs) -> str:
    return "relevance_score" if pairs.ranks else "score"


def _tokens_of(document: Any) -> int:
    usage = document.get("usage") if type(document) is dict else None
    tokens = usage.get("prompt_tokens") if type(usage) is dict else None
    if type(tokens) is not int or tokens < 0:
        raise WrongAnswer("The backend's response reports no token usage.")
    return tokens
