"""The memory pages in a real browser: drawn, clicked through, and silent towards the network."""

from typing import Any

import pytest
from support.browser import opened
from support.captures.snapshot_file import training

from nvprof_kit import MemoryProfiler, open_snapshot

EVIL = '</script><script>alert("x")</script>'


def test_a_sunburst_is_drawn_and_looked_into(chromium, tmp_path):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"layers.0": 3 << 18, "layers.1": 1 << 18}
            self.layers = torch.nn.ModuleList(torch.nn.Linear(1, size, bias=False) for size in sizes.values())
            self.add_module(EVIL, torch.nn.Linear(1, 1 << 20, bias=False))

        def forward(self, x: Any) -> Any:
            return x

    model = Net()
    with MemoryProfiler(model, None, tmp_path):
        model(torch.ones(1))
    (path,) = tmp_path.rglob("params_memory_sunburst.html")
    with opened(chromium, path) as page:
        assert page.locator("#where").text_content() == "Parameters: 8.00 MB, 100.0 % of all"
        assert page.locator("svg path").count() == 2 + 3 + 2  # two parts; their parts; the weights of layers
        assert page.locator("svg path title").first.text_content() == "Parameters.layers: 4.00 MB, 50.0 %"
        page.locator("svg path").first.click()
        assert page.locator("#where").text_content() == "Parameters / layers: 4.00 MB, 50.0 % of all"
        assert page.locator("tbody tr").all_inner_texts() == ["0\t3.00\t75.0 %", "1\t1.00\t25.0 %"]
        page.locator("svg circle").click(position={"x": 12, "y": 30})
        assert page.locator("tbody tr").nth(1).inner_text() == f"{EVIL}\t4.00\t50.0 %"


def test_the_page_of_a_snapshot(chromium, tmp_path):
    path = tmp_path / "memory.html"
    snapshot = open_snapshot(training(2000, layers=2).write(tmp_path / "run.pickle"))
    path.write_bytes(snapshot.memory().page())
    with opened(chromium, path) as page:
        assert page.locator("svg").count() == 2
        assert "At the peak, by layer" in (text := page.locator("pre").inner_text()) and "model.layers.1" in text
