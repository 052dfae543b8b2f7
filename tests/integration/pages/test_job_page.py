"""The page of a job in a real browser: heat maps by pointer and keyboard, ranks in time, 2 and 1,024 ranks."""

from pathlib import Path

import pytest
from support.browser import opened
from support.captures import tiny_ranks
from support.captures.synthetic_job import Fault, SyntheticJob, write_maps
from support.data import DATA

from nvprof_kit import open_job

EVIL = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    captures = [DATA / "ranks" / f"ranks-ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1)]
    return open_job(captures).report().save(tmp_path_factory.mktemp("page") / "pair.html")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    fault = Fault("slow_layer", rank=341, layer=3)
    write_maps(SyntheticJob(rows=32, columns=32, steps=3, per_step=12, fault=fault), folder / "maps", 256)
    return open_job(folder / "maps").report().save(folder / "many.html")


def test_two_real_ranks(chromium, pair):
    with opened(chromium, pair) as page:
        assert page.inner_text(".verdict").startswith("rank 1 is the straggler")
        assert page.locator("[data-rank]").count() == 2 and page.locator("canvas").count() == 4
        page.focus("#c0-matrix canvas")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#c0-matrix-detail") == "rank 0 waited for rank 0: not there"
        page.keyboard.press("ArrowRight")
        # without step 3, in which the profilers started
        said = "rank 0 waited for rank 1: waiting, after the profilers' start 80.27 ms"
        assert page.inner_text("#c0-matrix-detail") == said
        page.select_option("[data-measure-of=matrix]", label="waiting, all steps")
        page.focus("#c0-matrix canvas")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#c0-matrix-detail") == "rank 0 waited for rank 1: waiting, all steps 93.02 ms"
        page.fill("[data-rows-of=layers]", "layers.3.mlp forward")
        page.focus("#c0-layers canvas")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert page.inner_text("#c0-layers-detail").startswith("model.layers.3.mlp forward, rank 1: computing ")
        assert page.evaluate("location.hash") == "#layer=model.layers.3.mlp&rank=1"
        assert page.inner_text("#c0-detail").startswith("model.layers.3.mlp here: ")
        page.get_by_role("button", name="Show all layers again").click()
        assert page.evaluate("sheet.picked") == -1
        page.go_back()
        page.wait_for_selector("#unpick:not([hidden])")
        page.locator("[data-rank='0']").uncheck()
        assert page.evaluate("sheet.timeline.lines.filter((line) => line.label).map((line) => line.label)") == [
            "rank 1"
        ]
        page.select_option("[data-timeline=c0]", label="step 5")
        assert "step=5" in page.evaluate("location.hash")
        shared = page.evaluate("location.href")
    with opened(chromium, pair) as page:
        page.goto(shared)
        page.wait_for_selector("html:not([data-loading])", state="attached")
        assert page.evaluate("[sheet.timeline.step.step, sheet.data.tree.name[sheet.picked]]") == [
            5, "model.layers.3.mlp"
        ]  # fmt: skip
        assert not page.locator("[data-rank='0']").is_checked() and page.locator("[data-rank='1']").is_checked()


def test_a_thousand_ranks_are_bounded_and_the_unlike_one_is_marked(chromium, many):
    assert many.stat().st_size < 2_000_000
    with opened(chromium, many) as page:
        assert page.evaluate("document.querySelectorAll('*').length") < 3_000
        assert page.evaluate("[...document.querySelectorAll('canvas')].every((canvas) => canvas.height < 3000)")
        assert page.evaluate("sheet.data.layers.columns.length") == 1024
        assert page.locator("[data-rank='341']").is_checked() and page.locator("[data-rank]").count() == 12
        page.locator("#c0-layers canvas").scroll_into_view_if_needed()
        box = page.locator("#c0-layers canvas").bounding_box()
        heat = page.evaluate("""() => {
            const {rows, columns, measures} = sheet.data.layers;
            const cells = column(sheet.buffer, measures[0].cells), scale = column(sheet.buffer, measures[0].scale);
            const middle = column(sheet.buffer, measures[0].middle);
            let best = [0, 0, -1];
            cells.forEach((cell, place) => {
                const row = Math.floor(place / columns.length), told = cell * scale[row] - middle[row];
                if (cell < 65535 && told > best[2]) best = [row, place % columns.length, told];
            });
            return [best[0] / rows.length, best[1], rows[best[0]]];
        }""")
        assert heat[1] == 341 and heat[2].startswith("model.layers.3 ")
        assert box["height"] < 600


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_nothing_runs_over_the_edge(width, scheme, chromium, pair, many):
    for path in (pair, many):
        with opened(chromium, path, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_hostile_names_are_text(chromium, tmp_path):
    captures = [tiny_ranks.capture(tmp_path, rank, slower=rank * tiny_ranks.MS, layer=EVIL) for rank in (0, 1)]
    path = open_job(captures).report().save(tmp_path / "job.html")
    with opened(chromium, path) as page:  # an alert, a request or an error of the console fails it
        assert page.evaluate("sheet.data.layers.rows[0]") == f"{EVIL} forward"
        assert EVIL in page.locator("#c0-charges").inner_text() and page.locator("table script").count() == 0
        assert page.locator("script").count() == 2
