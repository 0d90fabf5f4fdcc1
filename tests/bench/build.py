"""The gateway as it is measured: compiled, in an environment of its own, on a Python built with PGO and LTO."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.compiled import digest
from loadtest.compare.peers import OURS, NotInstalled, Say
from tests.bench.place import SOURCES, Place

_PROJECT = SOURCES.parents[1]
_PACKAGE, _BUILT_BY = "gateway", ("pyproject.toml", "hatch_build.py")
_DISTRIBUTION = "/usr/bin/python3"
_DESCRIBE = """
import json, platform, sys, sysconfig
arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
name = f"{platform.python_implementation()} {platform.python_version()}"
print(json.dumps({"name": name, "arguments": arguments, "prefix": sys.base_prefix}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python and how it was built: a plain build costs the gateway 7 to 29 % more CPU."""

    path: str
    name: str
    optimised: bool

    def __str__(self) -> str:
        return f"{self.name} ({'PGO and LTO' if self.optimised else 'a plain build, without PGO and LTO'})"


def interpreter(path: str = sys.executable) -> Interpreter:
    """What PATH runs. Raises NotInstalled."""
    try:
        printed = subprocess.run([path, "-I", "-c", _DESCRIBE], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled(f"{path} is no Python: {error}") from error
    found = json.loads(printed)
    asked_for = all(flag in found["arguments"] for flag in ("--enable-optimizations", "--with-lto"))
    # Distributions build theirs with both, and not all of them by these arguments.
    return Interpreter(path, found["name"], asked_for or found["prefix"] == "/usr")


def quotable(candidates: Sequence[str] = (sys.executable, _DISTRIBUTION)) -> Interpreter:
    """The first of them that was built with PGO and LTO. Raises NotInstalled."""
    for path in candidates:
        if shutil.which(path) and (found := interpreter(path)).optimised:
            return found
    raise NotInstalled(
        f"figures are measured on a Python built with PGO and LTO, and none of {', '.join(candidates)} is one: name one"
        " by --python, or measure this checkout with --as-is (not to be quoted)"
    )


def install_gateway(place: Place, python: Interpreter, say: Say) -> None:
    """Compile and install this checkout, unless it is there. Raises NotInstalled."""
    venv = place.peers.absolute() / OURS
    stamp, wanted = venv / "built-from", _digest(python)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"building the gateway for {python} into {venv}")
    shutil.rmtree(venv, ignore_errors=True)
    try:
        subprocess.run([python.path, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, str(_PROJECT)], check=True, env=os.environ | {"GATEWAY_PURE": "0"})
    except subprocess.CalledProcessError as error:
        raise NotInstalled(f"the gateway did not install for {python} (exit {error.returncode})") from error
    stamp.write_text(wanted)


def _digest(python: Interpreter) -> str:
    content = hashlib.sha256(f"{python.path} {python.name} {digest(_PROJECT / _PACKAGE)}".encode())
    for file in _BUILT_BY:
        content.update((_PROJECT / file).read_bytes())
    return content.hexdigest()
