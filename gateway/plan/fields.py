"""Reads a model's config.json under the names that different families use."""

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels", "hidden_size_per_head")
INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
VOCABULARY = ("vocab_size", "padded_vocab_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
)  # fmt: skip

# Where a model that sees or hears keeps the part that makes text.
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")

# What published files of these families leave to the library's defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
}
_TIED = frozenset(("gemma", "gemma2", "gemma3", "cohere", "cohere2", "gpt2", "opt", "bloom", "falcon", "mpt", "bert"))


class PlanError(Exception):
    """There is no plan; the message says in one line why, and what to give."""


def text_part(document: Document) -> dict[str, Any]:
    """The part that makes text, with the outer fields where it has none of its own."""
    inner = next((document[name] for name in _TEXT_PARTS if isinstance(document.get(name), dict)), None)
    if inner is None:
        return _with_defaults(dict(document))
    if any(isinstance(inner.get(name), dict) for name in _TEXT_PARTS):
        inner = text_part(inner)
    outer = {name: value for name, value in document.items() if not isinstance(value, dict)}
    whole = {"quantization_config": document["quantization_config"]} if "quantization_config" in document else {}
    # The library's defaults are those of the inner family; what the outer file says of tying holds for the whole.
    return _with_defaults({**outer, **whole, **inner})


def _with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    family = str(fields.get("model_type", ""))
    tied = {"tie_word_embeddings": family.removesuffix("_text") in _TIED}
    return {**tied, **_DEFAULTS.get(family, {}), **{key: value for key, value in fields.items() if value is not None}}


def number(fields: Document, names: tuple[str, ...]) -> int | None:
    """The first of these fields that holds a whole number above 0."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def listed(fields: Document, name: str) -> list[Any]:
    """The list in this field; empty where there is none."""
    value = fields.get(name)
    return value if isinstance(value, list) else []


def needed(fields: Document, *wanted: tuple[str, ...]) -> tuple[int, ...]:
    """These fields, all of them. Raises PlanError that names all that are missing."""
    found = [number(fields, names) for names in wanted]
    if missing := [names[0] for names, value in zip(wanted, found, strict=True) if value is None]:
        told = " ".join(f"--set {name}=N" for name in missing)
        raise PlanError(f"the model's config.json lacks {', '.join(missing)}: give {told}")
    return tuple(value for value in found if value is not None)
