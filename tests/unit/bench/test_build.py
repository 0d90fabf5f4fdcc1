"""Which Python the gateway is measured on, and when it is installed anew."""

import sys
from pathlib import Path

import pytest

from loadtest.compare.peers import OURS, NotInstalled
from tests.bench import build
from tests.bench.build import Interpreter, install_gateway, interpreter, quotable
from tests.bench.place import Place


def _python(folder: Path, name: str, arguments: str, prefix: str) -> str:
    """A program that describes itself as an interpreter does."""
    program = folder / name
    described = f'{{"name": "CPython 3.13.1", "arguments": "{arguments}", "prefix": "{prefix}"}}'
    program.write_text(f"#!/bin/sh\necho '{described}'\n")
    program.chmod(0o755)
    return str(program)


def test_a_python_tells_how_it_was_built(tmp_path: Path) -> None:
    assert interpreter().name.startswith("CPython 3.")
    assert interpreter(_python(tmp_path, "both", "--enable-optimizations --with-lto", "/usr/local")).optimised
    assert interpreter(_python(tmp_path, "of-debian", "--enable-shared", "/usr")).optimised
    plain = interpreter(_python(tmp_path, "plain", "--enable-optimizations", "/opt/python"))
    assert str(plain) == "CPython 3.13.1 (a plain build, without PGO and LTO)"


def test_the_first_optimised_one_is_taken(tmp_path: Path) -> None:
    plain = _python(tmp_path, "plain", "", "/opt/python")
    fast = _python(tmp_path, "fast", "", "/usr")
    assert quotable([plain, str(tmp_path / "missing"), fast]).path == fast
    with pytest.raises(NotInstalled, match="name one by --python, or measure this checkout with --as-is"):
        quotable([plain])
    with pytest.raises(NotInstalled, match="is no Python"):
        interpreter(str(tmp_path / "missing"))


def test_the_gateway_is_installed_once_for_each_state_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, place, said = tmp_path / "project", Place(tmp_path / "bench"), list[str]()
    (project / "small").mkdir(parents=True)
    (project / "small" / "__init__.py").touch()
    (project / "pyproject.toml").write_text('[project]\nname = "small"\nversion = "1"\n')
    monkeypatch.setattr(build, "_PROJECT", project)
    monkeypatch.setattr(build, "_PACKAGE", "small")
    monkeypatch.setattr(build, "_BUILT_BY", ("pyproject.toml",))
    installed: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        installed.append(command)
        (place.peers / OURS).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(build.subprocess, "run", run)
    python = Interpreter(sys.executable, "CPython", optimised=True)
    install_gateway(place, python, said.append)
    assert [command[-1] for command in installed] == [str(place.peers / OURS), str(project)]
    install_gateway(place, python, said.append)
    assert len(said) == 1
    (project / "small" / "__init__.py").write_text("more = 1")
    install_gateway(place, python, said.append)
    assert len(said) == 2
