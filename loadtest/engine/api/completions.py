"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import orjson
from aiohttp import web

from loadtest.engine.api.chat import completion_logprobs, final_chunk_usage, stream_events, usage
from loadtest.engine.api.errors import ApiError, invalid
from loadtest.engine.api.exchange import Body, json_answer, read_json, tokens_and_text
from loadtest.engine.choice import Choice
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import LedgerEntry
from loadtest.engine.request_parameters import SamplingParams, read_sampling, read_steering
from loadtest.engine.service import Service
from loadtest.engine.tokens import TokenisedText, tokenise

_DEFAULT_MAX_TOKENS: Final = 16
_MAX_PROMPTS: Final = 1024


async def completions(service: Service, request: web.BaseRequest, entry: LedgerEntry) -> web.StreamResponse:
    """Complete one prompt or several, whole or as a stream."""
    body = await read_json(request)
    texts = read_prompts(body)
    sampling = read_sampling(body, ("max_tokens",), service.config.max_model_len)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=_DEFAULT_MAX_TOKENS)
    model = service.check_model(body.get("model"))
    service.check_admission(sampling.n * len(texts))
    if not all(tokens.num_tokens for tokens, _ in texts):
        raise ApiError(400, "The decoder prompt cannot be empty")
    has_ids = not isinstance(body["prompt"], str) and not isinstance(body["prompt"][0], str)
    salt = sampling.cache_salt
    prompts = [service.prompt(tokens, text, model, salt, has_ids=has_ids) for tokens, text in texts]
    entry.note(service.request_id(request), model, (prompt.nonce for prompt in prompts))
    choices = service.choices(prompts, sampling, entry, read_steering(request.headers, body))
    answer_id = f"cmpl-{entry.request_id}"
    shown_model = (entry.script.model if entry.script else None) or model
    if sampling.stream:
        events = CompletionEvents(service, answer_id, shown_model, sampling=sampling, choices=choices)
        return await stream_events(service, request, entry, choices=choices, events=events)
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
    return json_answer(
        {
            "id": answer_id,
            "object": "text_completion",
            "created": service.created(),
            "model": shown_model,
            "choices": [_choice(choice, sampling) for choice in choices],
            "service_tier": None,
            "system_fingerprint": service.fingerprint,
            "usage": usage(
                generation.prompt_tokens,
                generation.output_tokens,
                _details(service, choices[-1].sequence.cached_tokens),
            ),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def read_prompts(body: Body) -> list[tuple[TokenisedText, str]]:
    """The prompts: a string, strings, token ids, or lists of token ids."""
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str):
        return [(tokenise(prompt), prompt)]
    if not isinstance(prompt, list):
        raise invalid("body.prompt", "string_type", "Input should be a valid string", prompt)
    if not prompt:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if len(prompt) > _MAX_PROMPTS and not isinstance(prompt[0], int):
        raise ApiError(400, f"prompt must have at most {_MAX_PROMPTS} elements", param="prompt")
    if isinstance(prompt[0], int):
        return [tokens_and_text(prompt)]
    if all(isinstance(item, str) for item in prompt):
        return [(tokenise(item), item) for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [tokens_and_text(item) for item in prompt]
    raise invalid("body.prompt", "string_type", "Input should be a valid string", prompt)


def _details(service: Service, cached_tokens: int) -> dict[str, Any] | None:
    if not service.config.prompt_tokens_details:
        return None
    return {"cached_tokens": cached_tokens, "created_cache_tokens": None, "multimodal_tokens": None}


def _choice(choice: Choice, sampling: SamplingParams) -> dict[str, Any]:
    tokens = choice.sequence.output_tokens
    logprobs = None
    if sampling.top_logprobs is not None:
        logprobs = completion_logprobs(choice.token_texts(0, tokens), sampling.top_logprobs)
    return {
        "index": choice.index,
        "text": (choice.prompt.text() if sampling.echo else "") + choice.text(0, tokens),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids(0, tokens) if sampling.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": choice.prompt.ids() if sampling.return_token_ids else None,
        "routed_experts": None,
    }


class CompletionEvents:
    """The chunks of a streamed completion."""

    def __init__(
        self, service: Service, answer_id: str, model: str, *, sampling: SamplingParams, choices: Sequence[Choice]
    ) -> None:
        self._service = service
        self._sampling = sampling
        self._choices = choices
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            orjson.dumps(answer_id),
            service.created(),
            orjson.dumps(model),
        )
        self._plain = not (sampling.continuous_usage or sampling.return_token_ids or sampling.top_logprobs is not None)

    def heading(self) -> Sequence[bytes]:
        return ()

    def opening(self) -> Sequence[bytes]:
        """Nothing goes before the first token."""
        return ()

    def tokens(self, choice: Choice, start: int, stop: int, last: bool) -> Sequence[bytes]:
        """One chunk with the text of the new tokens; the first one echoes the prompt if asked to."""
        sampling = self._sampling
        shown = choice.text(start, stop)
        if sampling.echo and not start:
            shown = choice.prompt.text() + shown
        before = b'{"index":%d,"text":%b,"logprobs":' % (choice.index, orjson.dumps(shown))
        if self._plain and not last:
            after = b'null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n'
            return (self._head + before + after,)
        logprobs = prompt_ids = ids = b"null"
        if sampling.top_logprobs is not None:
            offset = len(choice.text(0, start))
            texts = choice.token_texts(start, stop)
            logprobs = orjson.dumps(completion_logprobs(texts, sampling.top_logprobs, offset))
        if sampling.return_token_ids:
            ids = orjson.dumps(choice.token_ids(start, stop))
            prompt_ids = b"null" if start else orjson.dumps(choice.prompt.ids())
        after = b'%b,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":%b,"token_ids":%b}]' % (
            logprobs,
            orjson.dumps(choice.finish_reason if last else None),
            orjson.dumps(choice.stop_reason if last else None),
            prompt_ids,
            ids,
        )
        tail = b""
        if last and not sampling.include_usage:
            tail = b',"system_fingerprint":' + orjson.dumps(self._service.fingerprint)
        return (self._head + before + after + self._usage(choice, stop) + tail + b"}\n\n",)

    def closing(self) -> Sequence[bytes]:
        """The chunk with the usage, if it was asked for."""
        if not self._sampling.include_usage:
            return ()
        prompts = sum({id(c.prompt): c.sequence.prompt_tokens for c in self._choices}.values())
        outputs = sum(c.sequence.output_tokens for c in self._choices)
        details = _details(self._service, self._choices[0].sequence.cached_tokens)
        counts = orjson.dumps(final_chunk_usage(prompts, outputs, details))
        fingerprint = orjson.dumps(self._service.fingerprint)
        return (self._head + b'],"usage":%b,"system_fingerprint":%b}\n\n' % (counts, fingerprint),)

    def done(self) -> Sequence[bytes]:
        return (b"data: [DONE]\n\n",)

    def _usage(self, choice: Choice, tokens: int) -> bytes:
        if not self._sampling.continuous_usage:
            return b""
        prompt = choice.sequence.prompt_tokens
        counts = (prompt, prompt + tokens, tokens)
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % counts
