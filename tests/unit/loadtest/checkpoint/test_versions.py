"""Revisions and packages."""

import subprocess
from pathlib import Path

from loadtest.checkpoint.fingerprints import freeze, freeze_from, freeze_of, source


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_tree_reports_its_revision_and_whether_it_is_changed(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = source(tmp_path)
    assert len(clean.git_revision or "") == 40
    assert clean.dirty is False
    (tmp_path / "file").write_text("two")
    assert source(tmp_path).dirty is True


def test_what_is_installed_has_no_revision_and_says_so(tmp_path: Path) -> None:
    found = source(tmp_path)
    assert (found.git_revision, found.dirty, found.why) == (None, None, "not run from a git checkout")


def test_a_freeze_depends_on_names_and_versions_alone() -> None:
    one = freeze_from([("Torch", "2.9"), ("b_c", "1"), ("torch", "0.0")])
    same = freeze_from([("b-c", "1"), ("torch", "2.9")])
    assert one == same
    assert (one.packages, one.named) == (2, {"torch": "2.9"})
    assert freeze_from([("b-c", "2"), ("torch", "2.9")]).sha256 != one.sha256


def test_this_environment_has_packages() -> None:
    assert "aiohttp" in freeze().named


def test_the_environment_of_a_command_is_that_of_its_python(tmp_path: Path) -> None:
    packages = tmp_path / "venv/lib/python3.11/site-packages/vllm-9.9.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    found = freeze_of(tmp_path, ["venv/bin/python", "-m", "vllm"])
    assert found is not None
    assert found.named == {"vllm": "9.9"}
    assert freeze_of(tmp_path, ["/usr/bin/python3", str(tmp_path / "venv/bin/vllm")]) == found
    assert freeze_of(tmp_path, ["/usr/bin/python3"]) is None
