"""POST /v1/chat/completions, with token usage and log probabilities."""

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from loadtest.engine.api.errors import ApiError, bad_request, invalid
from loadtest.engine.api.exchange import Body, EventStream, json_answer, read_json, read_messages, tokens_and_text
from loadtest.engine.choice import Choice, PreparedPrompt
from loadtest.engine.generation import Generation, StreamedGeneration
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.request_parameters import SamplingParams, read_sampling, read_steering
from loadtest.engine.service import Service
from loadtest.engine.tokens import render_chat, tokenise


def usage(prompt_tokens: int, output_tokens: int, details: dict[str, Any] | None = None) -> dict[str, Any]:
    """The `usage` object of a complete answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


def final_chunk_usage(prompt_tokens: int, output_tokens: int, details: dict[str, Any] | None) -> dict[str, Any]:
    """The `usage` object of a stream's last chunk, without null fields."""
    return {
        key: {name: count for name, count in value.items() if count is not None} if isinstance(value, dict) else value
        for key, value in usage(prompt_tokens, output_tokens, details).items()
        if value is not None
    }


def chat_logprobs(texts: list[str], top: int) -> dict[str, Any]:
    """The `logprobs` of a chat answer's tokens."""
    return {"content": [_token(text, -0.5) | {"top_logprobs": _alternatives(text, top)} for text in texts]}


def completion_logprobs(texts: list[str], top: int, offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a completion's tokens; offsets count characters from the prompt's end."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [-0.5] * len(texts),
        "tokens": texts,
        "top_logprobs": [
            {item["token"]: item["logprob"] for item in _alternatives(text, max(top, 1))} for text in texts
        ],
    }


def _alternatives(text: str, top: int) -> list[dict[str, Any]]:
    return [_token(text if rank == 0 else f" alt{rank}", -0.5 - rank) for rank in range(top)]


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


async def chat_completions(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """Answer a chat, whole or as a stream."""
    body = await read_json(request)
    messages = read_messages(body)
    sampling = read_sampling(body, ("max_completion_tokens", "max_tokens"), service.config.max_model_len)
    model = service.check_model(body.get("model"))
    service.check_admission(sampling.n)
    if (ids := read_replay(body)) is not None:
        prompt = service.prompt(*tokens_and_text(ids), model, sampling.cache_salt, has_ids=True)
    else:
        prompt = chat_prompt(service, body, messages, model=model, cache_salt=sampling.cache_salt)
    entry.note(service.request_id(request), model, [prompt.nonce])
    answer_id = f"chatcmpl-{entry.request_id}"
    choices = service.choices([prompt], sampling, entry, read_steering(request.headers, body))
    shown_model = (entry.script.model if entry.script else None) or model
    if sampling.stream:
        events = ChatEvents(service, answer_id, shown_model, sampling=sampling, choices=choices)
        return await stream_events(service, request, entry, choices=choices, events=events)
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
    return json_answer(_answer(service, answer_id, shown_model, sampling=sampling, generation=generation))


async def chat_batch(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """Answer several chats with a choice for each."""
    body = await read_json(request)
    conversations = body.get("messages")
    if not isinstance(conversations, list) or not all(isinstance(each, list) and each for each in conversations):
        raise invalid("body.messages", "list_type", "Input should be a valid list", conversations)
    if body.get("stream"):
        raise ApiError(400, "Batch chat completions do not support streaming.")
    sampling = read_sampling(body, ("max_completion_tokens", "max_tokens"), service.config.max_model_len)
    model = service.check_model(body.get("model"))
    service.check_admission(len(conversations))
    chats = [read_messages(body | {"messages": each}) for each in conversations]
    prompts = [chat_prompt(service, body, messages, model=model, cache_salt=sampling.cache_salt) for messages in chats]
    entry.note(service.request_id(request), model, [prompt.nonce for prompt in prompts])
    with Generation(service.engine, service.choices(prompts, sampling, entry), entry) as generation:
        await generation.finished()
    return json_answer(
        _answer(service, f"chatcmpl-{entry.request_id}", model, sampling=sampling, generation=generation)
    )


def chat_prompt(
    service: Service, body: Body, messages: Sequence[tuple[str, str]], model: str, cache_salt: str
) -> PreparedPrompt:
    """The prompt that the chat template makes; tools are part of it."""
    tools = body.get("tools")
    head = [("system", orjson.dumps(tools).decode())] if tools else []
    text = render_chat([*head, *messages], bool(body.get("add_generation_prompt", True)))
    return service.prompt(tokenise(text), text, model, cache_salt)


def read_replay(body: Body) -> list[int] | None:
    """The token ids to use instead of the messages' own, as vLLM takes them from the prefill of another engine."""
    forwarded = body.get("kv_transfer_params")
    ids = forwarded.get("prompt_token_ids") if isinstance(forwarded, dict) else None
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < 0 for each in ids):
        raise bad_request(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.",
            "kv_transfer_params.prompt_token_ids",
        )
    return ids


async def stream_events(
    service: Service, request: web.BaseRequest, entry: LedgerEntry, choices: Sequence[Choice], events: Any
) -> web.StreamResponse:
    """Send a generation's events until its end."""
    headers = {"X-Request-Id": entry.request_id or ""} if service.config.request_id_headers else {}
    stream = EventStream(headers)
    with StreamedGeneration(service.engine, choices, events, stream=stream, entry=entry) as generation:
        response = await stream.open(request)
        await generation.run()
    return response


def prompt_details(service: Service, choice: Choice) -> dict[str, Any] | None:
    """`prompt_tokens_details`, if the engine was started with them."""
    if not service.config.prompt_tokens_details:
        return None
    sequence = choice.sequence
    return {
        "cached_tokens": sequence.cached_tokens,
        "created_cache_tokens": sequence.created_cache_tokens,
        "multimodal_tokens": None,
    }


def _answer(
    service: Service, answer_id: str, model: str, sampling: SamplingParams, generation: Generation
) -> dict[str, Any]:
    first = generation.choices[0]
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": service.created(),
        "model": model,
        "choices": [_choice(choice, sampling) for choice in generation.choices],
        "service_tier": None,
        "system_fingerprint": service.fingerprint,
        "usage": usage(generation.prompt_tokens, generation.output_tokens, prompt_details(service, first)),
        "prompt_logprobs": None,
        "prompt_token_ids": first.prompt.ids() if sampling.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(choice: Choice, sampling: SamplingParams) -> dict[str, Any]:
    tokens = choice.sequence.output_tokens
    texts = choice.token_texts(0, tokens) if sampling.top_logprobs is not None else []
    return {
        "index": choice.index,
        "message": {
            "role": "assistant",
            "content": "" if choice.tool else choice.text(0, tokens),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        | ({"tool_calls": [_tool_call(choice, choice.text(0, tokens))]} if choice.tool else {}),
        "logprobs": None if sampling.top_logprobs is None else chat_logprobs(texts, sampling.top_logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids(0, tokens) if sampling.return_token_ids else None,
        "routed_experts": None,
    }


def _tool_call(choice: Choice, arguments: str) -> dict[str, Any]:
    call_id = f"chatcmpl-tool-{choice.sequence.sequence_id:016x}"
    return {"id": call_id, "type": "function", "function": {"name": choice.tool, "arguments": arguments}}


class ChatEvents:
    """The chunks of a streamed chat. The common case is a template of bytes around the text."""

    def __init__(
        self, service: Service, answer_id: str, model: str, *, sampling: SamplingParams, choices: Sequence[Choice]
    ) -> None:
        self._service = service
        self._sampling = sampling
        self._choices = choices
        self._prompt_tokens = choices[0].sequence.prompt_tokens
        named = orjson.dumps(model)
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            orjson.dumps(answer_id),
            service.created(),
            named,
        )
        self._plain = not (sampling.continuous_usage or sampling.return_token_ids or sampling.top_logprobs is not None)
        self._before = [self._head + b'{"index":%d,"delta":{"content":' % i for i in range(len(choices))]
        self._after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    def heading(self) -> Sequence[bytes]:
        return ()

    def opening(self) -> Sequence[bytes]:
        """One chunk with the role for each answer."""
        ids = b"null"
        if self._sampling.return_token_ids:
            ids = orjson.dumps(self._choices[0].prompt.ids())
        role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        tail = b',"prompt_token_ids":%b,"prompt_text":null}\n\n' % ids
        return [self._head + role % i + self._usage(0) + tail for i in range(len(self._choices))]

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """One chunk with the text of the new tokens."""
        text = orjson.dumps(choice.text(start, stop))
        before = self._before[choice.index]
        if choice.tool is not None:
            before, text = self._call(choice, start, stop)
        if self._plain and not last:
            return (before + text + self._after,)
        logprobs = ids = b"null"
        if self._sampling.top_logprobs is not None:
            logprobs = orjson.dumps(chat_logprobs(choice.token_texts(start, stop), self._sampling.top_logprobs))
        if self._sampling.return_token_ids:
            ids = orjson.dumps(choice.token_ids(start, stop))
        reason = b"null"
        if last:
            reason = b'%b,"stop_reason":%b' % (orjson.dumps(choice.finish_reason), orjson.dumps(choice.stop_reason))
        end = b'},"logprobs":%b,"finish_reason":%b,"token_ids":%b}]' % (logprobs, reason, ids)
        fingerprint = b""
        if last and not self._sampling.include_usage:
            fingerprint = b',"system_fingerprint":' + orjson.dumps(self._service.fingerprint)
        return (before + text + end + self._usage(stop) + fingerprint + b"}\n\n",)

    def _call(self, choice: Choice, start: int, stop: int) -> tuple[bytes, bytes]:
        """The part of a chunk of a tool's call in place of text: the name at first, and a piece of the arguments."""
        arguments = choice.text(start, stop)
        call = {"function": {"arguments": arguments}} if start else _tool_call(choice, arguments)
        return self._head + b'{"index":%d,"delta":{"tool_calls":' % choice.index, orjson.dumps([{"index": 0, **call}])

    def closing(self) -> Sequence[bytes]:
        """The chunk with the usage, if requested."""
        if not self._sampling.include_usage:
            return ()
        outputs = sum(choice.sequence.output_tokens for choice in self._choices)
        details = prompt_details(self._service, self._choices[0])
        counts = orjson.dumps(final_chunk_usage(self._prompt_tokens, outputs, details))
        fingerprint = orjson.dumps(self._service.fingerprint)
        return (self._head + b'],"usage":%b,"system_fingerprint":%b}\n\n' % (counts, fingerprint),)

    def done(self) -> Sequence[bytes]:
        return (b"data: [DONE]\n\n",)

    def _usage(self, tokens: int) -> bytes:
        if not self._sampling.continuous_usage:
            return b""
        prompt = self._prompt_tokens
        return (
            b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}'
        ) % (prompt, prompt + tokens, tokens)
