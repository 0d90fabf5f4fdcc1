"""Hooks of MkDocs: the documentation site has the repository's paths, so links work in both.

A page keeps its path in the repository (`docs/routing.md`, `README.md`), and its address lacks the `docs/`. Files that
a page links to, such as `config/gateway.yaml`, become part of the site.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^)\s#]+)")


def pages() -> list[Path]:
    """All pages: those of the repository's root, and of `docs`."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def linked_files(page: Path) -> set[Path]:
    """The files, other than pages, that a page links to or shows."""
    targets = {(page.parent / link).resolve() for link in _LINK.findall(page.read_text(encoding="utf-8"))}
    return {path for path in targets if path.is_file() and path.suffix != ".md" and path.is_relative_to(ROOT)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of `docs` and of the theme; what it returns is the site."""
    found = pages()
    found += sorted(set().union(*map(linked_files, found)))
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*of_theme, *(_file(path, config) for path in found)])


def _file(path: Path, config: MkDocsConfig) -> File:
    file = File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
    address = PurePosixPath(file.dest_uri)
    if address.is_relative_to("docs"):
        file.dest_uri = str(address.relative_to("docs"))
    return file
