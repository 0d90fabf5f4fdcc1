"""The extension as it is now, whether or not one is installed."""

import subprocess
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from tests.bench.install import find_compiler

_SOURCE = Path(__file__).resolve().parents[3] / "gateway" / "_native" / "kernel.c"


def built_kernel() -> ModuleType | None:
    """Compiled from the source; None without a C compiler or Python's headers."""
    include, compiler = sysconfig.get_path("include"), find_compiler()
    if compiler is None or not Path(include, "Python.h").exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        flags = ["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-fPIC", "-shared", f"-I{include}"]
        subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(library)], check=True)
        spec = spec_from_file_location("gateway._native.kernel", library)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
