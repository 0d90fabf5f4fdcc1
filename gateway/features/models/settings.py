"""The configuration of models: aliases, fallbacks, and settings of each."""

from collections.abc import Collection
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from gateway.settings import Section, check_installed, default, refuse, twice

_MOST_WEIGHT = 1e9


def _checked_target(target: Any) -> Any:
    weights: list[Any] = [None]
    if isinstance(target, str | dict):
        weights = [] if isinstance(target, str) else list(target.values())
    if not all(type(weight) in (int, float) and 0 <= weight <= _MOST_WEIGHT for weight in weights):
        raise ValueError("must be a model, or models with weights such as {model-a: 95, model-b: 5}")
    return target


# A model, or models with the share of conversations that each gets.
AliasTarget = Annotated[str | dict[str, float], BeforeValidator(_checked_target)]


def models_of(target: AliasTarget) -> list[str]:
    """The models that an alias stands for, in the order of the file."""
    return [target] if isinstance(target, str) else list(target)


class ModelEmbeddingsConfig(Section):
    """Batching of embeddings requests for one model."""

    coalesce: bool | None = default(None, "Overrides `embeddings.coalesce`; null = no override.")


class LoraConfig(Section):
    """A LoRA adapter that backends load when requests wait for it; needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""

    base: str = Field(min_length=1, description="Model whose backends load it.")
    path: str = Field(min_length=1, description="Its folder, or name on the Hugging Face hub, as the backends see it.")


class ModelConfig(Section):
    """Settings of one model, by the name that backends use."""

    tokenizer: str = default(
        "",
        "Folder or Hugging Face name: prompts are tokenized here too, for exact prefix routing and usage in batches.",
    )
    fallback: tuple[str, ...] = default(
        (), "Models that generate in its place while no backend serves it or its queue is full; the first that can."
    )
    lora: LoraConfig | None = default(None, "Load this model as a LoRA adapter on demand; null = never.")
    embeddings: ModelEmbeddingsConfig = default(ModelEmbeddingsConfig(), "Overrides of `embeddings` for this model.")

    @field_validator("tokenizer")
    @classmethod
    def _is_installed(cls, source: str) -> str:
        if source:
            check_installed("transformers", "tokenizer")
        return source

    @field_validator("fallback")
    @classmethod
    def _is_a_list_of_models(cls, fallback: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [f"{name!r} is there twice; name it once" for name in twice(fallback)]
        if not all(fallback):
            wrong.append("an entry is empty; name a model")
        if wrong:
            raise ValueError("\n".join(wrong))
        return fallback


class ModelsConfig(Section):
    """Model aliases, and settings by model name."""

    model_config = ConfigDict(extra="allow")  # of the type below
    __pydantic_extra__: dict[str, ModelConfig] = Field(init=False)

    aliases: dict[str, AliasTarget] = default(
        {}, "Maps names that clients use to names that backends use, or to several of these with weights."
    )

    @model_validator(mode="after")
    def _has_no_section_for_an_alias(self) -> Self:
        both = sorted(self.by_name.keys() & self.aliases.keys())
        wrong = [
            f"{name!r} is an alias; use a section for {models_of(self.aliases[name])[0]!r} instead" for name in both
        ]
        for name, adapter in self.adapters.items():
            if adapter.base in self.aliases or adapter.base in self.adapters:
                wrong.append(f"the base {adapter.base!r} of {name!r} is an alias or an adapter itself; name a model")
        return refuse(self, wrong + self._wrong_fallbacks())

    def _wrong_fallbacks(self) -> list[str]:
        """A line for each fallback that is an alias, or that leads back to its model."""
        wrong = []
        for name, model in self.by_name.items():
            for other in model.fallback:
                if other in self.aliases:
                    of = models_of(self.aliases[other])[0]
                    wrong.append(f"the fallback {other!r} of {name!r} is an alias; name the model {of!r} instead")
            if loop := self._loop_from(name):
                wrong.append(f"the fallbacks {' -> '.join(map(repr, loop))} are a loop; remove one of them")
        return wrong

    def _loop_from(self, name: str) -> list[str]:
        """The fallbacks that lead from a model back to it, which its first model in the file reports; else nothing."""
        paths, seen = [[name]], {name}
        while paths:
            path = paths.pop()
            model = self.by_name.get(path[-1])
            for other in model.fallback if model is not None else ():
                if other == name:
                    order = list(self.by_name)
                    return [*path, name] if name == min(path, key=order.index) else []
                if other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
        return []

    @field_validator("aliases")
    @classmethod
    def _name_models(cls, aliases: dict[str, AliasTarget]) -> dict[str, AliasTarget]:
        wrong = []
        for alias, target in aliases.items():
            models = models_of(target)
            if not all(models) or not models:
                wrong.append(f"{alias!r} is an alias of nothing; name a model")
            if not isinstance(target, str) and models and not sum(target.values()) > 0:
                wrong.append(f"the weights of {alias!r} are all 0; give a model a weight over 0")
        for alias, target in aliases.items():
            wrong += [
                f"{alias!r} is an alias of {model!r}, which is an alias itself; name a model"
                for model in models_of(target)
                if model in aliases
            ]
        if wrong:
            raise ValueError("\n".join(wrong))
        return aliases

    def unserved(self, models: Collection[str]) -> list[str]:
        """A warning for each alias of a model that is not among these."""
        return [
            f"models.aliases: {alias!r} is an alias of {model!r}, which no reachable backend lists:"
            " its requests get 404"
            for alias, target in self.aliases.items()
            for model in models_of(target)
            if model not in models
        ]

    @property
    def by_name(self) -> dict[str, ModelConfig]:
        return self.__pydantic_extra__ or {}

    @property
    def fallbacks(self) -> dict[str, tuple[str, ...]]:
        """The fallbacks of each model that has any."""
        return {name: model.fallback for name, model in self.by_name.items() if model.fallback}

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        """The LoRA adapters that are loaded on demand."""
        return {name: model.lora for name, model in self.by_name.items() if model.lora is not None}

    @property
    def named(self) -> frozenset[str]:
        """Models with a section of their own or an alias, and fallbacks: backends are expected to have them."""
        of_aliases = [model for target in self.aliases.values() for model in models_of(target)]
        of_fallbacks = [other for others in self.fallbacks.values() for other in others]
        return frozenset((*self.by_name, *of_aliases, *of_fallbacks))
