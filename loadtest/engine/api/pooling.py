"""The pooling endpoints: embeddings, pooling, classification, scores and reranks."""

import hashlib
import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from math import hypot
from typing import Any

from aiohttp import web

from loadtest.engine.api.errors import ApiError, invalid
from loadtest.engine.api.exchange import Body, json_answer, read_json, read_messages, tokens_and_text
from loadtest.engine.choice import Choice, PreparedPrompt, Prose
from loadtest.engine.generation import Generation
from loadtest.engine.kv_cache import SequenceState
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.service import Service
from loadtest.engine.tokens import TokenisedText, render_chat, tokenise


async def pool(
    service: Service,
    request: web.BaseRequest,
    entry: LedgerEntry,
    body: Body,
    texts: Sequence[tuple[TokenisedText, str]],
) -> tuple[list[PreparedPrompt], int]:
    """Run the inputs as one sequence each; the prompts and the number of their tokens."""
    model = service.check_model(body.get("model"), with_aliases=False)
    prompts = [service.prompt(tokens, text, model, body.get("cache_salt") or "") for tokens, text in texts]
    service.check_admission(len(prompts))
    _spend(service.config.api_request_seconds + len(prompts) * service.config.api_input_seconds)
    entry.note(service.request_id(request), model, (prompt.nonce for prompt in prompts))
    choices = [_pooled(service, index, prompt) for index, prompt in enumerate(prompts)]
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
        return prompts, generation.prompt_tokens


def _spend(cpu_seconds: float) -> None:
    """Compute for so long, as an API server does that has one thread for all: meanwhile nothing else is done."""
    until = time.thread_time() + cpu_seconds
    while cpu_seconds and time.thread_time() < until:
        pass


def _pooled(service: Service, index: int, prompt: PreparedPrompt) -> Choice:
    """A sequence that ends with its prefill; pooling models keep no prefix cache."""
    sequence = SequenceState(service.engine.new_id(), max(prompt.tokens.num_tokens, 1), 0)
    return Choice(index, prompt=prompt.tokens, prose=Prose(prompt.seed), sequence=sequence, finish_reason="stop")


def read_inputs(body: Body, field: str = "input") -> list[tuple[TokenisedText, str]]:
    """The inputs: a text, texts, token ids, lists of token ids, or a chat."""
    value = body.get(field)
    if value is None:
        if body.get("messages") is not None:
            text = render_chat(read_messages(body), add_generation_prompt=False)
            return [(tokenise(text), text)]
        raise invalid(f"body.{field}", "missing", "Field required", body)
    if isinstance(value, str):
        return [(tokenise(value), value)]
    if not isinstance(value, list) or not value:
        raise invalid(f"body.{field}", "list_type", "Input should be a valid list", value)
    if isinstance(value[0], int):
        return [tokens_and_text(value)]
    if all(isinstance(item, str) for item in value):
        return [(tokenise(item), item) for item in value]
    if all(isinstance(item, list) for item in value):
        return [tokens_and_text(item) for item in value]
    raise invalid(f"body.{field}.0", "int_parsing", "Input should be a valid integer", value)


def pooling_usage(prompt_tokens: int) -> dict[str, Any]:
    """The `usage` object of a pooling answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def unit_vector(packed_tokens: bytes, dimensions: int) -> "array[float]":
    """A vector of length 1, in 32-bit floats; equal tokens give equal vectors."""
    raw = array("h", hashlib.shake_128(packed_tokens).digest(2 * dimensions)).tolist()
    length = hypot(*raw) or 1.0
    return array("f", [value / length for value in raw])


def similarity(left: "array[float]", right: "array[float]") -> float:
    """The cosine of the angle between two unit vectors."""
    return sum(a * b for a, b in zip(left, right, strict=True))


async def embeddings(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    return await _vectors(service, request, entry=entry, prefix="embd", kind="embedding", field="embedding")


async def pooling(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """The same vectors, in the shape of the pooling endpoint."""
    return await _vectors(service, request, entry=entry, prefix="pool", kind="pooling", field="data")


async def embed(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """The same vectors, in the shape of Cohere's endpoint; texts only."""
    body = await read_json(request)
    texts = body.get("texts")
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise ApiError(400, "Exactly one of texts, images, or inputs must be provided, and it must be non-empty")
    service.check_model(body.get("model"), with_aliases=False)
    prompts, tokens = await pool(service, request, entry, body=body, texts=[(tokenise(each), each) for each in texts])
    return json_answer(
        {
            "id": f"embd-{entry.request_id}",
            "embeddings": {"float": [_vector(service, prompt.tokens, False) for prompt in prompts]},
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
            "response_type": "embeddings_by_type",
        }
    )


async def _vectors(
    service: Service, request: web.BaseRequest, entry: LedgerEntry, prefix: str, kind: str, field: str
) -> web.StreamResponse:
    body = await read_json(request)
    inputs = read_inputs(body)
    base64 = _wants_base64(body)
    model = service.check_model(body.get("model"), with_aliases=False)
    if body.get("dimensions") is not None:
        raise ApiError(
            400,
            f"Model '{model}' does not support Matryoshka embeddings; "
            f"dimensions must be unset (received dimensions={body['dimensions']}).",
        )
    prompts, tokens = await pool(service, request, entry, body=body, texts=inputs)
    data = [
        {"index": index, "object": kind, field: _vector(service, prompt.tokens, base64)}
        for index, prompt in enumerate(prompts)
    ]
    return json_answer(
        {
            "id": f"{prefix}-{entry.request_id}",
            "object": "list",
            "created": service.created(),
            "model": model,
            "data": data,
            "usage": pooling_usage(tokens),
        }
    )


def _wants_base64(body: Body) -> bool:
    wanted = body.get("encoding_format") or "float"
    if wanted not in ("float", "base64"):
        text = "Input should be 'float', 'base64', 'bytes' or 'bytes_only'"
        raise invalid("body.encoding_format", "literal_error", text, wanted)
    return bool(wanted == "base64")


def _vector(service: Service, tokens: TokenisedText, base64: bool) -> list[float] | str:
    vector = unit_vector(tokens.packed, service.config.embedding_dimensions)
    return b64encode(vector.tobytes()).decode() if base64 else vector.tolist()


async def classify(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """One of two labels for each input."""
    body = await read_json(request)
    prompts, tokens = await pool(service, request, entry, body=body, texts=read_inputs(body))
    data: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        first = (prompt.seed & 0xFFFF) / 0xFFFF
        label = f"LABEL_{int(first < 0.5)}"
        data.append({"index": index, "label": label, "probs": [first, 1 - first], "num_classes": 2})
    return json_answer(
        {
            "id": f"classify-{entry.request_id}",
            "object": "list",
            "created": service.created(),
            "model": entry.model,
            "data": data,
            "usage": pooling_usage(tokens),
        }
    )


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def score(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    body = await read_json(request)
    left, right = _read_pairs(body)
    scores, tokens = await _scores(service, request, entry=entry, body=body, left=left, right=right)
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


async def rerank(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    body = await read_json(request)
    query, documents = _texts(body, "query"), _texts(body, "documents")
    top = body.get("top_n") or len(documents)
    scores, tokens = await _scores(service, request, entry=entry, body=body, left=query, right=documents)
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[:top]
    results = [
        {"index": index, "document": {"text": documents[index], "multi_modal": None}, "relevance_score": scores[index]}
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
    service: Service, request: web.BaseRequest, entry: LedgerEntry, body: Body, left: list[str], right: list[str]
) -> tuple[list[float], int]:
    """A score in 0..1 for each text on the right, against its partner on the left."""
    texts = [*left, *right]
    prompts, tokens = await pool(service, request, entry, body=body, texts=[(tokenise(text), text) for text in texts])
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
