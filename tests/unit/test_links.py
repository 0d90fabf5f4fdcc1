"""Pages that code, configuration and manifests mention exist; tests/deploy/test_site.py has the pages' own links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("gateway", "loadtest", "config", "deploy")
SUFFIXES = {".py", ".c", ".jinja", ".yaml", ".yml", ".json", ".txt", ".tpl", ".conf", ".cfg", ".service", ".socket"}
_MENTION = re.compile(r"\b((?:docs/[\w/-]+|README|ARCHITECTURE|CHANGELOG|CONTRIBUTING)\.md)(?:#([\w-]+))?")
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {_NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def dead(text: str) -> list[str]:
    """The mentions of pages, or of sections of pages, that do not exist."""
    found = []
    for mention in _MENTION.finditer(text):
        page, anchor = ROOT / mention[1], mention[2]
        if not page.exists() or (anchor and anchor not in anchors(page)):
            found.append(mention[0])
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_page_that_a_file_mentions_is_there(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and "_compiled" not in path.parts]
    assert len(files) > 3
    assert {path.name: found for path in files if (found := dead(path.read_text(encoding="utf-8")))} == {}


def test_every_page_that_a_recipe_mentions_is_there() -> None:
    assert (
        dead((ROOT / "Makefile").read_text(encoding="utf-8") + (ROOT / "Dockerfile").read_text(encoding="utf-8")) == []
    )


def test_a_page_or_a_heading_that_is_not_there_is_noticed() -> None:
    assert dead("see docs/nothing.md") == ["docs/nothing.md"]
    assert dead("see ARCHITECTURE.md#nothing") == ["ARCHITECTURE.md#nothing"]
    assert dead("see ARCHITECTURE.md#core-and-features, docs/keys.md.") == []
