"""Prompts whose token ids are known: given by the client, or told by the model's tokenizer before placement."""

from typing import Any

from gateway.backends.backend import Backend
from gateway.backends.fleet import Fleet
from gateway.request import InferenceRequest
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
        """Whether the tokens of this model's prompts may be told."""
        return self._tokenization.covers(model)

    async def complete(self, request: InferenceRequest) -> None:
        """Fill in what can be known of the request's prompt; lets go of its document."""
        document, request.document = request.document, None
        if document is None:
            return
        model, accepted = request.ask.model, self._tokenization.accepted
        serving = self._fleet.serving(model)
        tokens = given_tokens(document, request.endpoint)
        if tokens is None and serving and all(accepted(model, backend.name) for backend in serving):
            tokens = await self._tokenization.token_bytes(model, document, request.endpoint, len(request.body))
        if tokens:
            self._know(request, tokens)

    def _know(self, request: InferenceRequest, tokens: bytes) -> None:
        ask = request.ask
        ask.prompt_tokens = ask.anchor_tokens = len(tokens) // TOKEN_BYTES
        ask.anchor_size = ask.prompt_size
        serving = self._fleet.serving(ask.model) or ()
        blocks = {backend.engines[0].block_tokens for backend in serving}
        if len(blocks) == 1 and any(map(self._tells, serving)):
            lora = self._fleet.adapter(ask.model)
            ask.token_keys = token_keys(tokens, blocks.pop(), token_seed(lora, request.salt))

    def _tells(self, backend: Backend) -> bool:
        """Whether it is known what one of its engines holds."""
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
