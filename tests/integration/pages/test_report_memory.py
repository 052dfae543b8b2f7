"""The model's tree on the page by memory, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.browser import opened
from support.captures.nsys_file import NsysFile
from support.captures.nsys_memory import Allocations, carry
from test_report_page import DATA, EVIL, report

MIB = 1 << 20


def training(file: NsysFile) -> NsysFile:
    """A model of two layers: the first keeps 30 MiB of the 40 that the model keeps, the second 10; the time is the
    other way round.
    """
    file.range_("step 0", 0, 900, category="step", payload=0)
    file.range_("model", 10, 500)
    carry(file, (11, 100 * MIB), (499, 140 * MIB), peak=190 * MIB)
    for layer, (start, kept, length) in enumerate([(50, 30, 10), (250, 10, 30)]):
        file.range_(f"model.layers.{layer}", start, start + 100)
        carry(file, (start + 1, 100 * MIB), (start + 99, (100 + kept) * MIB), peak=(150 + kept) * MIB)
        file.kernel(1000 + start, 1000 + start + length, launched=(start + 20, start + 30))
    file.range_(EVIL, 510, 600)
    carry(file, (511, 140 * MIB), (599, 135 * MIB))
    file.kernel(2000, 2005, launched=(520, 530))
    return file


def widths(page: Any) -> dict[str, float]:
    """How wide each layer is drawn, as a part of the whole, by its name in the tip or on it."""
    boxes = "buttons => buttons.map(one => [DATA[0].tree.name[one.dataset.row], parseFloat(one.style.width)])"
    return dict(page.eval_on_selector_all("#c0-icicle button", boxes))


def test_the_tree_by_time_and_by_memory(chromium: Any, tmp_path: Path) -> None:
    file = training(NsysFile(tmp_path / "run.sqlite"))
    events = Allocations()
    events.add(60, 64 * MIB, file.call("cudaMalloc_v3020", 55, 62))
    path = report(tmp_path / "page.html", events.into(file.write()))
    with opened(chromium, path) as page:
        # of 45 ns: model 40, in it the layers 10 and 30; the other one 5
        assert widths(page) == pytest.approx(
            {
                "model": 100 * 40 / 45,
                "model.layers.0": 100 * 10 / 45,
                "model.layers.1": 100 * 30 / 45,
                EVIL: 100 * 5 / 45,
            },
            abs=0.01,
        )
        heads = page.locator("#c0-layers thead th").all_inner_texts()
        assert [head.strip() for head in heads[-3:]] == ["kept MiB", "peak MiB", "CUDA MiB"]
        cells = page.locator("#c0-layers tr[data-path='model.layers.0'] td").all_inner_texts()
        assert cells[-3:] == ["30.0", "180.0", "64.0"]
        page.select_option("[data-measure=c0]", label="memory kept by a forward")
        assert widths(page) == pytest.approx({"model": 100, "model.layers.0": 75, "model.layers.1": 25}, abs=0.01)
        page.hover("#c0-icicle button:has-text('0')")
        tip = page.inner_text("#tip")
        assert tip.splitlines() == [
            "model.layers.0",
            "30 MiB kept by a call of its forward, 75.0 % of what is shown",
            "at most 180 MiB allocated while it ran",
        ]
        page.click("#c0-icicle button:has-text('1')")
        assert widths(page)["model.layers.1"] == 100, "gone into"
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.select_option("[data-measure=c0]", label="memory taken from CUDA")
        assert widths(page) == {"model": 100, "model.layers.0": 100}
        page.select_option("[data-measure=c0]", label="GPU time")
        assert len(widths(page)) == 4


def test_a_layer_without_memory_is_left_by_the_switch(chromium: Any, tmp_path: Path) -> None:
    path = report(tmp_path / "page.html", training(NsysFile(tmp_path / "run.sqlite")).write())
    with opened(chromium, path) as page:
        page.evaluate(f"sheets[0].pick({page.evaluate('DATA[0].tree.name.length')} - 1)")
        page.eval_on_selector_all("#c0-icicle button", "buttons => buttons.at(-1).click()")
        page.select_option("[data-measure=c0]", "kept")
        assert set(widths(page)) == {"model", "model.layers.0", "model.layers.1"}
        assert page.locator("[data-measure=c0] option").all_inner_texts() == ["GPU time", "memory kept by a forward"]


def test_a_capture_without_memory_has_no_switch(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, report(tmp_path / "page.html", DATA / "eager-2023.4.sqlite.xz")) as page:
        assert page.locator("[data-measure]").count() == 0
        assert page.get_by_role("heading", name="Where the time goes in the model").is_visible()


def test_a_real_capture_with_cuda_s_allocations(chromium: Any, tmp_path: Path) -> None:
    path = report(tmp_path / "page.html", DATA / "hooks-graph-2023.4.sqlite.xz")
    assert path.stat().st_size < 1_000_000
    with opened(chromium, path) as page:
        page.select_option("[data-measure=c0]", "cuda")
        found = widths(page)
        # 3332 MiB less the 2 of the graph's capture, which lies in no step; of them the layers have 272, 252, 232, 252,
        # 232, 252 and the forward around them 1338
        assert found["model.layers.0"] == pytest.approx(100 * 272 / 3330, abs=0.01)
        assert found["(none) forward"] == pytest.approx(100 * 1338 / 3330, abs=0.01)
        assert sum(found.values()) == pytest.approx(100, abs=0.1)
