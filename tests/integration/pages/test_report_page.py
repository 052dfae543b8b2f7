"""The page in a real browser: sorting, searching, zooming, picking, links, and that names of a capture stay text."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.browser import opened
from support.captures.nsys_file import NsysFile
from support.cli import run
from support.data import DATA
from support.lane import FULL

import nvprof_kit

EVIL = '<script>alert("x")</script>'
QUOTES = """a"b'c`d</textarea></script><!--<img src=x onerror=alert(1)>{{7*7}}${1}&amp;\\u003c"""
LONG = "k<b>" * 2500


def report(path: Path, *captures: object) -> Path:
    assert run("report", *map(str, captures), "-o", str(path)) == 0
    return path


def until(page: Any, expression: str) -> None:
    """Wait for an expression to be true, asked from outside: the page forbids `wait_for_function` its eval."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {expression}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("page") / "llama.html", DATA / "llama-2023.4.sqlite.xz")


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(tmp_path_factory.mktemp("page") / "limits.html", DATA / "limits" / "llama.sqlite.xz")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(EVIL.replace("/", "_"))
    file = NsysFile(folder / "run.sqlite")
    file.range_("step 1", 0, 900, category="step", payload=1)
    file.range_(EVIL, 10, 700, category="forward")
    file.range_(f"{EVIL}.{QUOTES}", 20, 300, category="forward")
    file.range_(LONG, 310, 600, category="forward")
    file.range_(QUOTES, 710, 800, category="phase")
    file.kernel(1000, 1300, launched=(30, 31), name=EVIL)
    file.kernel(1300, 1700, launched=(320, 321), name=LONG)
    file.kernel(1800, 1900, launched=(720, 721), name=QUOTES)
    return report(folder / "page.html", file.write())


def shown(page: Any, table: str = "c0-layers") -> list[str]:
    return page.eval_on_selector_all(f"#{table} tbody tr:not([hidden])", "rows => rows.map(row => row.dataset.path)")


def picked(page: Any) -> list[str]:
    return page.eval_on_selector_all("[aria-selected=true]", "all => all.map(one => one.dataset.path)")


def test_a_click_on_a_head_sorts(chromium, llama):
    with opened(chromium, llama) as page:
        model_order = shown(page)
        assert model_order[:3] == ["LlamaForCausalLM", "model", "model.embed_tokens"]
        page.get_by_role("button", name="total", exact=True).click()
        assert page.get_attribute("#c0-layers thead th:nth-child(5)", "aria-sort") == "descending"
        totals = "rows => rows.map(row => Number(row.cells[4].dataset.value))"
        values = page.eval_on_selector_all("#c0-layers tbody tr", totals)
        assert values == sorted(values, reverse=True) and values[0] > values[-1]
        page.get_by_role("button", name="total", exact=True).click()
        assert page.eval_on_selector_all("#c0-layers tbody tr", totals) == sorted(values)
        # sorted, a row gives its whole path; back in the model's order the indentation does
        assert page.inner_text("#c0-layers tr[data-path='model.layers.2.mlp'] th") == "model.layers.2.mlp"
        page.get_by_role("button", name="Back to the model's order").click()
        assert shown(page) == model_order
        assert page.inner_text("#c0-layers tr[data-path='model.layers.2.mlp'] th") == "mlp"


def window(page: Any) -> tuple[float, float]:
    """What the timeline shows, as parts of the whole step."""
    words = page.inner_text("#c0-window").replace("all ", "0.00 ms to ").replace(" of ", " to ").split(" to ")
    start, end, whole = (float(word.removesuffix(" ms")) for word in (*words, words[-1])[:3])
    return pytest.approx(start / whole, abs=0.002), pytest.approx(end / whole, abs=0.002)


def test_zoom_by_buttons_keys_and_wheel(chromium, llama):
    with opened(chromium, llama) as page:
        assert page.inner_text("#c0-window").startswith("all ") and window(page) == (0, 1)
        page.get_by_role("button", name="Zoom in").click()
        assert window(page) == (0.25, 0.75)
        page.focus("canvas")
        page.keyboard.press("ArrowRight")  # by three tenths of what is seen
        assert window(page) == (0.4, 0.9)
        page.keyboard.press("-")
        assert window(page) == (0, 1)  # 0.15 to 1.15, moved back to where the step is
        box = page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 60)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -500)
        page.keyboard.up("Control")
        until(page, "!document.querySelector('#c0-window').textContent.startsWith('all')")
        part = 1.0015**-500  # about a quarter, which stays where it is
        assert window(page) == (0.25 - 0.25 * part, 0.25 + 0.75 * part)
        page.get_by_role("button", name="All", exact=True).click()
        assert window(page) == (0, 1)


def test_a_picked_layer_shows_everywhere(chromium, llama):
    with opened(chromium, llama) as page:
        page.locator("#c0-layers tr[data-path='model.layers.2']").click()
        assert page.get_attribute("#c0-layers tr[data-path='model.layers.2']", "aria-selected") == "true"
        assert page.inner_text("#c0-icicle [aria-pressed=true]") == "layers.2"
        assert page.inner_text("#c0-steps-what").startswith("model.layers.2 in each step")
        assert page.locator("#c0-steps rect.picked").count() == 2
        page.locator("#c0-icicle [aria-pressed=true]").click()  # goes into it
        assert page.locator("#c0-icicle button").first.inner_text() == "LlamaForCausalLM"  # the way back
        page.keyboard.press("Escape")
        assert page.get_attribute("#c0-layers tr[data-path='model']", "aria-selected") == "true"


def test_the_table_by_keyboard(chromium, llama):
    with opened(chromium, llama) as page:
        page.focus("#c0-layers tbody tr")
        for key in ("ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
            page.keyboard.press(key)
        assert picked(page) == ["model"]


def test_links_to_a_layer_and_to_a_time(chromium, llama):
    with opened(chromium, llama) as page:
        page.evaluate("location.hash = '#layer=model.layers.0.mlp&show=layer'")
        page.wait_for_selector("tr[data-path='model.layers.0.mlp'][aria-selected=true]")
        assert not page.inner_text("#c0-window").startswith("all")
        start = page.evaluate("DATA[0].timeline.start + sheets[0].timeline.step.start")
        page.evaluate(f"location.hash = '#time={start + 5_000_000}-{start + 6_000_000}&show=time'")
        until(page, "document.querySelector('#c0-window').textContent.startsWith('4.80 ms to 6.20 ms of')")


def hash_(page: Any) -> str:
    return str(page.evaluate("decodeURIComponent(location.hash.slice(1)).replaceAll('+', ' ')"))


def test_what_is_shown_is_in_the_address_and_the_back_button_takes_it_back(chromium, llama):
    with opened(chromium, llama) as page:
        page.locator("#c0-layers tr[data-path='model.layers.2']").click()
        assert hash_(page) == "layer=model.layers.2"
        page.locator("#c0-layers tr[data-path='model.layers.1']").click()
        page.select_option("[data-timeline=c0]", "1")
        assert hash_(page) == "layer=model.layers.1&step=3"
        page.fill("[data-search=c0-layers]", "mlp")
        page.fill("[data-kernels=c0]", "gemm")
        page.select_option("[data-kernels-by=c0]", "place")
        shared = page.evaluate("location.href")
        assert hash_(page) == "layer=model.layers.1&step=3&search=mlp&kernels=gemm&by=place"
        page.go_back()
        until(page, "sheets[0].timeline.index === 0")
        page.go_back()
        until(page, "sheets[0].data.tree.name[sheets[0].picked] === 'model.layers.2'")
        page.go_back()
        until(page, "sheets[0].picked === -1")
        page.goto(shared)
        until(page, "sheets[0].timeline?.index === 1")
        assert picked(page) == ["model.layers.1"]
        assert page.input_value("[data-search=c0-layers]") == "mlp" and len(shown(page)) == 4
        assert page.locator("#c0-kernels thead th").all_inner_texts()[2:4] == ["layer", "phase"]


def test_kernels_are_searched_sorted_and_gathered(chromium, llama):
    with opened(chromium, llama) as page:
        rows = page.locator("#c0-kernels tbody tr")
        count, all_ = page.inner_text("#c0-kernels-count"), rows.count()
        assert count == f"{all_} of {all_} rows, 100.0 % of the time"
        share = "rows => rows.map(row => parseFloat(row.cells[4].textContent))"
        values = page.eval_on_selector_all("#c0-kernels tbody tr", share)
        assert values == sorted(values, reverse=True) and sum(values) == pytest.approx(100, abs=2)
        page.select_option("[data-kernels-by=c0]", "class")
        classes = page.locator("#c0-kernels tbody td:first-child").all_inner_texts()
        assert {"gemm", "attention", "optimizer"} <= {*classes}
        page.select_option("[data-kernels-by=c0]", "layer")
        page.fill("[data-kernels=c0]", "layers.2.mlp")
        assert page.locator("#c0-kernels tbody td:nth-child(2)").all_inner_texts() == ["backward", "forward"]
        page.fill("[data-kernels=c0]", "")
        page.locator("#c0-layers tr[data-path='model.layers.2.mlp']").click()
        assert rows.count() == 2 and "in model.layers.2.mlp" in page.inner_text("#c0-kernels-count")


def test_idle_causes_and_the_critical_path_are_on_the_page(chromium, llama):
    with opened(chromium, llama) as page:
        heads = page.locator("#c0-idle thead th").all_inner_texts()
        assert heads[:3] == ["cause", "layer", "phase"] and {"gaps", "idle", "longest"} <= set(heads)
        assert page.locator("#c0-critical-path tbody tr").count() > 10 and page.locator("#c0-copies").count() == 1
        assert page.locator("#c0-communication").count() == 0  # one GPU: nothing is communicated
        page.locator("#c0-idle").get_by_role("button", name="longest", exact=True).click()
        longest = f"rows => rows.map(row => Number(row.cells[{heads.index('longest')}].dataset.value))"
        values = page.eval_on_selector_all("#c0-idle tbody tr", longest)
        assert values == sorted(values, reverse=True) and values[0] > values[-1] > 0


def test_equal_blocks_as_one_row(chromium, llama):
    with opened(chromium, llama) as page:
        every = shown(page)
        page.get_by_label("Equal blocks as one row").check()  # four are too few to be folded unasked
        parts = ("", ".input_layernorm", ".self_attn", ".post_attention_layernorm", ".mlp")
        assert [path for path in shown(page) if "layers" in path] == [f"model.layers.0-3{part}" for part in parts]
        row = page.locator("#c0-layers tr[data-path='model.layers.0-3']")
        assert row.locator(".count").inner_text() == "x4"
        total = "rows => rows.map(row => Number(row.cells[4].dataset.value)).reduce((sum, one) => sum + one, 0)"
        blocks = ", ".join(f"#c0-layers tr[data-path='model.layers.{one}']" for one in range(4))
        assert int(row.locator("td").nth(3).get_attribute("data-value")) == page.eval_on_selector_all(blocks, total)
        row.click()
        assert page.inner_text("#c0-detail").startswith("model.layers.0-3 in this step: 476 operations")
        assert page.locator("#c0-icicle [aria-pressed=true]").count() == 4
        page.locator("#c0-icicle button[data-row]", has_text="layers.2").first.click()  # one of them: not folded
        assert shown(page) == every and not page.get_by_label("Equal blocks as one row").is_checked()


def test_findings_lead_to_their_place(chromium, llama):
    with opened(chromium, llama) as page:
        finding = page.locator(".findings li").first
        assert finding.locator("h3").inner_text().startswith("The GPU waits for the host to launch at most ")
        finding.get_by_role("link", name="on the timeline").click()
        until(page, "!document.querySelector('#c0-window').textContent.startsWith('all')")
        href = finding.get_by_role("link", name="on the timeline").get_attribute("href")
        start, end = (int(word) for word in href.split("time=")[1].split("&")[0].split("-"))
        shown = page.evaluate(
            "(({data, step, from, to}) => [from, to].map((at) => data.start + step.start + at))(sheets[0].timeline)"
        )
        assert shown[0] <= start < end <= shown[1]
        finding.get_by_role("link").nth(1).click()
        page.wait_for_selector("#c0-layers [aria-selected=true]")


def test_limits_are_bars_and_a_roofline(chromium, limits):
    capture = nvprof_kit.open(DATA / "limits" / "llama.sqlite.xz")
    with opened(chromium, limits) as page:
        lines = re.findall(r"^\d+\. (.*?)  \((at most .*)\)$", str(capture.advise()), re.MULTILINE)
        assert [f"{title} {saving}" for title, saving in lines] == page.locator(".findings h3").all_inner_texts()
        kinds = capture.flops().kinds()
        rows = page.locator("#c0-limits tbody tr")
        assert rows.count() == 16 < len(kinds)
        first = kinds.iloc[0]
        assert rows.first.locator("th, td").all_inner_texts()[:7] == [
            f"{first['kind']} x{first['layers']}", first["phase"], f"{first['gpu_busy_ns'] / 3e6:.3f}",
            f"{first['limit_ns'] / 3e6:.3f}", f"{100 * first['limit_ns'] / first['gpu_busy_ns']:.1f} %", first["bound"],
            f"{first['fused_limit_ns'] / 3e6:.3f}",
        ]  # fmt: skip
        above = """() => sheets[0].data.roofline.points.filter(({intensity, rate, time}) =>
            rate > 1.001 * Math.min(Math.max(...Object.values(sheets[0].data.roofline.peaks)),
                                    intensity * sheets[0].data.roofline.bandwidth))"""
        assert page.evaluate(above) == []
        dots = page.locator("#c0-roofline circle")
        assert dots.count() == len(page.evaluate("sheets[0].data.roofline.points")) > 4
        dots.first.click()
        picked = page.evaluate("sheets[0].data.roofline.points[0].layer")
        assert page.get_attribute(f"#c0-layers tr[data-path='{picked}']", "aria-selected") == "true"
        page.set_viewport_size({"width": 1400, "height": 900})
        heads = page.locator("#c0-layers thead th").all_inner_texts()
        assert heads[-4:] == [f"{name} {phase}" for name in ("MFU", "of limit") for phase in ("forward", "backward")]
        fits = "(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)"
        assert page.evaluate(f"{fits}(document.querySelector('#c0-layers').parentElement)")


def test_light_dark_and_print(chromium, llama):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(chromium, llama, color_scheme="dark") as page:
        assert page.evaluate(ground) == "rgb(20, 23, 27)"
        page.keyboard.press("d")
        assert page.evaluate(ground) == "rgb(255, 255, 255)"
        page.keyboard.press("d")
        page.emulate_media(media="print")
        assert page.evaluate(ground) == "rgb(255, 255, 255)"
        assert not page.is_visible("#theme") and page.is_visible("#c0-layers tbody tr:last-child")
        page.set_viewport_size({"width": 718, "height": 1000})  # A4 less its margins
        assert page.evaluate("document.documentElement.scrollWidth") == 718
        assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_runs_over_the_edge(width, chromium, llama, hostile):
    for path in (llama, hostile):
        with opened(chromium, path, viewport={"width": width, "height": 800}) as page:
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_hostile_names_are_text(chromium, hostile):
    with opened(chromium, hostile) as page:  # an alert, a request or an error of the console fails it
        assert shown(page)[:2] == [EVIL, f"{EVIL}.{QUOTES}"]
        texts = page.eval_on_selector_all("#c0-layers tbody th", "heads => heads.map(head => head.textContent)")
        assert texts[:2] == [EVIL, f"{EVIL}.{QUOTES}"] and f"(none) {QUOTES}" in texts
        assert any(text.startswith("k<b>k<b>") and text.endswith("… (10,000 characters)") for text in texts)
        assert page.locator("img, table b, table script, tbody script, h1 script").count() == 0
        assert page.locator("script").count() == 2
        assert EVIL in page.inner_text("#c0-icicle")
        canvas = page.locator("canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        found = set()
        for y in range(30, int(box["height"]), 12):
            for part in (0.02, 0.3, 0.6, 0.8, 0.97):
                page.mouse.click(box["x"] + part * box["width"], box["y"] + y)
                found.add(page.inner_text("#c0-detail").split(" · ")[0])
        assert {EVIL, QUOTES} <= found
        assert any(text.endswith("… (10,000 characters)") for text in found)


def test_two_captures_are_compared(chromium, tmp_path):
    names = ("eager-2023.4", "checkpoint-2023.4")
    path = report(tmp_path / "two.html", *(DATA / f"{name}.sqlite.xz" for name in names))
    with opened(chromium, path) as page:
        # 9.27 ms forward and backward against 13.4 ms with what the checkpoints run again
        row = page.locator("#changes tr[data-path='model.layers.0.mlp'] td")
        before, after, change, part = row.all_inner_texts()
        assert float(change) == pytest.approx(float(after) - float(before), abs=0.0011)
        assert "worse" in row.nth(2).get_attribute("class") and part.startswith("+")
        assert page.is_visible("[data-sheet='0'].sheet") and not page.is_visible("[data-sheet='1'].sheet")
        page.locator(".tab").nth(1).click()
        assert page.is_visible("#c1-layers") and not page.is_visible("#c0-layers")
        assert "recompute" in page.inner_text("#c1-layers thead")
        assert page.locator("#c1-timeline canvas").bounding_box()["width"] > 500
        page.get_by_label("Search").first.fill("mlp")
        assert len(shown(page, "changes")) == 4


def test_a_hundred_layers_and_steps_stay_below_5_mb(chromium, tmp_path):
    file, clock, random_ = NsysFile(tmp_path / "large.sqlite"), 0, random.Random(1)
    for step in range(100):
        begin = clock
        for phase, order in (("forward", range(100)), ("backward", reversed(range(100)))):
            for layer in order:
                file.range_(f"model.layers.{layer}", clock, clock + 50_000, category=phase)
                for op in range(12 if FULL else 3):
                    at, length = clock + 4000 * op, random_.randrange(1000, 3900)
                    start = at + 100_000
                    file.kernel(start, start + length, launched=(at, at + 9), name=f"kernel_{op}")
                clock += 50_000
        file.range_(f"step {step}", begin, clock, category="step", payload=step)
    path = report(tmp_path / "large.html", file.write())
    assert path.stat().st_size < 5_000_000
    with opened(chromium, path) as page:
        assert page.locator("#c0-layers tbody tr:not([data-fold])").count() == 100
        assert shown(page) == ["model.layers.0-99"]  # equal blocks are one row
        assert page.locator("#c0-steps g").count() == 100
        page.get_by_role("button", name="Zoom in").click()


MIB = 1 << 20


def training(file: NsysFile) -> NsysFile:
    """A model of two layers: the first keeps 30 MiB of the 40 that the model keeps, the second 10; the time is the
    other way round.
    """
    file.range_("step 0", 0, 900, category="step", payload=0)
    file.range_("model", 10, 500)
    file.carry((11, 100 * MIB), (499, 140 * MIB), peak=190 * MIB)
    for layer, (start, kept, length) in enumerate([(50, 30, 10), (250, 10, 30)]):
        file.range_(f"model.layers.{layer}", start, start + 100)
        file.carry((start + 1, 100 * MIB), (start + 99, (100 + kept) * MIB), peak=(150 + kept) * MIB)
        file.kernel(1000 + start, 1000 + start + length, launched=(start + 20, start + 30))
    file.range_(EVIL, 510, 600)
    file.carry((511, 140 * MIB), (599, 135 * MIB))
    file.kernel(2000, 2005, launched=(520, 530))
    return file


def widths(page: Any) -> dict[str, float]:
    """How wide each layer is drawn, as a part of the whole, by its name in the tip or on it."""
    boxes = "buttons => buttons.map(one => [DATA[0].tree.name[one.dataset.row], parseFloat(one.style.width)])"
    return dict(page.eval_on_selector_all("#c0-icicle button", boxes))


def test_the_tree_by_time_and_by_memory(chromium, tmp_path):
    file = training(NsysFile(tmp_path / "run.sqlite"))
    file.allocation(60, 64 * MIB, file.call("cudaMalloc_v3020", 55, 62))
    path = report(tmp_path / "page.html", file.write())
    with opened(chromium, path) as page:
        # of 45 ns: model 40, in it the layers 10 and 30; the other one 5
        ns = {"model": 40, "model.layers.0": 10, "model.layers.1": 30, EVIL: 5}
        assert widths(page) == pytest.approx({layer: 100 * ns[layer] / 45 for layer in ns}, abs=0.01)
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


def test_a_layer_without_memory_is_left_by_the_switch(chromium, tmp_path):
    path = report(tmp_path / "page.html", training(NsysFile(tmp_path / "run.sqlite")).write())
    with opened(chromium, path) as page:
        page.evaluate(f"sheets[0].pick({page.evaluate('DATA[0].tree.name.length')} - 1)")
        page.eval_on_selector_all("#c0-icicle button", "buttons => buttons.at(-1).click()")
        page.select_option("[data-measure=c0]", "kept")
        assert set(widths(page)) == {"model", "model.layers.0", "model.layers.1"}
        assert page.locator("[data-measure=c0] option").all_inner_texts() == ["GPU time", "memory kept by a forward"]


def test_a_capture_without_memory_has_no_switch(chromium, tmp_path):
    with opened(chromium, report(tmp_path / "page.html", DATA / "eager-2023.4.sqlite.xz")) as page:
        assert page.locator("[data-measure]").count() == 0
        assert page.get_by_role("heading", name="Where the time goes in the model").is_visible()


def test_a_real_capture_with_cuda_s_allocations(chromium, tmp_path):
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
