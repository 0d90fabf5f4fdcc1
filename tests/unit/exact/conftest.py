"""Model folders for the tests."""

from pathlib import Path

import pytest

from tests.unit.exact import models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level tokenizer whose template wants a turn's content as text."""
    return models.saved(models.byte_level(), tmp_path_factory.mktemp("models") / "bytes", models.STRING_TEMPLATE)


@pytest.fixture(scope="session")
def folders(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tokenizers and templates of several kinds."""
    place: Path = tmp_path_factory.mktemp("models")
    left = {models.START: False, models.END: True}
    return {
        "bytes": folder,
        "parts": models.saved(models.byte_level(), place / "parts", models.PARTS_TEMPLATE),
        "pieces": models.saved(models.sentence_piece(), place / "pieces", models.STRING_TEMPLATE),
        "left": models.saved(models.byte_level(left), place / "left", models.STRING_TEMPLATE),
        "bare": models.saved(models.byte_level(), place / "bare", None),
    }
