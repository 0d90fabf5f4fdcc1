"""Links between the pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {_NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    return not target.exists() or (bool(anchor) and target.suffix == ".md" and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_another_page_leads_there(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if not link.startswith("http")]
    assert [link for link in links if leads_nowhere(page, link)] == []


def test_a_link_to_a_page_or_heading_that_is_not_there_is_noticed() -> None:
    page = ROOT / "README.md"
    assert leads_nowhere(page, "docs/nothing.md")
    assert leads_nowhere(page, "ARCHITECTURE.md#nothing")
    assert not leads_nowhere(page, "ARCHITECTURE.md#code-map")
