"""What vLLM answers to rerank and score requests, for the kinds of models that it scores with."""

import hashlib
from typing import Any

import orjson

BAD = "bad"  # a text that engines refuse
_NAMES = (("query", "documents"), ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))


def score(query: str, document: str) -> float:
    """Coarse, so that there are ties."""
    return hashlib.sha256(f"{query} {document}".encode()).digest()[0] % 5 / 7


def tokens(text: str) -> int:
    """What a text counts as by itself: two are special."""
    return 2 + len(text.split())


def texts_of(body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Queries and documents."""
    one, other = next(pair for pair in _NAMES if pair[0] in body and pair[1] in body)
    both = [given if isinstance(given, list) else [given] for given in (body[one], body[other])]
    return both[0], both[1]


def answer(body: dict[str, Any], name: str, kind: str) -> tuple[int, bytes]:
    """Status and body. `kind` is `bi`, `cross` or `listwise`."""
    queries, documents = texts_of(body)
    if BAD in documents:
        return 400, orjson.dumps({"error": {"message": f"bad among {len(documents)}", "code": 400}})
    partners = queries * len(documents) if len(queries) == 1 else queries
    if kind == "listwise":  # what else is there changes every score
        scores = [score(query, document) / len(documents) for query, document in zip(partners, documents, strict=True)]
        total = 100 + sum(map(tokens, [*queries, *documents]))
    else:
        scores = [score(query, document) for query, document in zip(partners, documents, strict=True)]
        counted = [*partners, *documents] if kind == "cross" else [*queries, *documents]
        total = sum(map(tokens, counted))
    usage = {"prompt_tokens": total, "total_tokens": total}
    if "query" not in body:
        data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
        details = {"completion_tokens": 0, "prompt_tokens_details": None}
        head = {"id": f"score-{name}", "object": "list", "created": 1, "model": "m"}
        return 200, orjson.dumps(head | {"data": data, "usage": usage | details})
    results = [
        {"index": index, "document": {"text": document, "multi_modal": None}, "relevance_score": each}
        for index, (document, each) in enumerate(zip(documents, scores, strict=True))
    ]
    results.sort(key=lambda entry: entry["relevance_score"], reverse=True)
    results = results[: body.get("top_n") or len(results)]
    return 200, orjson.dumps({"id": f"score-{name}", "model": "m", "usage": usage, "results": results})
