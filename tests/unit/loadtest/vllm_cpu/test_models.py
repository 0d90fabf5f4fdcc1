"""A model appears only when it is complete, and is built once."""

from pathlib import Path

import pytest

from loadtest.vllm_cpu import models
from loadtest.vllm_cpu.models import build_missing


def test_only_missing_models_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BUILDERS", {"tiny": lambda target: (target / "config.json").write_text("{}")})
    assert build_missing(tmp_path) == ["tiny"]
    assert (tmp_path / "tiny/config.json").exists()
    assert build_missing(tmp_path) == []


def test_a_model_whose_building_failed_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path) -> None:
        (target / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(models, "BUILDERS", {"tiny": fail})
    with pytest.raises(OSError, match="disk full"):
        build_missing(tmp_path)
    assert not (tmp_path / "tiny").exists()
    monkeypatch.setattr(models, "BUILDERS", {"tiny": lambda target: (target / "config.json").write_text("{}")})
    assert build_missing(tmp_path) == ["tiny"]
    assert (tmp_path / "tiny/config.json").read_text() == "{}"
