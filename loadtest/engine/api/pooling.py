"""What the pooling endpoints share: reading inputs and running them through the engine."""

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from loadtest.engine.api.chat import note
from loadtest.engine.api.errors import invalid
from loadtest.engine.api.exchange import Body, read_messages, read_token_ids
from loadtest.engine.choice import Choice, Prompt
from loadtest.engine.generation import Generation
from loadtest.engine.ledger import Entry
from loadtest.engine.prose import Prose
from loadtest.engine.sequence import SequenceState
from loadtest.engine.service import Service
from loadtest.engine.tokens import TokenisedText, from_ids, render_chat, tokenise


async def pool(
    service: Service, request: web.BaseRequest, entry: Entry, body: Body, texts: Sequence[tuple[TokenisedText, str]]
) -> tuple[list[Prompt], int]:
    """Run the inputs as one sequence each; the prompts and the number of their tokens."""
    model = service.check_model(body.get("model"), with_aliases=False)
    prompts = [service.prompt(tokens, text, model, body.get("cache_salt") or "") for tokens, text in texts]
    service.check_admission(len(prompts))
    _spend(service.config.api_request_seconds + len(prompts) * service.config.api_input_seconds)
    note(entry, model, prompts)
    entry.request_id = service.request_id(request)
    choices = [_pooled(service, index, prompt) for index, prompt in enumerate(prompts)]
    with Generation(service.engine, choices, entry) as generation:
        await generation.finished()
        return prompts, generation.prompt_tokens


def _spend(cpu_seconds: float) -> None:
    """Compute for so long, as an API server does that has one thread for all: meanwhile nothing else is done."""
    until = time.thread_time() + cpu_seconds
    while cpu_seconds and time.thread_time() < until:
        pass


def _pooled(service: Service, index: int, prompt: Prompt) -> Choice:
    """A sequence that ends with its prefill; pooling models keep no prefix cache."""
    sequence = SequenceState(service.engine.new_id(), max(prompt.tokens.num_tokens, 1), 0)
    return Choice(index, prompt.tokens, Prose(prompt.seed), sequence, "stop")


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
        return [_from_ids(value)]
    if all(isinstance(item, str) for item in value):
        return [(tokenise(item), item) for item in value]
    if all(isinstance(item, list) for item in value):
        return [_from_ids(item) for item in value]
    raise invalid(f"body.{field}.0", "int_parsing", "Input should be a valid integer", value)


def _from_ids(ids: list[Any]) -> tuple[TokenisedText, str]:
    tokens = from_ids(read_token_ids(ids))
    return tokens, tokens.text()


def pooling_usage(prompt_tokens: int) -> dict[str, Any]:
    """The `usage` object of a pooling answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
