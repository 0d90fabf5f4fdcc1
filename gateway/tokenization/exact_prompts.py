"""Prompts whose token ids are known: from the client, or from the model's tokenizer before placement."""

from dataclasses import replace
from typing import Any

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.request import Demand, InferenceRequest
from gateway.routing.exact_index import TOKEN_BYTES, ExactIndex, packed, token_keys, token_seed
from gateway.tokenization.tokenization import Tokenization

_CHANGES_THE_PROMPT = ("truncate_prompt_tokens", "prompt_embeds", "suffix")


class ExactPrompts:
    """Gives requests their exact length, and the keys of the engine's own blocks."""

    def __init__(self, fleet: Fleet, exact: ExactIndex, tokenization: Tokenization) -> None:
        self._fleet = fleet
        self._exact = exact
        self._tokenization = tokenization

    def wanted(self, model: str) -> bool:
        """Whether the prompts of this model can be tokenized."""
        return self._tokenization.covers(model)

    async def complete(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the length of its prompt and its block keys, as far as known, and without its document."""
        document = request.document
        if document is None:
            return request
        model, accepted = request.demand.model, self._tokenization.accepted
        serving = self._fleet.serving(model)
        tokens = given_tokens(document, request.endpoint)
        if tokens is None and serving and all(accepted(model, backend.name) for backend in serving):
            tokens = await self._tokenization.token_bytes(model, document, request.endpoint, len(request.body))
        return replace(request, document=None, demand=self._exact_ask(request, tokens) if tokens else request.demand)

    def _exact_ask(self, request: InferenceRequest, tokens: bytes) -> Demand:
        demand, count = request.demand, len(tokens) // TOKEN_BYTES
        keys: tuple[int, ...] = ()
        serving = self._fleet.serving(demand.model) or ()
        blocks = {backend.engines[0].block_tokens for backend in serving}
        if len(blocks) == 1 and any(map(self._reports_blocks, serving)):
            keys = token_keys(tokens, blocks.pop(), token_seed(self._fleet.adapter(demand.model), request.salt))
        return replace(
            demand, prompt_tokens=count, anchor_tokens=count, anchor_size=demand.prompt_size, token_keys=keys
        )

    def _reports_blocks(self, backend: Backend) -> bool:
        """Whether the blocks in the cache of one of its engines are known."""
        return any(self._exact.live(engine.index) for engine in backend.engines)


def given_tokens(document: dict[str, Any], endpoint: str) -> bytes | None:
    """The packed ids of a completion's one prompt, if it was given as ids."""
    if endpoint != "completions" or any(document.get(name) is not None for name in _CHANGES_THE_PROMPT):
        return None
    prompt = document.get("prompt")
    if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) is list:
        prompt = prompt[0]
    if type(prompt) is not list or not prompt or set(map(type, prompt)) != {int}:
        return None
    try:
        return packed(prompt)
    except OverflowError:
        return None
