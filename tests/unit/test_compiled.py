"""Which build runs: compiled modules stand for the sources that they were compiled from, and for no others."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path

import pytest

from gateway.compiled import COMPILED, DIGEST, FOLDER, PYTHON, VARIABLE, CompiledModules, choose, digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a compiled module, made of its sources as they are."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "hot.py").write_text("answer = 42\n")
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / f"package.hot{EXTENSION_SUFFIXES[0]}").touch()
    (folder / DIGEST).write_text(digest(tmp_path))
    return tmp_path


def test_compiled_modules_run_if_no_source_has_changed(package: Path) -> None:
    assert choose(package) == COMPILED
    found = sys.meta_path[0]
    assert isinstance(found, CompiledModules)
    spec = found.find_spec("package.hot")
    assert spec is not None
    assert isinstance(spec.loader, ExtensionFileLoader)
    assert found.find_spec("package.cold") is None


@pytest.mark.parametrize("change", ["answer = 43\n", "answer = 42\n\n"])
def test_changed_sources_run_as_python(package: Path, change: str) -> None:
    (package / "hot.py").write_text(change)
    assert choose(package) == PYTHON


def test_a_source_that_was_not_compiled_counts_because_compiled_code_relies_on_its_types(package: Path) -> None:
    (package / "cold.py").touch()
    assert choose(package) == PYTHON


def test_without_compiled_modules_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose(tmp_path) == PYTHON


def test_the_environment_chooses_python(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    before = [*sys.meta_path]
    assert choose(package) == PYTHON
    assert sys.meta_path == before


def test_the_environment_demands_compiled_modules(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert choose(package) == COMPILED
    (package / "hot.py").write_text("")
    with pytest.raises(ImportError, match="make build"):
        choose(package)
