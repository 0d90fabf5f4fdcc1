"""What the gateway predicted of a request's hit, beside what the engine reports."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import AsyncOpenAI
from openai.types import CompletionUsage

from tests.integration.fleet import CHAT_MODEL, print_progress
from tests.integration.prompts import chat, fresh

BLOCK_TOKENS = 32  # of every chat engine of these tests
Message = dict[str, str]
WORDS = re.findall(
    r"\w+",
    "the quick brown fox jumps over a lazy dog while reading this file line by line and then it returns every value"
    " of that class with its name because there is no other way to know what was written before",
)


@dataclass(frozen=True)
class Answered:
    """One answer: who gave it, the hit tokens that were predicted and reported, the prompt's tokens, and the text."""

    backend: str
    predicted: int
    cached: int
    prompt_tokens: int
    text: str
    explained: str | None

    @property
    def is_right(self) -> bool:
        """The prediction is at most one block off."""
        return abs(self.predicted - self.cached) <= BLOCK_TOKENS


async def talk(sdk: AsyncOpenAI, messages: Sequence[Message], tokens: int = 4, **more: Any) -> Answered:
    """Ask for the next turn of a conversation."""
    body = chat("", tokens, **more) | {"messages": list(messages)}
    raw = await sdk.chat.completions.with_raw_response.create(**body)
    answer = raw.parse()
    return _answered(raw.headers, answer.usage, answer.choices[0].message.content or "")


async def complete(sdk: AsyncOpenAI, prompt: str | list[int], tokens: int = 1, **more: Any) -> Answered:
    """Ask for the rest of a text, or of token ids."""
    extra = {"ignore_eos": True, **more.pop("extra_body", {})}
    body = {"model": CHAT_MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "extra_body": extra, **more}
    raw = await sdk.completions.with_raw_response.create(**body)
    answer = raw.parse()
    return _answered(raw.headers, answer.usage, answer.choices[0].text)


def error(answers: Sequence[Answered], what: str = "") -> float:
    """Mean difference between predicted and reported hits, as a share of the prompts' tokens."""
    wrong = sum(abs(one.predicted - one.cached) for one in answers) / sum(one.prompt_tokens for one in answers)
    print_progress(f"{what or 'hits'}: {wrong:.2%} wrong, {hit_share(answers):.0%} cached, {len(answers)} requests")
    return wrong


def hit_share(answers: Sequence[Answered]) -> float:
    """The share of the prompts' tokens that engines found in their caches."""
    return sum(one.cached for one in answers) / sum(one.prompt_tokens for one in answers)


def _answered(headers: Any, usage: CompletionUsage | None, text: str) -> Answered:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return Answered(
        backend=headers["x-gateway-backend"],
        predicted=int(headers["x-gateway-prefix-tokens"]),
        cached=usage.prompt_tokens_details.cached_tokens or 0,
        prompt_tokens=usage.prompt_tokens,
        text=text,
        explained=headers.get("x-gateway-explain"),
    )


def text(random: Random, size_bytes: int) -> str:
    """New text, of words that tokenizers know."""
    words = " ".join(random.choices(WORDS, k=size_bytes // 4))
    return fresh(words)[:size_bytes]
