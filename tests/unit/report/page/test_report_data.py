"""The data half of the page: headline numbers, the comparison, the drawn timeline; and that nothing becomes markup."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.captures.layers_result import MS, layers_result
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.advise.advise import OPTIONAL, Advice, advise
from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.timeline import Timeline, timeline
from nvprof_kit._cli import main
from nvprof_kit._findings import Finding
from nvprof_kit._report.page.data import (
    ClassTimes,
    Headline,
    Linked,
    Sheet,
    changes,
    headlines,
    phase_split,
    sheet_of,
    total_change,
)
from nvprof_kit._report.page.drawing import drawn, folds_of
from nvprof_kit._report.page.page import report_page
from nvprof_kit._report.page.tables import MAX_TEXT, short_text
from nvprof_kit._report.page.timeline import Block, Moments, Texts, drawn_timeline
from nvprof_kit._report.plots.timeline import timeline_bands
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import UsageError


def drawing(sheet: Sheet) -> dict[str, Any]:
    return drawn(sheet, folds_of(sheet))


@pytest.fixture
def sheet() -> Sheet:
    steps = {"step": [0, 1], "wall_ns": [30 * MS, 22 * MS]}
    return Sheet(layers_result(), pd.DataFrame(steps))


@pytest.fixture
def real(tmp_path: Path) -> Sheet:
    """A step of 900 ns; the GPU runs from 1000 to 1900 and is idle from 1700 to 1800."""
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 0, 900, category="step", payload=1)
    file.range_("a", 10, 700, category="forward")
    file.range_("a.b", 310, 600, category="forward")
    file.kernel(1000, 1300, launched=(30, 31), name="first")
    file.kernel(1300, 1700, launched=(320, 321), name="second")
    file.kernel(1800, 1900, launched=(720, 721), name="third")
    return sheet_of(open_capture(file.write(), optional=("name", "stream")))


def test_headlines(sheet: Sheet) -> None:
    assert headlines(sheet) == [
        Headline("GPU time per step", "20.00 ms", "1,234 operations in 2 steps"),
        Headline("Median step", "22.00 ms", "22.00 to 30.00 ms"),  # the longer of range and span: 30 and 22
        Headline("In a named layer", "75.0 %", "93.8 % of forward and backward"),  # 30 of 40 ms
        Headline("Costliest layer by its own work", "model.layers.0.attn", "30.0 %"),  # 3 + 3 + 2 + 4 of 40 ms
    ]


def test_idle_is_of_the_time_of_the_step(real: Sheet) -> None:
    # 1000 ns before the first operation and 100 between, of 1900
    assert Headline("GPU idle", "57.9 %", "of step 1") in headlines(real)


def test_phases_in_order_then_by_time(sheet: Sheet) -> None:
    # forward 1+3+2+2+5+2, backward 2+3+5+1+4+2, optimizer 4+3+1
    assert phase_split(sheet.layers) == [("forward", 15 * MS), ("backward", 17 * MS), ("optimizer", 8 * MS)]


def test_the_comparison_is_per_step_and_keeps_what_only_one_has(sheet: Sheet) -> None:
    tree = sheet.layers.tree
    tree = tree[tree["layer"] != "lm_head"].reset_index(drop=True)
    tree.loc[tree["layer"] == "model.layers.1", "total_ns"] = 14 * MS
    other = Sheet(replace(sheet.layers, tree=tree), sheet.steps)
    found = {change.layer: change for change in changes([sheet.layers, other.layers])}
    assert found["model.layers.1"].times == (5 * MS, 7 * MS) and found["model.layers.1"].change == 2 * MS
    assert found["lm_head"].times == (2 * MS, None) and found["lm_head"].change is None
    assert list(found)[:2] == ["model", "model.layers.0"] and "(none) optimizer" in found
    assert {change.layer: change for change in changes([other.layers, sheet.layers])}["lm_head"].times == (None, 2 * MS)
    assert total_change([sheet.layers, other.layers]).times == (20 * MS, 20 * MS)


def test_the_comparison_is_one_tree_whatever_each_capture_has(sheet: Sheet) -> None:
    """The first names blocks only, the second the model and parts of blocks too: a part is below its block, not below
    the last row before it.
    """
    blocks = pd.DataFrame(
        {"layer": [f"model.layers.{block}" for block in (0, 1)], "phase": "", "parent": "", "depth": 0}
    )
    blocks["total_ns"], blocks["comm_ns"] = 5 * MS, 0
    found = changes([replace(sheet.layers, tree=blocks), sheet.layers])
    assert [("  " * change.depth) + change.layer for change in found] == [
        "model.layers.0",
        "  model.layers.0.attn",
        "model.layers.1",
        "model",
        "  lm_head",
        "(none) forward",
        "(none) optimizer",
        "(none) other",
    ]


def test_what_the_scripts_draw(sheet: Sheet) -> None:
    data = drawing(sheet)
    assert data["tree"]["name"][:2] == ["model", "model.layers.0"] and data["tree"]["parent"][:3] == [-1, 0, 1]
    steps = unpacked(data, data["bySteps"])
    assert steps["number"] == [0, 1] and steps["length"] == [30 * MS, 22 * MS]
    assert unpacked(data, steps["phases"]) == {
        "forward": [6 * MS, 9 * MS],  # step 0: 1 + 3 + 2, step 1: 2 + 5 + 2
        "backward": [10 * MS, 7 * MS],  # 2 + 3 + 5 and 1 + 4 + 2
        "other": [4 * MS, 3 * MS],
    }
    assert steps["layers"][0] == 0 and steps["cells"][:2] == [16 * MS, 14 * MS]  # model: all but what is outside
    json.dumps(data)


def unpacked(data: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a page's data as lists, as the page's script reads them."""
    block = gzip.decompress(base64.b64decode(data["block"]))

    def read(kind: str, offset: int, count: int, rising: int) -> list[int]:
        values = np.frombuffer(block, f"<{kind}", count, offset)
        return [int(value) for value in (np.cumsum(values, dtype=np.float64) if rising else values)]

    kinds = ("u1", "u2", "u4", "f8")
    return {
        name: read(*value) if isinstance(value, list) and len(value) == 4 and value[0] in kinds else value
        for name, value in columns.items()
    }


def test_the_drawn_timeline(real: Sheet) -> None:
    data = drawing(real)
    timeline, texts = data["timeline"], data["texts"]
    (step,) = timeline["steps"]
    assert (step["title"], step["start"], step["length"]) == ("step 1, a typical one", 0, 1900)
    assert step["idle"] == {0: "GPU 0: idle 57.9 % of the time, in 2 gaps"} and timeline["note"] == ""
    idle, stream, thread = ([unpacked(data, row) for row in group["rows"]] for group in timeline["groups"])
    assert (idle[0]["start"], idle[0]["length"]) == ([0, 1700], [1000, 100])
    rows = [(row["kind"], row["start"], [texts[text] for text in row["text"]]) for row in stream]
    assert rows == [
        ("layer", [1000], ["a"]),
        ("layer", [1300], ["a.b"]),
        ("op", [1000, 1300, 1800], ["first", "second", "third"]),
    ]
    assert [texts[layer] for layer in stream[2]["layer"]] == ["a", "a.b", "(none)"]
    assert [texts[phase] for phase in stream[2]["phase"]] == ["forward", "forward", "other"]
    assert [row["start"] for row in thread] == [[0], [10], [310]]


def test_every_step_can_be_chosen_with_its_own_idle_time(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for step, length in enumerate((100, 200, 300)):
        begin = 1000 * step
        file.range_(f"step {step}", begin, begin + 500, category="step", payload=step)
        file.range_("a", begin + 10, begin + 90, category="forward")
        file.kernel(begin + 100, begin + 100 + length, launched=(begin + 12, begin + 13))
    found = drawing(sheet_of(open_capture(file.write(), optional=("name", "stream"))))["timeline"]["steps"]
    # of 500 ns each: 400, 300 and 200 without an operation; step 1 is the median, and all take 500
    assert {step["step"]: step["idle"][0] for step in found} == {
        0: "GPU 0: idle 80.0 % of the time, in 2 gaps",
        1: "GPU 0: idle 60.0 % of the time, in 2 gaps",
        2: "GPU 0: idle 40.0 % of the time, in 2 gaps",
    }
    assert [(step["start"], step["length"]) for step in sorted(found, key=lambda one: one["step"])] == [
        (0, 500), (1000, 500), (2000, 500)
    ]  # fmt: skip


def test_short_operations_of_a_layer_are_drawn_together_and_counted(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("a", 0, 900, category="forward")
    file.range_("b", 1000, 1900, category="forward")
    for launch, begin, length in ((10, 2000, 100), (20, 2110, 300), (30, 2420, 50), (1010, 2480, 70), (1020, 9000, 20)):
        file.kernel(begin, begin + length, launched=(launch, launch + 5), name=f"k{begin}")
    shown = timeline_of(open_capture(file.write(), optional=("name", "stream")))
    block, texts = Block(), Texts()
    data = drawn_timeline(Moments(shown, []), texts, block, limit=3) | {"block": block.packed()}
    names = list(texts.numbers)
    (row,) = [unpacked(data, row) for group in data["groups"] for row in group["rows"] if row["kind"] == "op"]
    # three of `a` in a row, one of `b`, and one of `b` 6450 ns later
    assert (row["start"], row["length"]) == ([2000, 2480, 9000], [470, 70, 20])
    assert (row["count"], row["busy"]) == ([3, 1, 1], [450, 70, 20])
    assert [names[text] for text in row["text"]] == ["k2110", "k2480", "k9000"]  # the longest of each
    assert data["note"].startswith("3 operations, of at most 300 ns each, are drawn in 1 boxes")
    assert sum(row["busy"]) == 540  # nothing is lost


def timeline_of(trace: Trace) -> Timeline:
    return timeline(trace, attribute(trace))


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 7", 0, 10, category="step", payload=7)
    file.range_("a", 1, 9, category="forward")
    file.kernel(20, 30, launched=(2, 3))
    trace = open_capture(file.write(), optional=("name", "stream"))
    with pytest.raises(UsageError, match="no step 3; it has steps 7 to 7"):
        sheet_of(trace, 3)


def test_findings_link_to_what_the_page_shows(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for step, length in enumerate((900, 900, 900, 5000, 950)):
        begin = 10_000 * step
        file.range_(f"step {step}", begin, begin + length, category="step", payload=step)
        file.range_("a", begin + 1, begin + 90, category="forward")
        file.kernel(begin + 100, begin + 200, launched=(begin + 2, begin + 3))
    trace = open_capture(file.write(), optional=("name", "stream"))
    kinds = [("a", "forward", 10_100, 10_200), ("(none)", "data", 40_010, 40_020), ("gone", "", 90_000, 90_001)]
    findings = tuple(
        Finding("copies", f"title {layer}", "numbers", layer, phase, start, end, 5_000_000, "do it")
        for layer, phase, start, end in kinds
    )
    found = Advice(findings, 50_000_000, 5, 1, "training", (), trace.info)
    sheet = sheet_of(trace, None, found)
    # lengths 900, 900, 900, 950, 5000: the median is step 2's; findings are in steps 1 and 4, and outside every step
    assert sheet.timeline is not None and [step.title for step in sheet.timeline.steps] == [
        "step 2, a typical one",
        "step 3, the slowest",
        "step 1, of a finding",
        "step 4, of a finding",
        "step 0",
    ]
    assert [(one.layer, one.window) for one in sheet.findings] == [
        ("a", (10_100, 10_200)),
        ("", (40_010, 40_020)),
        ("", None),
    ]
    first = sheet.findings[0]
    assert (first.saving, first.finding.evidence, first.finding.fix) == (
        "at most 5.000 ms per step, 10.0 %",
        "numbers",
        "do it",
    )
    of_two = sheet_of(trace, None, replace(found, gpus=2)).findings[0]
    assert of_two.saving == "at most 5.000 ms per step and GPU, 10.0 %"
    waits = replace(found, findings=(replace(findings[0], saves_ns=0),))
    assert sheet_of(trace, None, waits).findings[0].saving == "nothing to save on this rank"


def test_the_page_finds_what_advise_finds(tmp_path: Path) -> None:
    capture = Path(__file__).parents[3] / "data" / "metrics" / "llama-2023.4.sqlite.xz"
    with pytest.raises(SystemExit):
        main(["report", str(capture), "-o", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    findings = advise(open_capture(capture, optional=OPTIONAL)).findings
    assert "gpu-metrics" in {one.rule for one in findings}
    assert all(html.escape(one.title) in page for one in findings)
    assert all(
        f"{one.confidence.capitalize()} confidence; wrong if {escape(one.refuted_by)}" in page for one in findings
    )


def test_long_names_say_how_long_they_were() -> None:
    assert short_text("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert short_text("x" * 10_000) == "x" * MAX_TEXT + "… (10,000 characters)"


def test_the_page_is_one_file_whose_own_script_alone_may_run(sheet: Sheet) -> None:
    evil = "</script><script>alert(1)</script>"
    finding = Linked(Finding("copies", evil, '"><img>'), saving="3 ms", layer="model.layers.0", window=(12, 34))
    page = report_page([replace(sheet, findings=[finding], classes=ClassTimes({evil: 5}, (evil,)))])
    text = page.decode()
    assert re.findall("<script[^>]*>", text) == ['<script type="application/json" id="data">', "<script>"]
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", text)
    assert 'href="#capture=0&amp;time=12-34&amp;show=time"' in text
    assert 'href="#capture=0&amp;layer=model.layers.0&amp;show=layer"' in text
    assert "! nsys" not in text and "nsys dropped 3 events; record less at once" in text


def test_kernels_that_no_rule_matched_are_told_below_their_class(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 0", 0, 900, category="step", payload=0)
    file.kernel(1000, 1300, launched=(30, 31), name="ampere_sgemm")
    file.kernel(1400, 1500, launched=(40, 41), name="frobnicate")
    capture, page, own = str(file.write()), tmp_path / "page.html", tmp_path / "own.toml"
    with pytest.raises(SystemExit, match="0"):
        main(["report", capture, "-o", str(page)])
    assert "1 kernel names, 25.0 % of the time, matched no class rule" in page.read_text("utf-8")
    own.write_text('[[rule]]\nname = "own"\nclass = "softmax"\nmatch = "frob"\n')
    with pytest.raises(SystemExit, match="0"):
        main(["report", capture, "-o", str(page), "--kernel-rules", str(own)])
    text = page.read_text("utf-8")
    assert "matched no class rule" not in text and '<th scope="row">softmax</th>' in text


def test_without_a_gpu_nothing_is_called_one(tmp_path: Path) -> None:
    operator = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "name": "aten::mm", "ts": 10, "dur": 20, "args": {}}
    layer = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": 5, "dur": 40, "args": {}}
    events = [operator, layer | {"name": "nvprof_kit:forward:layers.0"}, operator | {"ts": 33, "dur": 5}]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    sheet = sheet_of(open_capture(path, optional=("name", "stream")))
    assert [group["label"] for group in drawing(sheet)["timeline"]["groups"]] == [
        "CPU operators",
        "CPU thread 0: when its ranges were open",
    ]
    assert not any("GPU" in headline.label for headline in headlines(sheet)) and sheet.classes is None
    assert sheet.timeline is not None
    assert [band.name for band in timeline_bands(sheet.timeline.timeline)] == ["layers", "CPU operators"]
