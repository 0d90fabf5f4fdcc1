"""Names of models: which a client may use, which model one stands for, and for a canary, which a conversation gets.

Further names under which engines serve a model (vLLM's `--served-model-name a b`) stand for the first one, but for
those with settings of their own: so all of them share a queue, what is learned, and the record of prompts.

Pure. Every route gets its model from `permitted` and `Aliases`. A canary's choice is made by a hash of what all turns
of a conversation have in common, so that each conversation keeps its model, and with it its prefix cache, in every
gateway with the same weights.
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from gateway.errors import InvalidRequest, ModelNotAllowed
from gateway.keys.settings import KeyConfig
from gateway.models.settings import AliasTarget
from gateway.request import Kind
from gateway.routing.prompt_blocks import seed

_HASHES: Final = float(1 << 64)
_OPENING_CHARACTERS: Final = 1024  # of a prompt without turns


def permitted(name: str | None, key: KeyConfig | None) -> str:
    """The name that a client uses, or the only model's if it uses none. Raises InvalidRequest or ModelNotAllowed."""
    if name is None:
        raise InvalidRequest("You must provide a model. GET /v1/models lists the available models.", param="model")
    if key is not None and key.models is not None and not key.allows(name):
        raise ModelNotAllowed.of(name)
    return name


class Canary:
    """Models with the share of conversations that each gets. `choose` maps a number in [0, 1) to one of them."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total, so_far = sum(weights.values()), 0.0
        self._upper: list[tuple[float, str]] = []
        for model, weight in weights.items():
            so_far += weight
            if weight:
                self._upper.append((so_far / total, model))
        self.models = [model for _, model in self._upper]

    def choose(self, place: float) -> str:
        """The model at this place. Other weights move only the places near the limits between two models."""
        for upper, model in self._upper:
            if place < upper:
                return model
        return self._upper[-1][1]


class Aliases:
    """The models that names of clients stand for. `served`: names of engines that answer with another one, and the
    model of each, as they are at any moment; `own`: names with settings."""

    def __init__(
        self,
        aliases: Mapping[str, AliasTarget],
        served: Mapping[str, str] = MappingProxyType({}),
        own: Collection[str] = (),
    ) -> None:
        self._served, self._own = served, own
        self._targets: dict[str, str | Canary] = {}
        for alias, target in aliases.items():
            self._targets[alias] = target if isinstance(target, str) else Canary(target)

    def __contains__(self, name: str) -> bool:
        return name in self._targets or (name in self._served and name not in self._own)

    def model_of(self, name: str, tenant: str, session: str, kind: Kind, document: dict[str, Any]) -> str:
        """The model that a name stands for, for this tenant's conversation; one that is no alias is the model's own."""
        target = self._targets.get(name, name)
        if not isinstance(target, str):
            target = target.choose(seed(name, tenant, session or opening_of(document, kind)) / _HASHES)
        return self._first(target)

    def _first(self, model: str) -> str:
        return model if model in self._own else self._served.get(model, model)

    def continued(self, alias: str, model: str) -> bool:
        """Whether a conversation under this name may go on with this model."""
        target = self._targets.get(alias, alias)
        return model in map(self._first, [target] if isinstance(target, str) else target.models)


def opening_of(document: dict[str, Any], kind: Kind) -> str:
    """What all turns of a conversation begin with: the messages up to the first one of the user, or a text's beginning.

    Empty for embeddings and scores: those of one client come from one model, because others do not compare.
    """
    if kind is Kind.POOL:
        return ""
    for field in ("messages", "input", "prompt"):
        given = document.get(field)
        if type(given) is str:
            return given[:_OPENING_CHARACTERS]
        if type(given) is list:
            return orjson.dumps(list(_first_turns(given))).decode()
    return ""


def _first_turns(turns: list[Any]) -> Iterator[Any]:
    """The turns up to the first one of the user; of a batch of conversations or prompts, the first one."""
    for turn in turns:
        if type(turn) is not dict:
            yield turn[:_OPENING_CHARACTERS] if type(turn) in (str, list) else turn
            return
        yield turn
        if turn.get("role") == "user":
            return
