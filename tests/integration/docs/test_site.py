"""The documentation as a site: it builds strictly, says what the program knows, and loads nothing from elsewhere."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.cli import execute
from support.data import ROOT

import nvprof_kit

sys.path.insert(0, str(ROOT / "docs"))
import generate  # of the site itself

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built for reading without a network."""
    pytest.importorskip("mkdocs")
    place = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    execute(*command, cwd=ROOT, check=True, OFFLINE="true", NO_MKDOCS_2_WARNING="1")
    return place


def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?https?:|<link\b[^>]*\bstylesheet[^>]*https?:")
    found = {page.name: loads.findall(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert len(found) > 30
    assert {page: urls for page, urls in found.items() if urls} == {}


def test_notebooks_are_pages_with_their_outputs(site):
    page = (site / "notebooks" / "two-ranks.html").read_text(encoding="utf-8")
    assert "rank 1 is the straggler" in page
    assert 'class="output"' in page and "two-ranks.ipynb" in page
    assert list((site / "notebooks").glob("two-ranks*.png"))


def test_every_generated_text_is_on_a_page(site, monkeypatch):
    """And on the page of the API each public name, with what fields hold and nothing private."""
    named = set(re.findall(r"^<!-- ([a-z0-9-]+) -->$", "".join(map(text, (ROOT / "docs").rglob("*.md"))), re.M))
    monkeypatch.setattr(generate, "_example", str)  # the site has them: here only names count
    monkeypatch.setattr(generate, "attribution_programs", str)
    assert named == set(generate.texts.__wrapped__())
    page = re.sub(r"<[^>]+>", "", text(site / "api.html"))
    assert [name for name in nvprof_kit.__all__ if name not in page] == []
    assert re.findall(r"nvprof_kit\._[a-z]\w*", page) == []
    for heading in ("Verdict of ", "CaptureInfo of "):  # of classes that fields hold
        assert heading in page
    assert "Usage: nvprof-kit layers [OPTIONS] CAPTURE..." in text(site / "layers.html")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_scripts_are_no_pages(site):
    assert [path.name for path in site.rglob("*.py")] == []


def test_the_search_of_an_offline_copy_finds_a_page(site, chromium, tmp_path):
    copy = tmp_path / "moved"
    shutil.copytree(site, copy)
    page = chromium.new_page(viewport={"width": 1300, "height": 900})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((copy / "how-to" / "idle-gpu.html").as_uri())
    page.fill("input.md-search__input", "straggler")
    page.wait_for_selector(".md-search-result__item a")
    assert page.locator(".md-search-result__item").count() >= 2
    assert [url for url in asked if url.startswith("http")] == []


@pytest.mark.parametrize("page", ["index.html", "how-to/slow-rank.html", "notebooks/two-ranks.html", "layers.html"])
def test_a_page_fits_a_narrow_screen(page, site, chromium):
    shown = chromium.new_page(viewport={"width": 400, "height": 800})
    shown.goto((site / page).as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0  # wide tables scroll by themselves
