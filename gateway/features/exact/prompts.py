"""Prompts as token ids, which a client gave or a model's tokenizer makes, and the keys of their blocks."""

from dataclasses import replace
from typing import Any, Final, Protocol

from gateway.core.backends.fleet import Fleet
from gateway.core.request import Demand, InferenceRequest
from gateway.features.exact.index import MOST_TOKENS, TOKEN_BYTES, ExactIndex, packed, token_keys, token_seed

_CHANGES_THE_PROMPT: Final = ("truncate_prompt_tokens", "prompt_embeds", "suffix")
# Results of tokenizing prompts. `unknown`: the prompt contains a feature that is not verified.
RESULTS: Final = ("encoded", "unknown", "late", "busy", "too_long", "failed")


class Tokenizers(Protocol):
    """The tokenizers of models: `tokenization.Tokenization`."""

    def accepted(self, model: str, backend: str) -> bool:
        """Whether this backend was verified to have the same tokens."""

    async def token_bytes(self, model: str, document: dict[str, Any], endpoint: str, size_bytes: int) -> bytes | None:
        """The packed token ids of a request's prompt; None = not known, or not soon enough."""


class ExactPrompts:
    """Replaces estimates about prompts by exact values, where their tokens are known."""

    def __init__(self, fleet: Fleet, index: ExactIndex, tokenizers: Tokenizers | None = None) -> None:
        self._fleet = fleet
        self._index = index
        self._tokenizers = tokenizers

    def use(self, tokenizers: Tokenizers) -> None:
        """Tokenize prompts that are not given as token ids."""
        self._tokenizers = tokenizers

    async def complete(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the known length and block keys of its prompt, and without its document."""
        document, demand = request.document, request.demand
        if document is None:
            return request
        model, tokens, tokenizers = demand.model, given_tokens(document, request.endpoint), self._tokenizers
        if tokens is None and tokenizers is not None:
            serving = self._fleet.serving(model)
            if serving and all(tokenizers.accepted(model, backend.name) for backend in serving):
                tokens = await tokenizers.token_bytes(model, document, request.endpoint, len(request.body))
        if tokens:
            demand = self._exact_demand(request, tokens)
        return replace(request, document=None, demand=demand)

    def covers(self, engine: int) -> bool:
        """Whether hits on an engine are predicted from its KV events alone: they are followed, and the prompts of all
        its models are tokenized."""
        tokenizers = self._tokenizers
        if tokenizers is None or not self._index.live(engine):
            return False
        backend = self._fleet.owner(engine)
        return all(tokenizers.accepted(card.id, backend.name) for card in backend.facts.models)

    def _exact_demand(self, request: InferenceRequest, tokens: bytes) -> Demand:
        demand, count, keys = request.demand, len(tokens) // TOKEN_BYTES, tuple[int, ...]()
        serving = self._fleet.serving(demand.model) or ()
        blocks = {backend.engines[0].block_tokens for backend in serving}
        if len(blocks) == 1 and any(self._index.live(engine.index) for each in serving for engine in each.engines):
            keys = token_keys(tokens, blocks.pop(), token_seed(self._fleet.adapter(demand.model), request.salt))
        size = demand.prompt_size
        return replace(demand, prompt_tokens=count, anchor_tokens=count, anchor_size=size, token_keys=keys)


def given_tokens(document: dict[str, Any], endpoint: str) -> bytes | None:
    """The packed ids of a completion's one prompt, if it was given as ids."""
    if endpoint != "completions" or any(document.get(name) is not None for name in _CHANGES_THE_PROMPT):
        return None
    prompt = document.get("prompt")
    if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) is list:
        prompt = prompt[0]
    if type(prompt) is not list or not 0 < len(prompt) <= MOST_TOKENS or set(map(type, prompt)) != {int}:
        return None
    try:
        return packed(prompt)
    except OverflowError:
        return None
