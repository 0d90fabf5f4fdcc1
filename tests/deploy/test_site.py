"""The documentation site is complete: every page is in its navigation, and every link leads somewhere."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.browser import browser_page, needs_browser
from tests.deploy.conftest import ROOT
from tools.site import MERMAID

# What a browser loads with a page by itself. A link that a reader follows may lead anywhere.
_LOADED = re.compile(
    r"<(?:script|img|iframe|link rel=\"?(?:stylesheet|preconnect))\b[^>]*\b(?:src|href)=\"?([^\"\s>]+)"
)


def build(source: Path, site: Path) -> tuple[int, str]:
    """Exit code, and what the build prints."""
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(source / "mkdocs.yml"), "-d", str(site)]
    done = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    code, printed = build(ROOT, folder)
    assert code == 0, printed
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the site is made from."""
    for name in ("docs", "config", "deploy", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_the_readme_is_its_first_page_and_pages_of_docs_follow(site: Path) -> None:
    assert "An OpenAI-compatible gateway" in (site / "index.html").read_text()
    assert "<h1" in (site / "routing/index.html").read_text()
    assert "<h1" in (site / "decisions/index.html").read_text()


def test_files_that_pages_link_to_are_part_of_it(site: Path) -> None:
    assert (site / "config/gateway.yaml").read_bytes() == (ROOT / "config/gateway.yaml").read_bytes()


def test_its_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = {address for page in pages for address in _LOADED.findall(page.read_text())}
    assert any("assets/" in address for address in loaded)
    assert [address for address in loaded if address.startswith(("http:", "https:", "//"))] == []
    assert [page for page in pages if "fonts.googleapis" in page.read_text()] == []


def test_pages_with_diagrams_load_mermaid_from_the_site_before_the_theme_would_from_elsewhere(site: Path) -> None:
    drawn = [page for page in site.rglob("*.html") if '<pre class="mermaid">' in page.read_text()]
    assert {page.parent.name for page in drawn} == ({"ARCHITECTURE", "threat-model"} if MERMAID.exists() else set())
    for page in drawn:
        scripts = [address for address in _LOADED.findall(page.read_text()) if ".js" in address]
        assert (page.parent / scripts[0]).read_bytes() == MERMAID.read_bytes()


@needs_browser
@pytest.mark.skipif(not MERMAID.exists(), reason="Mermaid is not installed: make site")
async def test_a_browser_draws_the_diagrams(site: Path, tmp_path: Path) -> None:
    fences = (ROOT / "ARCHITECTURE.md").read_text().count("```mermaid")
    drawn = "[...document.querySelectorAll('div.mermaid')].filter(each => each.clientHeight > 100).length"
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        async with browser_page(tmp_path) as page:
            await page.open(f"http://127.0.0.1:{server.server_port}/ARCHITECTURE/")
            await page.until(f"{drawn} === {fences}")
            assert page.complaints == []
        server.shutdown()


def test_dead_links_and_pages_without_a_place_in_the_navigation_fail_the_build(copy: Path) -> None:
    (copy / "docs/lost.md").write_text("# Lost\n\n[a](nowhere.md) [b](../config/nothing.yaml) [c](keys.md#nothing)\n")
    with (copy / "README.md").open("a") as readme:
        readme.write("\n[d](docs/routing.md#nothing)\n")
    code, printed = build(copy, copy / "built")
    assert code != 0
    for found in ("docs/lost.md", "nowhere.md", "config/nothing.yaml", "keys.md#nothing", "docs/routing.md#nothing"):
        assert found in printed
