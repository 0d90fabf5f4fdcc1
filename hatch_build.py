"""Compiles the hot modules of the gateway, for wheels and in place: `python hatch_build.py`, which is `make build`.

mypyc compiles the modules that pyproject.toml lists, and the C compiler those of `gateway/_native`. The sources stay
beside them: `gateway/compiled.py` says when which run. The environment variable GATEWAY_PURE decides about a wheel:
1 = without compiled modules; 0 = with them, and an error if that is not possible; unset = with them if possible.
"""

import contextlib
import os
import runpy
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REQUIRES = ["mypy>=2.4.1", "setuptools>=77"]
# Types of other packages are not looked at: what is compiled must not depend on what is installed.
MYPY = ["--config-file=", "--cache-dir=/dev/null", "--no-site-packages", "--ignore-missing-imports"]
MYPY += ["--follow-imports=silent", "--disallow-subclassing-any"]  # a native class needs bases that are known
SPEED = {"opt_level": "2", "debug_level": "0"}
C_FLAGS = ["-O3", "-g0", "-Werror=implicit"]


class CompiledBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to a wheel; editable installations have none."""

    def dependencies(self) -> list[str]:
        return [] if why_not() else REQUIRES

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        reason = why_not()
        if reason is None:
            try:
                self.add_compiled(build_data)
                return
            except (Exception, SystemExit) as error:  # mypyc exits
                reason = f"compiling failed: {error}"
        if os.environ.get("GATEWAY_PURE") == "0":
            raise RuntimeError(f"GATEWAY_PURE=0 wants compiled modules: {reason}.")
        self.app.display_info(f"Without compiled modules: {reason}.")

    def add_compiled(self, build_data: dict[str, Any]) -> None:
        self.scratch = tempfile.TemporaryDirectory()  # until the wheel is written
        folder = Path(self.scratch.name, "compiled")
        compile_gateway(Path(self.root), self.config, Path(self.scratch.name), folder)
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["force_include"][str(folder)] = "gateway/_compiled"


def why_not() -> str | None:
    """Why nothing is compiled here."""
    if os.environ.get("GATEWAY_PURE") == "1":
        return "GATEWAY_PURE is 1"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"there are no headers of Python ({header})"


def listed(patterns: list[str]) -> set[str]:
    """Files of the gateway, relative to the root, which is the current folder."""
    return {str(file) for pattern in patterns for file in Path("gateway").glob(pattern)}


def compile_gateway(root: Path, settings: dict[str, list[str]], scratch: Path, folder: Path) -> None:
    """Compile into the folder, which has nothing else afterwards. Needs the packages of `REQUIRES`.

    What is in the scratch folder from an earlier time is not compiled again if it has not changed.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    class BuildExtensions(build_ext):
        """Compiles as many files of an extension at a time as there are cores."""

        def build_extensions(self) -> None:
            compile_each = self.compiler.compile

            def compile_all(sources: list[str], output_dir: str, **options: Any) -> list[str]:
                headers = max((file.stat().st_mtime for file in scratch.rglob("*.h")), default=0.0)

                def compile_one(source: str) -> str:
                    (built,) = self.compiler.object_filenames([source], output_dir=output_dir)
                    changed = max(headers, Path(source).stat().st_mtime)
                    if not Path(built).exists() or Path(built).stat().st_mtime <= changed:
                        compile_each([source], output_dir=output_dir, **options)
                    return built

                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    return list(pool.map(compile_one, sources))

            self.compiler.compile = compile_all
            super().build_extensions()

    with contextlib.chdir(root):
        builds = runpy.run_path("gateway/compiled.py")
        compiled_from = builds["digest"](Path("gateway"))
        sources = sorted(listed(settings["compiled"]) - listed(settings["interpreted"]))
        extensions = mypycify(
            [*MYPY, *sources], group_name="gateway", multi_file=True, target_dir=str(scratch), **SPEED
        )
        for file in sorted(Path("gateway/_native").glob("*.c")):
            extensions.append(Extension(f"gateway._native.{file.stem}", [str(file)], extra_compile_args=C_FLAGS))
        built = scratch / "built"
        command = BuildExtensions(Distribution({"ext_modules": extensions}))
        command.build_lib, command.build_temp = str(built), str(scratch / "objects")
        command.ensure_finalized()
        command.run()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in built.rglob("*"):
            if file.is_file():
                shutil.move(file, folder / ".".join(file.relative_to(built).parts))
        (folder / builds["DIGEST"]).write_text(compiled_from)


def main() -> None:
    """Compile in place."""
    root = Path(__file__).parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    if reason := why_not():
        sys.exit(f"Cannot compile: {reason}.")
    compile_gateway(root, settings["hooks"]["custom"], root / "build" / "compiled", root / "gateway" / "_compiled")


if __name__ == "__main__":
    main()
