"""Aliases: operators' names for models, and canaries, which divide conversations between several models. Pure.

A canary chooses by a hash of a conversation's opening, so that each conversation keeps its model, and with it its
prefix cache, in every gateway with the same weights.
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from gateway.core.front.read import ModelNames
from gateway.core.request import Kind
from gateway.core.routing.prompt_blocks import seed
from gateway.features.models.settings import AliasTarget, ModelsConfig, models_of

_HASHES: Final = float(1 << 64)
_OPENING_CHARACTERS: Final = 1024  # of a prompt without turns


class Canary:
    """Models with their shares of conversations. `choose` maps a number in [0, 1) to a model."""

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


class Aliases(ModelNames):
    """Names from the configuration and from engines."""

    def __init__(
        self,
        aliases: Mapping[str, AliasTarget],
        served: Mapping[str, str] = MappingProxyType({}),
        own: Collection[str] = (),
        *,
        fallbacks: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        super().__init__(served, own)
        self.listed = {alias: models_of(target) for alias, target in aliases.items()}
        self.fallbacks = fallbacks
        self._targets: dict[str, str | Canary] = {}
        for alias, target in aliases.items():
            self._targets[alias] = target if isinstance(target, str) else Canary(target)

    @classmethod
    def configured(cls, config: ModelsConfig, served: Mapping[str, str]) -> ModelNames:
        """The names of this configuration; without its aliases and fallbacks, only the engines' names."""
        if config.aliases or config.fallbacks:
            return cls(config.aliases, served, config.by_name, fallbacks=config.fallbacks)
        return ModelNames(served, config.by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._targets or (name in self._served and name not in self._own)

    def model_of(self, name: str, tenant: str, session: str, kind: Kind, document: dict[str, Any]) -> str:
        target = self._targets.get(name, name)
        if not isinstance(target, str):
            target = target.choose(seed(name, tenant, session or opening_of(document, kind)) / _HASHES)
        return self.first(target)

    def continued(self, alias: str, model: str) -> bool:
        target = self._targets.get(alias, alias)
        return model in map(self.first, [target] if isinstance(target, str) else target.models)


def opening_of(document: dict[str, Any], kind: Kind) -> str:
    """The common opening of a conversation's turns: the messages up to the user's first, or a text's beginning.

    Empty for embeddings and scores: each client gets them from one model, because models are not comparable.
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
    """The turns up to the user's first; of a batch of conversations or prompts, the first."""
    for turn in turns:
        if type(turn) is not dict:
            yield turn[:_OPENING_CHARACTERS] if type(turn) in (str, list) else turn
            return
        yield turn
        if turn.get("role") == "user":
            return
