"""Names of models: which a client may use, and which model one stands for.

Further names under which engines serve a model (vLLM's `--served-model-name a b`) stand for the first one, but for
those with settings of their own: so all of them share a queue, what is learned, and the record of prompts. Every route
gets its model from `permitted` and `ModelNames`. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.errors import InvalidRequest, ModelNotAllowed
from gateway.front.http_request import ClientKey
from gateway.request import Kind


def permitted(name: str | None, key: ClientKey | None) -> str:
    """The name that a client uses, or the only model's if it uses none. Raises InvalidRequest or ModelNotAllowed."""
    if name is None:
        raise InvalidRequest("You must provide a model. GET /v1/models lists the available models.", param="model")
    if key is not None and key.models is not None and not key.allows(name):
        raise ModelNotAllowed.of(name)
    return name


class ModelNames:
    """The models that names of clients stand for. `served`: names of engines that answer with another one, and the
    model of each, as they are at any moment; `own`: names with settings.

    `listed`: names besides those of the backends, each with the models that it may stand for. `fallbacks`: the models
    that may take the place of one.
    """

    def __init__(self, served: Mapping[str, str] = MappingProxyType({}), own: Collection[str] = ()) -> None:
        self._served, self._own = served, own
        self.listed: Mapping[str, Sequence[str]] = {}
        self.fallbacks: Mapping[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._served and name not in self._own

    def model_of(self, name: str, tenant: str, session: str, kind: Kind, document: dict[str, Any]) -> str:  # noqa: ARG002
        """The model that a name stands for, for this tenant's conversation; one that is no alias is the model's own."""
        return self.first(name)

    def continued(self, alias: str, model: str) -> bool:
        """Whether a conversation under this name may go on with this model."""
        return model == self.first(alias)

    def first(self, model: str) -> str:
        return model if model in self._own else self._served.get(model, model)
