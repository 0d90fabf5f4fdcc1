"""Top-level fields of JSON requests that are acted on, and those that are refused. All others are passed on.

docs/fields.md has the verdict on every field of vLLM's request models. A field that addresses the inside of an engine,
or makes it act for another client, is refused. Form fields of audio uploads are not judged: uploads are passed on
while they arrive.
"""

from typing import Any

from gateway.errors import InvalidRequest

# A second one of these at the top level is refused: it could mean another thing to the backend.
ACTED_ON = {
    "model": "chooses the backends; an alias is replaced",
    "messages": "the prompt, for routing and its length",
    "prompt": "the prompt, for routing and its length",
    "input": "the prompt, or what is embedded",
    "system": "part of the prompt",
    "instructions": "part of the prompt",
    "tools": "part of the prompt",
    "stream": "how the answer is passed on",
    "stream_options": "usage is asked for where a stream has none",
    "n": "sequences that the request takes",
    "best_of": "sequences that the request takes",
    "previous_input_messages": "responses: part of the prompt",
    "max_tokens": "length of the answer",
    "max_completion_tokens": "length of the answer",
    "max_output_tokens": "length of the answer",
    "cache_salt": "part of the routing key; replaced for keys with isolate_cache",
    "prompt_cache_key": "keeps a session on its backend",
    "previous_response_id": "chooses the backend that stores the response, if it is the client's own",
    "store": "a stored response is not tried again",
    "background": "a stored response is not tried again",
    "vllm_xargs": "refused if it names what is refused as a field; else passed on",
    "documents": "rerank and score: what is scored, in parts; chat: part of the prompt",
    "query": "what is scored",
    "queries": "what is scored",
    "items": "what is scored",
    "text_1": "what is scored",
    "text_2": "what is scored",
    "data_1": "what is scored",
    "data_2": "what is scored",
    "top_n": "rerank in parts: the best of all parts",
}

REFUSED = {
    "request_id": "names a stored response, also one of another client; send the header X-Request-Id",
    "kv_transfer_params": "makes an engine compute other token ids than the prompt's, and connect where it says",
    "ec_transfer_params": "the same for encoder caches",
    "prompt_embeds": "a pickled tensor for the engine to load",
    "logits_processors": "code of the engine by name",
    "api_base": "makes a proxy behind this one act for somebody else",
    "api_key": "makes a proxy behind this one act for somebody else",
    "base_url": "makes a proxy behind this one act for somebody else",
    "extra_headers": "makes a proxy behind this one act for somebody else",
    "user_config": "makes a proxy behind this one act for somebody else",
    "rid": "SGLang: request_id",
    "bootstrap_host": "SGLang: where an engine fetches KV cache from",
    "bootstrap_port": "SGLang: where an engine fetches KV cache from",
    "bootstrap_room": "SGLang: which KV cache an engine fetches",
    "custom_logit_processor": "SGLang: pickled code",
    "input_embeds": "SGLang: instead of a prompt",
    "disaggregated_params": "TensorRT-LLM: kv_transfer_params",
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
    raise InvalidRequest(f"The field {name!r} is not accepted here: {REFUSED[name]}.", param=name)
