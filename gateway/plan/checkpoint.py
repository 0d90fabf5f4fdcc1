"""Reads a model's folder: the size of its weights, and config.json, whose field names differ between families."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
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
    }
}
_TIED = frozenset(("gemma", "gemma2", "gemma3", "cohere", "cohere2", "gpt2", "opt", "bloom", "falcon", "mpt", "bert"))

_MOST_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class PlanError(Exception):
    """No plan can be made; the message gives the reason and the option to set, in one line."""


def text_part(document: Document) -> dict[str, Any]:
    """The part that makes text, with the outer fields where it has none of its own."""
    inner = next((document[name] for name in _TEXT_PARTS if isinstance(document.get(name), dict)), None)
    if inner is None:
        return _with_defaults(dict(document))
    if any(isinstance(inner.get(name), dict) for name in _TEXT_PARTS):
        inner = text_part(inner)
    inner = {"quantization_config": document.get("quantization_config"), **inner}
    outer = {name: value for name, value in document.items() if not isinstance(value, dict)}
    # The library's defaults are those of the inner family; tying in the outer file applies to the whole model.
    return _with_defaults(outer | inner)


def _with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    family = str(fields.get("model_type", ""))
    tied = {"tie_word_embeddings": family.removesuffix("_text") in _TIED}
    return {**tied, **_DEFAULTS.get(family, {}), **{key: value for key, value in fields.items() if value is not None}}


def number(fields: Document, *names: str) -> int | None:
    """The first of these fields that holds a whole number above 0."""
    values = (fields.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def kv_heads(fields: Document, heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    return number(fields, *KV_HEADS) or heads


def listed(fields: Document, name: str) -> list[Any]:
    value = fields.get(name)
    return value if isinstance(value, list) else []


def needed(fields: Document, *wanted: tuple[str, ...]) -> tuple[int, ...]:
    """These fields, all of them. Raises PlanError that names all that are missing."""
    found = [number(fields, *names) for names in wanted]
    if missing := [names[0] for names, value in zip(wanted, found, strict=True) if value is None]:
        options = " ".join(f"--set {name}=N" for name in missing)
        raise PlanError(f"the model's config.json lacks {', '.join(missing)}: give {options}")
    return tuple(value for value in found if value is not None)


def read_checkpoint(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and config.json of a model, by its folder or its config.json. Raises PlanError."""
    config = _document(path / "config.json" if path.is_dir() else path)
    return str(path.resolve()) if path.is_dir() else str(config.get("_name_or_path") or "MODEL"), config


def weigh(path: Path, config: Document, value_bytes: int) -> tuple[int | None, str]:
    """Size of a model's weights in bytes, with floating-point values loaded as `value_bytes` each, and its source.

    The size is None if the folder has no weights. Raises PlanError.
    """
    text, folder = text_part(config), path if path.is_dir() else path.parent
    # Layers behind the last are for speculation, which is off unless asked for.
    layers = number(text, *LAYERS) if text.get("num_nextn_predict_layers") else None
    if files := _weight_files(folder):
        return _size(files, value_bytes, layers), "the headers of its safetensors files"
    total = number(_section(folder / _INDEX, "metadata"), "total_size")
    if total is not None:
        of_32_bits = "float32" in str(text.get("torch_dtype") or text.get("dtype"))
        return total * value_bytes // 4 if of_32_bits else total, f"total_size of {_INDEX}"
    return None, "counted from config.json"


def _document(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{file} is not there: give a model's folder, its config.json, or a backend's URL") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise PlanError(f"{file} is not a model's config.json")
    return found


def _section(file: Path, name: str) -> dict[str, Any]:
    found = _document(file).get(name) if file.is_file() else None
    return found if isinstance(found, dict) else {}


def _weight_files(folder: Path) -> list[Path]:
    """The files listed in the index, if there is one: a folder may hold the same weights in another form too."""
    index = folder / _INDEX
    if index.is_file():
        names = {str(name) for name in _section(index, "weight_map").values()}
        files = [folder / name for name in sorted(names)]
        return files if files and all(file.is_file() for file in files) else []
    return [file for file in [folder / "model.safetensors"] if file.is_file()] or sorted(folder.glob("*.safetensors"))


def _size(files: list[Path], value_bytes: int, layers: int | None) -> int:
    total = 0
    for file in files:
        for name, dtype, size in _tensors(file):
            found = _LAYER.search(name)
            if found and layers is not None and int(found[1]) >= layers:
                continue
            stored = _FLOATS.get(dtype)
            total += size * value_bytes // stored if stored and stored > 2 else size
    return total


def _tensors(file: Path) -> Iterator[tuple[str, str, int]]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, str(entry["dtype"]), end - start
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{file} is not a safetensors file: {error}") from None
