"""Takes the pictures of the pages anew, from the committed captures of an H200; needs the group `test` and chromium.

python docs/pictures.py
"""

from __future__ import annotations

import io
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

from PIL import Image

DOCS = Path(__file__).parent
DATA = DOCS.parent / "tests" / "data"
PLOTS = {
    "layers": "checkpoint-2023.4",
    "timeline": "hooks-ddp-2024.2",
}
"""The views of the plots, and the capture that shows each best."""

CHROMIUM = which("chromium") or which("google-chrome")


def run(folder: Path, *words: str) -> None:
    """The command line of this tree, in a folder, so that captures are named without one."""
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    subprocess.run([sys.executable, "-m", "nvprof_kit", *words], check=True, cwd=folder, env=environment)


@contextmanager
def page(path: Path, scheme: str = "light", width: int = 1100) -> Iterator[Any]:
    """A report, open in a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.goto(path.as_uri())
        yield opened
        browser.close()


def save(name: str, shot: bytes) -> None:
    """A picture in few colours, which makes it small."""
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(
        DOCS / "images" / name, optimize=True
    )


def save_half(path: Path, name: str) -> None:
    """A picture at half its size."""
    with Image.open(path) as picture, io.BytesIO() as half:
        picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS).save(half, "png")
        save(name, half.getvalue())


def report_pictures(folder: Path) -> None:
    """The report of a Llama, from the top to the timeline, and the timeline of a DDP rank in dark."""
    for name in ("llama-2023.4", "hooks-ddp-2024.2"):
        (folder / f"{name}.sqlite.xz").symlink_to(DATA / f"{name}.sqlite.xz")
        run(folder, "report", f"{name}.sqlite.xz", "-o", f"{name}.html")
    with page(folder / "llama-2023.4.html") as opened:
        opened.add_style_tag(content=".scroll { max-height: 17rem } .findings li:nth-child(n + 3) { display: none }")
        save("report.png", opened.screenshot(clip={"x": 0, "y": 0, "width": 1100, "height": 1340}, full_page=True))
    with page(folder / "hooks-ddp-2024.2.html", "dark") as opened:
        save("report-timeline.png", opened.locator("#c0-timeline-section").screenshot())


def memory_pictures(folder: Path) -> None:
    """The model's tree by memory, and the timeline of a snapshot."""
    (folder / "run.pickle").write_bytes(lzma.decompress((DATA / "snapshots" / "run-2.11.pickle.xz").read_bytes()))
    run(folder, "memory", "run.pickle", "-o", "timeline.png")
    save_half(folder / "timeline.png", "memory-timeline.png")
    (folder / "memory.sqlite.xz").symlink_to(DATA / "memory" / "caching-2024.2.sqlite.xz")
    run(folder, "report", "memory.sqlite.xz", "-o", "memory.html")
    with page(folder / "memory.html") as opened:
        opened.select_option("[data-measure=c0]", "kept")
        save("report-memory.png", opened.locator("section:has(#c0-icicle)").screenshot())


def plot_pictures(folder: Path) -> None:
    """Every view of the plots, at half their size."""
    for view, capture in PLOTS.items():
        (folder / f"plot-{view}.sqlite.xz").symlink_to(DATA / f"{capture}.sqlite.xz")
        run(folder, "layers" if view == "layers" else "plot", f"plot-{view}.sqlite.xz", "-o", f"plot-{view}.png")
        save_half(folder / f"plot-{view}.png", f"plot-{view}.png")


def perfetto_picture(folder: Path) -> None:
    """A step of a DDP rank in the Perfetto UI."""
    sys.path.insert(0, str(DATA.parent))
    from support.browser import browser
    from support.perfetto_ui import opened_in_perfetto

    (folder / "ddp.sqlite.xz").symlink_to(DATA / "ddp.rank0-2024.2.sqlite.xz")
    run(folder, "export", "ddp.sqlite.xz", "--steps", "2", "-o", "step.json")
    with browser() as started, opened_in_perfetto(started, folder / "step.json") as ui:
        ui.page.set_viewport_size({"width": 1200, "height": 640})
        ui.expand()
        save("perfetto.png", ui.page.screenshot())


def main() -> None:
    """Take every picture."""
    with tempfile.TemporaryDirectory() as folder:
        report_pictures(Path(folder))
        memory_pictures(Path(folder))
        plot_pictures(Path(folder))
        perfetto_picture(Path(folder))


if __name__ == "__main__":
    main()
