"""Hooks of MkDocs: the documentation site has the repository's paths, so links work in both.

A page keeps its path in the repository (`docs/routing.md`, `README.md`), and its address lacks the `docs/`. Files that
a page links to, such as `config/gateway.yaml`, become part of the site. So does Mermaid, if `make site` could install
it: browsers draw the diagrams with it, and load nothing from other hosts. Without it, diagrams are shown as text.
"""

import re
import sys
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).resolve().parents[1]
MERMAID = Path(sys.prefix) / "mermaid/mermaid.min.js"
_SCRIPT = "assets/javascripts/mermaid.min.js"
_LINK = re.compile(r"\]\(([^)\s#]+)")


def pages() -> list[Path]:
    """All pages: those of the repository's root, and of `docs`."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def linked_files(page: Path) -> set[Path]:
    """The files, other than pages, that a page links to or shows."""
    targets = {(page.parent / link).resolve() for link in _LINK.findall(page.read_text(encoding="utf-8"))}
    return {path for path in targets if path.is_file() and path.suffix != ".md" and path.is_relative_to(ROOT)}


def on_config(config: MkDocsConfig) -> None:
    """Called by MkDocs before everything else."""
    if MERMAID.is_file():
        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of `docs` and of the theme; what it returns is the site."""
    found = pages()
    found += sorted(set().union(*map(linked_files, found)))
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    if MERMAID.is_file():
        of_theme.append(File.generated(config, _SCRIPT, abs_src_path=str(MERMAID)))
    return Files([*of_theme, *(_file(path, config) for path in found)])


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Called by MkDocs with each page. The theme loads Mermaid from another host unless it is there already."""
    if '<pre class="mermaid">' not in output:
        return output
    script = f'<script src="{get_relative_url(_SCRIPT, page.url)}"></script>'
    return output.replace('<script id="__config"', f'{script}<script id="__config"', 1)


def _file(path: Path, config: MkDocsConfig) -> File:
    file = File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
    address = PurePosixPath(file.dest_uri)
    if address.is_relative_to("docs"):
        file.dest_uri = str(address.relative_to("docs"))
    return file
