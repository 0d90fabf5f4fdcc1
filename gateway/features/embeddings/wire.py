"""Wire formats of embeddings, and of rerank and score requests: which may be batched or cut, and their answers.

A request is batched or cut only if all its fields provably act on each input or document by itself; others are sent
unchanged. Requests of one batch have the same fields with the same values.

Backends are asked for base64; clients get the requested encoding, to the last bit. Floats are written as vLLM does:
each 32-bit float as the shortest decimal of the 64-bit float of the same value. Parsing time is bounded: a parser takes
100 times as long for values as for long strings.
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from itertools import chain
from math import isfinite
from typing import Any

import numpy as np
import orjson

from gateway.core.errors import WrongAnswer
from gateway.core.request import Demand, InferenceRequest, OfflineTerms, most_prompt_tokens
from gateway.features.embeddings.inputs import EmbeddingInputs, Pairs

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


def _decoded(vector: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    try:
        return np.frombuffer(b64decode(vector, validate=True), "<f4")
    except (binascii.Error, ValueError) as error:
        raise WrongAnswer("An embedding in the backend's response is not base64 of 32-bit floats.") from error


MOST_INPUTS = 2048  # OpenAI's limit; longer lists are sent on as they are
_COMMON: dict[str, type] = {
    **dict.fromkeys(("model", "truncation_side", "cache_salt"), str),
    **dict.fromkeys(("truncate_prompt_tokens", "priority"), int),
    "use_activation": bool,
}
_FIELDS = _COMMON | {"dimensions": int, "add_special_tokens": bool}
_MOST_IDS = 524288  # looked at within 25 ms; longer lists are sent on as they are
_OWN = frozenset(("input", "user", "encoding_format"))  # may differ between the requests of a batch
_ID_BYTES = 4  # an id stands for about as many bytes of text


def inputs_of(document: dict[str, Any], model: str) -> EmbeddingInputs | None:
    """The inputs of a request, if they may share a batch with others. `model` is its name for backends."""
    common = common_fields(document, _FIELDS, _OWN)
    if common is None:
        return None
    wanted, user, read = document.get("encoding_format"), document.get("user"), _read(document.get("input"))
    if wanted not in (None, "float", "base64") or not isinstance(user, str | None) or read is None:
        return None
    items, are_ids, sizes = read
    template = orjson.dumps(common | {"model": model, "encoding_format": "base64"}, option=orjson.OPT_SORT_KEYS)
    return EmbeddingInputs(items, are_ids, sizes, template[:-1] + b',"input":', wanted != "base64")


def common_fields(document: dict[str, Any], kinds: dict[str, type], own: Collection[str]) -> dict[str, Any] | None:
    """The fields besides its `own`, if each is known and has a value of its type; else None. Null counts as absent."""
    common = {}
    for name, value in document.items():
        if name in own or (value is None and name in kinds):
            continue
        if type(value) is not kinds.get(name):
            return None
        common[name] = value
    return common


def body_of(template: bytes, items: Sequence[str | list[int]]) -> bytes:
    return b"%b%b}" % (template, orjson.dumps(items))


def short_line(demands: Sequence[Demand]) -> OfflineTerms | None:
    """The terms of offline lines sent as one call, as urgent as the earliest to expire; None = no lines."""
    lines = [demand.offline for demand in demands if demand.offline is not None]
    if not lines:
        return None
    return min(lines, key=lambda line: line.expires_seconds).as_short_call()


def part_of(request: InferenceRequest, body: bytes, sequences: int, tokens: int, suffix: str = "") -> InferenceRequest:
    """A request for a part of another one. `tokens`: an estimate.

    `suffix` is added to its id: engines need a different one for each part.
    """
    name, headers = request.request_id, request.headers
    if suffix:
        name = f"{name[:112]}-{suffix}"
        headers = b"x-request-id: %b\r\n%b" % (name.encode(), headers.partition(b"\r\n")[2])
    line = None if request.demand.offline is None else short_line([request.demand])
    demand = replace(request.demand, prompt_tokens=tokens, sequences=sequences, size_bytes=len(body), offline=line)
    return InferenceRequest(
        request.endpoint,
        request.kind,
        method=request.method,
        target=request.target,
        demand=demand,
        request_id=name,
        body=body,
        headers=headers,
    )


def _read(value: Any) -> tuple[list[str] | list[list[int]], bool, list[int]] | None:
    """The inputs as a list, whether they are token ids, and the size of each; None = mixed or unknown types."""
    if type(value) is str:
        return [value], False, [text_bytes(value)]
    if type(value) is not list or not value:
        return None
    if type(value[0]) is int:  # one list of token ids
        value = [value]
    if len(value) > MOST_INPUTS:
        return None
    kinds = set(map(type, value))
    if kinds == {str}:
        return value, False, list(map(text_bytes, value))
    if kinds != {list} or sum(map(len, value)) > _MOST_IDS:
        return None
    if all(set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << 31 for ids in value):
        return value, True, [_ID_BYTES * len(each) for each in value]
    return None


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the weights (largest remainders)."""
    whole = sum(weights, 0.0)
    if not whole:
        weights, whole = [1.0] * len(weights), float(len(weights))
    exact = [total * weight / whole for weight in weights]
    parts = [int(each) for each in exact]
    rests = [part - each for part, each in zip(parts, exact, strict=True)]
    for number in sorted(range(len(parts)), key=rests.__getitem__)[: total - sum(parts)]:
        parts[number] += 1
    return parts


_SHORT_BYTES = 1048576  # parsed within 25 ms, whatever it holds


def parse_answer(body: bytes, most: Mapping[bytes, int]) -> Any:
    """Raises WrongAnswer for invalid JSON, and for a long document with more of a mark than `most` has."""
    for mark, count in most.items() if len(body) > _SHORT_BYTES else ():
        if body.count(mark) > count:
            raise WrongAnswer(f"The backend's response contains over {count} {mark.decode()!r}: more than requested.")
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


_ID, _TOKENS, _LIST = b"\0", b"\1", b"\2"  # placeholders for these; JSON never contains them elsewhere


class AnswerForm:
    """An answer without the parts that differ among the clients of a batch; encoded as JSON once for all of them."""

    def __init__(self, document: dict[str, Any], list_name: str) -> None:
        self.document = document
        self._list_name = list_name
        self._written = b""

    def around(self, request_id: str, tokens: int) -> tuple[bytes, bytes]:
        """The answer to one client before the entries of its list, and after them."""
        if not self._written:
            document, number = self.document, orjson.Fragment(_TOKENS)
            usage = {**document["usage"], "prompt_tokens": number, "total_tokens": number}
            own = {"id": orjson.Fragment(_ID), "usage": usage, self._list_name: orjson.Fragment(b"[%b]" % _LIST)}
            self._written = orjson.dumps({"id": None, **document} | own)
        answer = self._written.replace(_TOKENS, b"%d" % tokens).replace(_ID, orjson.dumps(request_id))
        before, _, after = answer.partition(_LIST)
        return before, after

    def under(self, alias: str) -> "AnswerForm":
        """For a client that used another name for the model; empty = it did not."""
        document = self.document
        renamed = alias and "model" in document
        return AnswerForm({**document, "model": alias}, self._list_name) if renamed else self


_PIECE_BYTES = 131072
_FLOAT_BYTES, _BASE64_BYTES = 21, 6  # of one number
_MOST_BYTES = 16777216  # of the answer to a batch: parsed within 50 ms
_MOST_NUMBERS = 500_000  # of vectors that came as lists of numbers
_ITEM_BYTES = 524288
_REST_BYTES = 1048576


@dataclass(slots=True)
class Vectors:
    """The answer to a batch or a request: one entry of `data` for each input, in the order of the inputs."""

    form: AnswerForm
    data: list[dict[str, Any]]
    prompt_tokens: int
    exact: bool = True  # the tokens are this request's own, not its share of a batch's


def most_vector_bytes(items: int) -> int:
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
    return Vectors(AnswerForm(document, "data"), data, prompt_tokens_of(document))


def vector_pieces(request_id: str, vectors: Vectors, *, floats: bool) -> Iterator[bytes]:
    """The answer to one client, as the backend would have written it, in pieces of some 100 KB. Raises WrongAnswer."""
    data, form = vectors.data, as_floats if floats else as_base64
    before, after = vectors.form.around(f"embd-{request_id}", vectors.prompt_tokens)
    yield before
    step = max(1, _PIECE_BYTES // size_of(data[:1], floats=floats))
    for start in range(0, len(data), step):
        entries = enumerate(data[start : start + step], start)
        part = [{**entry, "index": index, "embedding": form(entry["embedding"])} for index, entry in entries]
        yield (b"," if start else b"") + orjson.dumps(part)[1:-1]
    yield after


def size_of(data: list[dict[str, Any]], *, floats: bool) -> int:
    """The approximate size of the answer to one client, in bytes."""
    vector = data[0]["embedding"]
    count = len(vector) * 3 // 16 if type(vector) is str else len(vector)
    return len(data) * max(1, count * (_FLOAT_BYTES if floats else _BASE64_BYTES))


_PAIR_FIELDS = _COMMON | {
    **dict.fromkeys(("user", "padding", "instruction"), str),
    **dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc"), int),
    "chat_template_kwargs": dict,
    "return_documents": bool,
}
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
    fields = common_fields(document, _PAIR_FIELDS, (*names, "top_n") if ranks else names)
    if fields is None:
        return None
    partners = list(map(text_bytes, [queries] if type(queries) is str else queries))
    if len(partners) == 1:
        partners *= len(documents)  # measured once: a client chooses the length of both
    sizes = [a + b for a, b in zip(partners, map(text_bytes, documents), strict=True)]
    return Pairs(
        names,
        queries,
        documents=documents,
        sizes_bytes=sizes,
        fields=fields | {"model": model},
        ranks=ranks,
        top_n=top_n,
    )


def pairs_body(pairs: Pairs, part: range) -> bytes:
    """The body for these documents alone. A document not in the top n of a part is not in the top n of all."""
    queries = pairs.queries if pairs.share_query else pairs.queries[part.start : part.stop]
    asked = pairs.fields | dict(zip(pairs.names, (queries, pairs.documents[part.start : part.stop]), strict=True))
    wanted = wanted_of(pairs, len(part))
    return orjson.dumps(asked if wanted == len(part) else asked | {"top_n": wanted})


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
    """How a model reads several documents to score them."""

    PAIRS = "pairs"  # query and document together, for each document: cross-encoders
    QUERY_ONCE = "query_once"  # the query once, and each document: embeddings that are compared afterwards
    UNKNOWN = "unknown"  # perhaps all documents in one prompt, where each one's score depends on the others

    @classmethod
    def of(cls, once_tokens: int, twice_tokens: int) -> "Counting":
        """The result of two probes, by their numbers of tokens."""
        if twice_tokens == 2 * once_tokens:
            return cls.PAIRS
        return cls.QUERY_ONCE if 2 * twice_tokens == 3 * once_tokens else cls.UNKNOWN


def probes(model: str, pairs: Pairs) -> list[bytes]:
    """Bodies that score a text against itself, once and twice, in the form that these pairs have."""
    query, documents = pairs.names
    return [orjson.dumps({"model": model, query: "x", documents: ["x"] * count}) for count in (1, 2)]


_LIST_AND_SCORE = {True: ("results", "relevance_score"), False: ("data", "score")}  # by whether documents are ranked
_ENTRIES_AT_ONCE = 64
_MOST_SCORE_BYTES = 33554432  # of the answer to a piece
_ENTRY_BYTES = 4096  # of an entry, besides the document in it
_ESCAPED = 6  # times the bytes of a text, at most, when JSON escapes it


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some documents, with the order and indexes of the client's answer."""

    form: AnswerForm
    entries: list[dict[str, Any]]
    prompt_tokens: int
    _: KW_ONLY
    size_bytes: int


def most_score_bytes(documents: int, size_bytes: int) -> int:
    """The maximum size of an answer to these documents, which it may repeat."""
    return min(_MOST_SCORE_BYTES, _REST_BYTES + documents * _ENTRY_BYTES + _ESCAPED * size_bytes)


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
    form = AnswerForm({**document, list_name: None}, list_name)
    return Scores(form, given, tokens, size_bytes=len(body))


def tokens_in(body: bytes) -> int:
    """The tokens that an answer to one pair reports. Raises WrongAnswer."""
    return prompt_tokens_of(parse_answer(body, {b"{": 64, b"[": 64, b",": 1024}))


def score_pieces(request_id: str, pairs: Pairs, parts: list[Scores], tokens: int) -> Iterator[bytes]:
    """The answer as one backend would have written it. `parts` are in the order of the documents."""
    _, score_name = _LIST_AND_SCORE[pairs.ranks]
    entries = list(chain.from_iterable(part.entries for part in parts))
    if pairs.ranks:
        entries.sort(key=lambda entry: -entry[score_name])  # stable, as in vLLM: equal scores stay in order
        del entries[wanted_of(pairs, len(entries)) :]
    before, after = parts[0].form.around(f"score-{request_id}", tokens)
    yield before
    for start in range(0, len(entries), _ENTRIES_AT_ONCE):
        yield (b"," if start else b"") + orjson.dumps(entries[start : start + _ENTRIES_AT_ONCE])[1:-1]
    yield after
