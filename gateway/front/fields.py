"""Top-level fields of JSON requests that are acted on, and those that are refused. All others are passed on.

docs/fields.md has the verdict on every field of vLLM's request models. A field that addresses the inside of an engine,
or makes it act for another client, is refused. Form fields of audio uploads are not judged: uploads are passed on
while they arrive.
"""

from typing import Any

from gateway.errors import InvalidRequest

# A second one of these at the top level is refused: it could mean another thing to the backend.
ACTED_ON = {
    "model": "selects the backends; aliases are replaced",
    "messages": "prompt, for routing and length estimates",
    "prompt": "prompt, for routing and length estimates",
    "input": "prompt, or inputs to embed",
    "system": "part of the prompt",
    "instructions": "part of the prompt",
    "tools": "part of the prompt",
    "stream": "whether the response is streamed",
    "stream_options": "include_usage is added to streams without it",
    "n": "number of sequences",
    "best_of": "number of sequences",
    "previous_input_messages": "responses: part of the prompt",
    "max_tokens": "limit of output tokens",
    "max_completion_tokens": "limit of output tokens",
    "max_output_tokens": "limit of output tokens",
    "cache_salt": "part of the routing key; replaced for keys with isolate_cache",
    "prompt_cache_key": "session affinity to a backend",
    "previous_response_id": "selects the backend that stores the response, if the client owns it",
    "store": "stored responses are not retried",
    "background": "stored responses are not retried",
    "vllm_xargs": "refused if it contains a refused field; otherwise passed on",
    "documents": "rerank and score: documents to score, in pieces; chat: part of the prompt",
    "query": "input to score",
    "queries": "input to score",
    "items": "input to score",
    "text_1": "input to score",
    "text_2": "input to score",
    "data_1": "input to score",
    "data_2": "input to score",
    "top_n": "rerank in pieces: applied to the merged result",
}

REFUSED = {
    "request_id": "it could address another client's stored response; send the header X-Request-Id instead",
    "kv_transfer_params": "it makes the engine use other token ids than the prompt's and connect to any address",
    "ec_transfer_params": "like kv_transfer_params, for encoder caches",
    "prompt_embeds": "the engine would load a pickled tensor",
    "logits_processors": "the engine would run code by name",
    "api_base": "it makes a proxy behind the gateway use other credentials or addresses",
    "api_key": "it makes a proxy behind the gateway use other credentials or addresses",
    "base_url": "it makes a proxy behind the gateway use other credentials or addresses",
    "extra_headers": "it makes a proxy behind the gateway use other credentials or addresses",
    "user_config": "it makes a proxy behind the gateway use other credentials or addresses",
    "rid": "SGLang: like request_id",
    "bootstrap_host": "SGLang: address from which the engine fetches KV cache",
    "bootstrap_port": "SGLang: address from which the engine fetches KV cache",
    "bootstrap_room": "SGLang: KV cache that the engine fetches",
    "custom_logit_processor": "SGLang: the engine would run pickled code",
    "input_embeds": "SGLang: replaces the prompt",
    "disaggregated_params": "TensorRT-LLM: like kv_transfer_params",
}

_REFUSED = frozenset(REFUSED)


def refuse_fields(document: dict[str, Any]) -> None:
    """Raises InvalidRequest for a field that is refused, at the top level or in `vllm_xargs`."""
    if not _REFUSED.isdisjoint(document):
        _refuse(document)
    xargs = document.get("vllm_xargs")
    if type(xargs) is dict and not _REFUSED.isdisjoint(xargs):
        _refuse(xargs)


def _refuse(fields: dict[str, Any]) -> None:
    name = min(_REFUSED.intersection(fields))
    raise InvalidRequest(f"Unsupported field {name!r}: {REFUSED[name]}.", param=name)
