"""Request bodies in the OpenAI shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle
from typing import Any

import orjson

from loadtest.workloads.prompts import Prompt


class Endpoint(StrEnum):
    """The endpoints that can be driven."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"

    @property
    def path(self) -> str:
        """Its path below the base URL."""
        return {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}[self]


def fingerprint(body: bytes) -> str:
    """A short hash by which a body that was sent is known again."""
    return hashlib.sha256(body).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Turns prompts into bodies; what is the same for every request is set once."""

    endpoint: Endpoint
    model: str
    stream: bool
    ignore_eos: bool = True
    cache_salt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> bytes:
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint is Endpoint.EMBEDDINGS:
            fields["input"] = list(prompt.inputs) if len(prompt.inputs) > 1 else prompt.prefix + prompt.tail
        else:
            fields |= self._prompt_fields(prompt) | self._generation_fields(prompt.max_tokens)
        if self.cache_salt:
            fields["cache_salt"] = self.cache_salt
        return orjson.dumps(fields | dict(self.extra))

    def _prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        if self.endpoint is Endpoint.COMPLETIONS:
            return {"prompt": "".join((prompt.prefix, *prompt.history, prompt.tail))}
        said = zip(cycle(("user", "assistant")), (*prompt.history, prompt.tail), strict=False)
        messages = [{"role": role, "content": text} for role, text in said]
        if prompt.prefix:
            messages.insert(0, {"role": "system", "content": prompt.prefix})
        return {"messages": messages}

    def _generation_fields(self, max_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
        if self.ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": max_tokens}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields
