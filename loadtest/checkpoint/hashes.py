"""SHA-256 of files, of model folders, of plans and of what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import orjson

from loadtest.checkpoint.document import ModelFiles
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record

# What decides how a model is read and what its prompts become, besides its weights.
_MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def artefacts(paths: Iterable[Path]) -> dict[str, str]:
    """By name, of files that are all in one folder."""
    return {path.name: sha256_of(path) for path in sorted(paths)}


def model_files(folder: Path) -> ModelFiles | None:
    """A model's folder; None where there is none of that name here."""
    if not (folder / "config.json").is_file():
        return None
    small = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file()})
    weights = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file()})
    return ModelFiles(
        folder=str(folder),
        sha256={path.name: sha256_of(path) for path in small},
        weights_bytes={path.name: path.stat().st_size for path in weights},
    )


def plan_sha256(plan: Plan) -> str:
    """Of everything that decides what is sent and when, target and salt aside."""
    fields = plan.model_dump(mode="json", exclude={"url", "cache_salt", "api_key"})
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()


def sent_sha256(records: Iterable[Record]) -> str:
    """Over the hashes of the bodies, in order of the requests' index and turn; what was never sent has none."""
    sent = sorted((record.index, record.turn, record.body_hash) for record in records if record.body_hash)
    return hashlib.sha256("".join(f"{index} {turn} {body}\n" for index, turn, body in sent).encode()).hexdigest()
