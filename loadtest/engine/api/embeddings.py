"""POST /v1/embeddings, /pooling and /classify."""

from base64 import b64encode
from typing import Any

from aiohttp import web

from loadtest.engine.api.errors import ApiError, invalid
from loadtest.engine.api.exchange import Body, json_answer, read_json
from loadtest.engine.api.pooling import pool, pooling_usage, read_inputs
from loadtest.engine.ledger import Entry
from loadtest.engine.service import Service
from loadtest.engine.tokens import TokenisedText
from loadtest.engine.vectors import unit_vector


async def embeddings(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    return await _vectors(service, request, entry, "embd", "embedding", "embedding")


async def pooling(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    """The same vectors, in the shape of the pooling endpoint."""
    return await _vectors(service, request, entry, "pool", "pooling", "data")


async def _vectors(
    service: Service, request: web.BaseRequest, entry: Entry, prefix: str, kind: str, field: str
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
    prompts, tokens = await pool(service, request, entry, body, inputs)
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


async def classify(service: Service, request: web.BaseRequest, entry: Entry) -> web.StreamResponse:
    """One of two labels for each input."""
    body = await read_json(request)
    prompts, tokens = await pool(service, request, entry, body, read_inputs(body))
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
