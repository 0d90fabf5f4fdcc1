"""The wheel: what it holds and says of itself."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"GATEWAY_PURE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_it_holds_two_typed_packages_and_their_templates(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {Path(name).parts[0] for name in names if ".dist-info" not in name} == {"gateway", "loadtest"}
    assert {"gateway/py.typed", "loadtest/py.typed", "gateway/cli/check.jinja"} <= names
    assert not [name for name in names if "_compiled" in name]


def test_it_says_what_it_is_and_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
