"""Lock what the image installs, with hashes: `python -m tests.image.lock`, or `make lock`.

One file for the base, one for what each extra adds, and one for the tools of the build. All come from one resolution,
so any of them fit together. uv resolves, for every platform and Python.
"""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy/image"
EXTRAS = ("batches-postgres", "batches-s3", "coordination", "discovery", "kubernetes", "otel", "tokenizer")
BUILD = ("cyclonedx-bom>=7.5", "hatchling>=1.27", "mypy>=2.4.1", "setuptools>=77")
_HEAD = "# Made by `make lock`. Pinned with hashes for `pip install --require-hashes --no-deps -r`.\n"


def wanted() -> dict[str, list[str]]:
    """The requirements of each lock, by its name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    extras = {name: project["optional-dependencies"][name] for name in EXTRAS}
    return {"base": project["dependencies"], **extras, "build": [*BUILD]}


def entries(lock: str) -> dict[str, list[str]]:
    """The pins of a lock by package; one that depends on the platform has several."""
    found: dict[str, list[str]] = {}
    for line in lock.splitlines(keepends=True):
        if line[0] not in " #":
            pins = found.setdefault(canonicalize_name(Requirement(line.rstrip().removesuffix("\\")).name), [])
            pins.append(line)
        elif line.startswith("    --hash"):
            pins[-1] += line
    return found


def resolved(requirements: list[str], constraints: str = "") -> str:
    """The lock of these requirements."""
    bounds = ROOT / ".image/constraints.txt"
    bounds.parent.mkdir(exist_ok=True)
    bounds.write_text(constraints)
    options = ("--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate")
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", *options, "-c", str(bounds), "-"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, input="\n".join(requirements))
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    groups = wanted()
    pins = resolved([each for group in groups.values() for each in group])
    base = entries(resolved(groups["base"], pins))
    for name, requirements in groups.items():
        lock = entries(resolved(requirements, pins))
        kept = [
            pin for package, each in lock.items() if name in ("base", "build") or package not in base for pin in each
        ]
        LOCKS.mkdir(parents=True, exist_ok=True)
        (LOCKS / f"{name}.lock").write_text(_HEAD + "".join(kept))


if __name__ == "__main__":
    main()
