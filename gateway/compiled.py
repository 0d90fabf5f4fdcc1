"""Which build runs: the gateway's Python, or the modules that `hatch_build.py` compiled from it.

Compiled modules are in a folder of their own, with a digest of the sources that they were compiled from. Sources that
have changed since run as Python: a compiled module never stands for another source than its own.

The environment variable GATEWAY_PURE decides: 1 = Python; 0 = compiled, and an error if that is not possible; unset =
compiled if possible.
"""

import hashlib
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

VARIABLE = "GATEWAY_PURE"
FOLDER = "_compiled"
DIGEST = "sources"  # a file in the folder
COMPILED, PYTHON = "compiled", "python"


def digest(package: Path) -> str:
    """Of the sources that a compiled build depends on: those it was compiled from, and the types that these use."""
    hashed = hashlib.blake2b(digest_size=16)
    for file in sorted([*package.rglob("*.py"), *package.glob("_native/*.[ch]")]):
        hashed.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()


class CompiledModules(MetaPathFinder):
    """Finds the modules of a folder with files named by the modules' full names."""

    def __init__(self, folder: Path) -> None:
        suffix = EXTENSION_SUFFIXES[0]
        self.files = {file.name.removesuffix(suffix): file for file in folder.glob(f"*{suffix}")}

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def choose(package: Path) -> str:
    """The build to run, `COMPILED` or `PYTHON`; modules that are imported from now on are of that build."""
    wanted, folder = os.environ.get(VARIABLE), package / FOLDER
    if wanted == "1":
        return PYTHON
    found = CompiledModules(folder)
    if found.files and (folder / DIGEST).read_text() == digest(package):
        sys.meta_path.insert(0, found)
        return COMPILED
    if wanted == "0":
        raise ImportError(f"{VARIABLE}=0, and {folder} was not compiled from these sources: run make build.")
    return PYTHON
