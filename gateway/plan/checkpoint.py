"""Reads a model's folder: config.json, and how many bytes its weights really take."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.plan import fields as of
from gateway.plan.fields import PlanError

_MOST_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder, or a config.json alone, says of a model."""

    name: str
    config: dict[str, Any]
    folder: Path

    def weigh(self, value_bytes: int) -> tuple[int | None, str]:
        """Bytes of its weights if floating-point ones are loaded with `value_bytes` each (None: they are not here),
        and where that is from. Raises PlanError.
        """
        text = of.text_part(self.config)
        # Layers behind the last are for speculation, which is off unless asked for.
        layers = of.number(text, of.LAYERS) if text.get("num_nextn_predict_layers") else None
        if files := _weight_files(self.folder):
            return _size(files, value_bytes, layers), "the headers of its safetensors files"
        index = self.folder / _INDEX
        total = of.number(_section(index, "metadata"), ("total_size",)) if index.is_file() else None
        if total is not None:
            of_32_bits = "float32" in str(text.get("torch_dtype") or text.get("dtype"))
            return total * value_bytes // 4 if of_32_bits else total, f"total_size of {_INDEX}"
        return None, "counted from config.json"


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a model's folder or its config.json. Raises PlanError."""
    file = path / "config.json" if path.is_dir() else path
    config = _document(file)
    name = str(path.resolve()) if path.is_dir() else str(config.get("_name_or_path") or "MODEL")
    return Checkpoint(name, config, file.parent)


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
    found = _document(file).get(name)
    return found if isinstance(found, dict) else {}


def _weight_files(folder: Path) -> list[Path]:
    """Those of the index, if there is one: a folder may hold the same weights in another form too."""
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
