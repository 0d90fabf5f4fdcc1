"""POST /score and /rerank, and their versioned names."""

from typing import Any

from aiohttp import web

from loadtest.engine.api.errors import ApiError, invalid
from loadtest.engine.api.exchange import Body, json_answer, read_json
from loadtest.engine.api.pooling import pool, pooling_usage
from loadtest.engine.ledger import Entry
from loadtest.engine.service import Service
from loadtest.engine.tokens import tokenise
from loadtest.engine.vectors import similarity, unit_vector

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def score(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    body = await read_json(request)
    left, right = _read_pairs(body)
    scores, tokens = await _scores(service, request, entry, body, left, right)
    return json_answer(
        {
            "id": f"score-{entry.request_id}",
            "object": "list",
            "created": service.created(),
            "model": entry.model,
            "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
            "usage": pooling_usage(tokens),
        }
    )


async def rerank(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    body = await read_json(request)
    query, documents = _texts(body, "query"), _texts(body, "documents")
    top = body.get("top_n") or len(documents)
    scores, tokens = await _scores(service, request, entry, body, query, documents)
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[:top]
    results = [
        {
            "index": index,
            "document": {"text": documents[index], "multi_modal": None},
            "relevance_score": scores[index],
        }
        for index in order
    ]
    return json_answer(
        {
            "id": f"score-{entry.request_id}",
            "model": entry.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
        }
    )


async def _scores(
    service: Service, request: web.BaseRequest, entry: Entry, body: Body, left: list[str], right: list[str]
) -> tuple[list[float], int]:
    """A score in 0..1 for each text on the right, against its partner on the left."""
    texts = [*left, *right]
    prompts, tokens = await pool(service, request, entry, body, [(tokenise(text), text) for text in texts])
    vectors = [unit_vector(prompt.tokens.packed, service.config.embedding_dimensions) for prompt in prompts]
    partners = vectors[: len(left)] * (len(right) if len(left) == 1 else 1)
    pairs = zip(partners, vectors[len(left) :], strict=True)
    return [(1 + similarity(one, other)) / 2 for one, other in pairs], tokens


def _read_pairs(body: Body) -> tuple[list[str], list[str]]:
    for first, second in _PAIRS:
        if first in body and second in body:
            left, right = _texts(body, first), _texts(body, second)
            if len(left) not in (1, len(right)):
                raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N")
            return left, right
    raise invalid("body.queries", "missing", "Field required", body)


def _texts(body: Body, field: str) -> list[str]:
    value: Any = body.get(field)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    if value is None:
        raise invalid(f"body.{field}", "missing", "Field required", body)
    raise invalid(f"body.{field}", "string_type", "Input should be a valid string", value)
