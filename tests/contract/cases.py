"""The requests whose answers are recorded from a real engine and compared with the simulated one's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
EMBEDDING_MODEL = "minilm"
CONTEXT_TOKENS = 8192  # of the model `tiny`

MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name three colours."}]
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
COMPLETION = {"model": MODEL, "prompt": "def read(self, size=-1):", "max_tokens": 6, "temperature": 0}
LONG_PROMPT = "import sys\n" * 64  # several prefix blocks
TOO_LONG_PROMPT = "import sys\n" * CONTEXT_TOKENS
ALMOST_TOO_LONG = [{"role": "user", "content": "import sys\n" * 2720}]
TO_THE_END = {**CHAT, "messages": ALMOST_TOO_LONG, "max_tokens": CONTEXT_TOKENS, "ignore_eos": True}
EMBEDDING = {"model": EMBEDDING_MODEL, "input": ["the cat sat", "on the mat"]}


@dataclass(frozen=True)
class Case:
    """One request to one kind of engine; `raw` replaces the JSON body where it must be malformed."""

    name: str
    path: str
    body: Mapping[str, Any] | None = None
    method: str = "POST"
    raw: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    engine: str = "chat"  # or "embedding", "strict" (API key, one queued request)
    streams: bool = False

    def payload(self) -> bytes | None:
        """The body's bytes."""
        if self.raw is not None:
            return self.raw.encode()
        return None if self.body is None else json.dumps(self.body).encode()


def get(name: str, path: str, engine: str = "chat") -> Case:
    """A request without a body."""
    return Case(name, path, method="GET", engine=engine)


def stream(name: str, path: str, body: Mapping[str, Any], **options: Any) -> Case:
    """A streamed request; options become `stream_options`."""
    extra = {"stream_options": options} if options else {}
    return Case(name, path, {**body, "stream": True, **extra}, streams=True)


CHAT_PATH, COMPLETION_PATH, EMBEDDING_PATH = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSE = {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 6, "temperature": 0}
MESSAGE = {"model": MODEL, "messages": MESSAGES[1:], "system": "You are terse.", "max_tokens": 6, "temperature": 0}

CONTROL = (
    get("health", "/health"),
    get("ping", "/ping"),
    get("version", "/version"),
    get("load", "/load"),
    get("models", "/v1/models"),
    get("kv_event_sources", "/kv_event_sources"),
    get("server_info_hidden", "/server_info"),
)

CHATS = (
    Case("chat", CHAT_PATH, CHAT),
    Case("chat_request_id", CHAT_PATH, CHAT, headers={"X-Request-Id": "abc-123"}),
    Case("chat_two_choices", CHAT_PATH, {**CHAT, "n": 2, "temperature": 1, "seed": 7}),
    Case("chat_logprobs", CHAT_PATH, {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    Case("chat_token_ids", CHAT_PATH, {**CHAT, "return_token_ids": True}),
    Case("chat_long_cold", CHAT_PATH, {**CHAT, "messages": [{"role": "user", "content": LONG_PROMPT}]}),
    Case("chat_long_cached", CHAT_PATH, {**CHAT, "messages": [{"role": "user", "content": LONG_PROMPT}]}),
    Case("chat_priority_ignored", CHAT_PATH, {**CHAT, "priority": 1}),
    Case("chat_max_tokens_lowered", CHAT_PATH, TO_THE_END),
    stream("chat_stream", CHAT_PATH, CHAT),
    stream("chat_stream_usage", CHAT_PATH, CHAT, include_usage=True),
    stream("chat_stream_continuous_usage", CHAT_PATH, CHAT, include_usage=True, continuous_usage_stats=True),
    stream("chat_stream_two_choices", CHAT_PATH, {**CHAT, "n": 2, "temperature": 1, "seed": 7}, include_usage=True),
    stream("chat_stream_token_ids", CHAT_PATH, {**CHAT, "return_token_ids": True}),
)

COMPLETIONS = (
    Case("completion", COMPLETION_PATH, COMPLETION),
    Case("completion_two_prompts", COMPLETION_PATH, {**COMPLETION, "prompt": ["one", "two"]}),
    Case("completion_token_prompt", COMPLETION_PATH, {**COMPLETION, "prompt": [300, 301, 302, 303]}),
    Case("completion_logprobs", COMPLETION_PATH, {**COMPLETION, "max_tokens": 2, "logprobs": 2}),
    stream("completion_stream", COMPLETION_PATH, COMPLETION),
    stream("completion_stream_usage", COMPLETION_PATH, COMPLETION, include_usage=True),
    stream("completion_stream_continuous_usage", COMPLETION_PATH, COMPLETION, continuous_usage_stats=True),
    stream(
        "completion_stream_two_prompts", COMPLETION_PATH, {**COMPLETION, "prompt": ["one", "two"]}, include_usage=True
    ),
)

OTHERS = (
    Case("tokenize", "/tokenize", {"model": MODEL, "prompt": "def read(self):"}),
    Case("tokenize_chat", "/tokenize", {"model": MODEL, "messages": MESSAGES}),
    Case("detokenize", "/detokenize", {"model": MODEL, "tokens": [300, 301, 302]}),
    Case("response", "/v1/responses", RESPONSE),
    Case("response_stream", "/v1/responses", {**RESPONSE, "stream": True}, streams=True),
    get("response_not_stored", "/v1/responses/resp_unknown"),
    Case("message", "/v1/messages", MESSAGE),
    Case("message_stream", "/v1/messages", {**MESSAGE, "stream": True}, streams=True),
    Case("message_count_tokens", "/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES[1:]}),
)

ERRORS = (
    Case("error_chat_unknown_model", CHAT_PATH, {**CHAT, "model": "absent"}),
    Case("error_completion_unknown_model", COMPLETION_PATH, {**COMPLETION, "model": "absent"}),
    Case("error_response_unknown_model", "/v1/responses", {**RESPONSE, "model": "absent"}),
    Case("error_message_unknown_model", "/v1/messages", {**MESSAGE, "model": "absent"}),
    Case("error_tokenize_unknown_model", "/tokenize", {"model": "absent", "prompt": "a"}),
    Case("error_chat_too_long", CHAT_PATH, {**CHAT, "messages": [{"role": "user", "content": TOO_LONG_PROMPT}]}),
    Case("error_completion_too_long", COMPLETION_PATH, {**COMPLETION, "prompt": TOO_LONG_PROMPT}),
    stream(
        "error_chat_stream_too_long", CHAT_PATH, {**CHAT, "messages": [{"role": "user", "content": TOO_LONG_PROMPT}]}
    ),
    Case("error_bad_json", CHAT_PATH, raw='{"model": "tiny", '),
    Case("error_body_not_an_object", CHAT_PATH, raw="[1, 2]"),
    Case("error_empty_body", CHAT_PATH, raw=""),
    Case("error_wrong_content_type", CHAT_PATH, CHAT, headers={"Content-Type": "text/plain"}),
    Case("error_bad_field_type", CHAT_PATH, {**CHAT, "temperature": "hot"}),
    Case("error_bad_field_value", CHAT_PATH, {**CHAT, "top_p": 7}),
    Case("error_missing_messages", CHAT_PATH, {"model": MODEL}),
    Case("error_no_messages", CHAT_PATH, {**CHAT, "messages": []}),
    Case("error_n_too_large", CHAT_PATH, {**CHAT, "n": 20_000, "temperature": 1}),
    Case("error_empty_cache_salt", CHAT_PATH, {**CHAT, "cache_salt": ""}),
    Case("error_stream_options_without_stream", CHAT_PATH, {**CHAT, "stream_options": {"include_usage": True}}),
    Case("error_unknown_route", "/v1/absent", CHAT),
    Case("error_embeddings_on_a_chat_model", EMBEDDING_PATH, {"model": MODEL, "input": "a"}),
    get("error_wrong_method", CHAT_PATH),
)

EMBEDDINGS = tuple(
    Case(name, path, body, engine="embedding", method="GET" if body is None else "POST")
    for name, path, body in (
        ("embedding", EMBEDDING_PATH, EMBEDDING),
        ("embedding_one_string", EMBEDDING_PATH, {**EMBEDDING, "input": "the cat sat"}),
        ("embedding_base64", EMBEDDING_PATH, {**EMBEDDING, "encoding_format": "base64"}),
        ("embedding_token_ids", EMBEDDING_PATH, {**EMBEDDING, "input": [[101, 1996, 4937, 102], [101, 2006, 102]]}),
        ("embedding_models", "/v1/models", None),
        ("embedding_kv_event_sources", "/kv_event_sources", None),
        ("embedding_tokenize", "/tokenize", {"model": EMBEDDING_MODEL, "prompt": "the cat sat"}),
        ("embedding_score", "/score", {"model": EMBEDDING_MODEL, "text_1": "a cat", "text_2": ["a dog", "a mat"]}),
        ("embedding_rerank", "/rerank", {"model": EMBEDDING_MODEL, "query": "a cat", "documents": ["a dog", "a mat"]}),
        ("error_embedding_unknown_model", EMBEDDING_PATH, {**EMBEDDING, "model": "absent"}),
        ("error_embedding_too_long", EMBEDDING_PATH, {**EMBEDDING, "input": ["fine", "far too long " * 256]}),
        ("error_embedding_missing_input", EMBEDDING_PATH, {"model": EMBEDDING_MODEL}),
        ("error_embedding_dimensions", EMBEDDING_PATH, {**EMBEDDING, "dimensions": 8}),
        ("error_embedding_mixed_input", EMBEDDING_PATH, {**EMBEDDING, "input": ["a", [101, 102]]}),
        ("error_chat_on_an_embedding_model", CHAT_PATH, {**CHAT, "model": EMBEDDING_MODEL}),
    )
)

KEYED = {"Authorization": "Bearer secret"}
STRICT = (
    Case("strict_no_key", CHAT_PATH, CHAT, engine="strict"),
    Case("strict_wrong_key", CHAT_PATH, CHAT, engine="strict", headers={"Authorization": "Bearer guess"}),
    Case("strict_right_key", CHAT_PATH, CHAT, engine="strict", headers={**KEYED, "X-Request-Id": "abc-123"}),
    get("strict_models_no_key", "/v1/models", engine="strict"),
    get("strict_version_no_key", "/version", engine="strict"),
    Case("strict_message_no_key", "/v1/messages", MESSAGE, engine="strict"),
)

CASES: tuple[Case, ...] = (*CONTROL, *CHATS, *COMPLETIONS, *OTHERS, *ERRORS, *EMBEDDINGS, *STRICT)
