"""What the Helm chart makes of values."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/kubernetes/chart"
Objects = list[dict[str, Any]]


@pytest.fixture(scope="session")
def helm() -> str:
    """The program, which the package helm-binary brings for Linux on x86-64."""
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    if found is None:
        pytest.skip("helm is not installed")
    return found


@pytest.fixture(scope="session")
def template(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """Renders the chart with values. Raises AssertionError with Helm's message."""
    folder = tmp_path_factory.mktemp("values")

    def render(values: dict[str, Any]) -> str:
        file = folder / "values.yaml"
        file.write_text(json.dumps(values))
        command = [helm, "template", "gateway", str(CHART), "--namespace", "inference", "-f", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return render


@pytest.fixture(scope="session")
def objects(template: Callable[[dict[str, Any]], str]) -> Callable[..., Objects]:
    """The objects of a release with these values."""

    def make(**values: Any) -> Objects:
        return [each for each in yaml.safe_load_all(template(values)) if each]

    return make
