"""What is installed already is left alone; what cannot be is left out with a word."""

import os
from pathlib import Path

import pytest

from loadtest.compare.peers import NotInstalled
from tests.bench import install as installing
from tests.bench.install import build_tools, install
from tests.bench.peers import PEERS
from tests.bench.place import Place
from tests.unit.bench.builders import make_peer, nowhere


def pretend_installed(place: Place, name: str, version: str) -> None:
    """What pip leaves behind."""
    venv = place.peers / name
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / name).touch()
    (venv / "lib/python3.11/site-packages" / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)


def test_tools_that_are_newer_than_their_sources_are_not_built_again(tools: Place) -> None:
    before = tools.load.stat().st_mtime_ns
    build_tools(tools)
    assert tools.load.stat().st_mtime_ns == before
    os.utime(tools.load, (0, 0))
    build_tools(tools)
    assert tools.load.stat().st_mtime_ns > before


def test_without_a_compiler_the_benchmark_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "find_compiler", lambda: None)
    with pytest.raises(NotInstalled, match=r"install a compiler \(cc\)"):
        build_tools(Place(tmp_path))


def test_a_peer_that_cannot_be_installed_is_skipped_with_a_word(tools: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    pretend_installed(tools, "smg", "1.13.0")
    absent = make_peer("haproxy", nowhere, debian="haproxy")
    said: list[str] = []
    assert install(tools, [absent, PEERS["smg"]], said.append) == [PEERS["smg"]]
    assert said[-1] == "skipping haproxy: it is not there, and installing haproxy needs apt-get and root"
