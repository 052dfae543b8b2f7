"""A headless Chromium without network access."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--proxy-server=127.0.0.1:9",
)


def chromium() -> str:
    """Path of a Chromium; without one the test is skipped, or fails where NVPROF_KIT_REQUIRE_CHROMIUM=1."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        absent = pytest.fail if os.environ.get("NVPROF_KIT_REQUIRE_CHROMIUM") == "1" else pytest.skip
        absent("no chromium on PATH (apt-get install chromium)")
    return str(found)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser started by playwright."""
    path = chromium()
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright (pip install playwright)")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), headless=True)
        yield opened
        opened.close()


@contextmanager
def opened(started: Any, path: Path, **context: Any) -> Iterator[Any]:
    """An open page; console messages and network requests are errors."""
    trouble: list[str] = []
    page = started.new_page(**{"viewport": {"width": 1280, "height": 900}, **context})
    page.on("console", lambda message: trouble.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    own = path.as_uri()
    page.on("request", lambda asked: asked.url.split("#")[0] == own or trouble.append(f"request: {asked.url}"))
    page.goto(path.as_uri())
    page.wait_for_selector("html:not([data-loading])", state="attached")
    yield page
    page.close()
    assert trouble == []
