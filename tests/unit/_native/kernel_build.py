"""The extension as it is now, whether or not one is installed."""

import subprocess
import sysconfig
import tempfile
from functools import cached_property
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.bench.install import find_compiler

_SOURCE = Path(__file__).resolve().parents[3] / "gateway" / "_native" / "kernel.c"
_INCLUDE = sysconfig.get_path("include")


class BuiltKernel:
    """The extension. It is compiled when a test first asks for one of its functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @cached_property
    def _module(self) -> ModuleType:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "kernel.so")
            flags = ["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-fPIC", "-shared", f"-I{_INCLUDE}"]
            subprocess.run([str(find_compiler()), *flags, str(_SOURCE), "-o", str(library)], check=True)
            spec = spec_from_file_location("gateway._native.kernel", library)
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        return module


def built_kernel() -> BuiltKernel | None:
    """None without a C compiler or Python's headers."""
    return BuiltKernel() if find_compiler() is not None and Path(_INCLUDE, "Python.h").exists() else None
