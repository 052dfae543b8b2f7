"""The page without a browser: headline numbers and the data that its script draws."""

import html
import re
import sqlite3

import pytest
from support.captures.kineto_file import event, write
from support.captures.nsys_file import NsysFile
from support.data import DATA
from support.page import data_of, unpacked

import nvprof_kit
from nvprof_kit.errors import UsageError


@pytest.fixture
def capture(file: NsysFile) -> nvprof_kit.Capture:
    """A step of 900 ns; the GPU runs from 1000 to 1900 and is idle from 1700 to 1800."""
    file.range_("step 1", 0, 900, category="step", payload=1)
    file.range_("a", 10, 700, category="forward")
    file.range_("a.b", 310, 600, category="forward")
    file.kernel(1000, 1300, launched=(30, 31), name="first")
    file.kernel(1300, 1700, launched=(320, 321), name="second")
    file.kernel(1800, 1900, launched=(720, 721), name="third")
    return nvprof_kit.open(file.write())


def test_headlines(capture):
    page = capture.report().data.decode()
    assert re.findall(r"<dt>(.*?)</dt><dd><b>(.*?)</b> <span>(.*?)</span></dd>", page) == [
        ("GPU time", "0.001 ms", "3 operations"),
        ("Median step", "0.002 ms", "0.002 to 0.002 ms"),
        ("GPU idle", "57.9 %", "of step 1"),  # 1000 ns before the first operation and 100 between, of 1900
        ("In a named layer", "87.5 %", "100.0 % of forward and backward"),  # 700 of 800
        ("Costliest layer by its own work", "a.b", "50.0 %"),
    ]
    with pytest.raises(UsageError, match="none of the requested steps is in it; it has 1 steps, 1 to 1"):
        capture.report(steps=3)


def test_the_drawn_timeline(capture):
    data = data_of(capture.report().data)
    timeline, texts = data["timeline"], data["texts"]
    (step,) = timeline["steps"]
    assert (step["title"], step["start"], step["length"]) == ("step 1, a typical one", 0, 1900)
    assert step["idle"] == {"0": "GPU 0: idle 57.9 % of the time, in 2 gaps"} and timeline["note"] == ""
    idle, stream, thread = ([unpacked(data, row) for row in group["rows"]] for group in timeline["groups"])
    assert (idle[0]["start"], idle[0]["length"]) == ([0, 1700], [1000, 100])
    rows = [(row["kind"], row["start"], [texts[text] for text in row["text"]]) for row in stream]
    layers = [("layer", [1000], ["a"]), ("layer", [1300], ["a.b"])]
    assert rows == [*layers, ("op", [1000, 1300, 1800], ["first", "second", "third"])]
    assert [texts[layer] for layer in stream[2]["layer"]] == ["a", "a.b", "(none)"]
    assert [texts[phase] for phase in stream[2]["phase"]] == ["forward", "forward", "other"]
    assert [row["start"] for row in thread] == [[0], [10], [310]]
    steps = unpacked(data, data["bySteps"])
    assert (steps["number"], steps["length"]) == ([1], [1900])
    assert unpacked(data, steps["phases"]) == {"forward": [700], "other": [100]}


def test_short_operations_of_a_layer_are_drawn_together_and_counted(file):
    file.range_("a", 0, 900_000, category="forward")
    file.kernel(1_000_000, 1_000_010, launched=(10, 11))
    path, count = file.write(), 250_002
    with sqlite3.connect(path) as db:
        for table, shift in (("KERNEL", 20), ("RUNTIME", 2)):
            shifts = {"start": shift, "end": shift, "correlationId": 1}
            names = [row[1] for row in db.execute(f"PRAGMA table_info(CUPTI_ACTIVITY_KIND_{table})")]
            cells = ", ".join(f'"{name}" + n * {shifts[name]}' if name in shifts else f'"{name}"' for name in names)
            db.execute(
                f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 "
                f"FROM t WHERE n < {count - 1}) SELECT {cells} FROM t, CUPTI_ACTIVITY_KIND_{table}"
            )
    db.close()
    data = data_of(nvprof_kit.open(path).report().data)
    (row,) = [
        unpacked(data, row) for group in data["timeline"]["groups"] for row in group["rows"] if row["kind"] == "op"
    ]
    assert "operations, of at most 10 ns each, are drawn in" in data["timeline"]["note"]
    assert len(row["start"]) < count and (sum(row["count"]), sum(row["busy"])) == (count, 10 * count)


def test_the_page_finds_what_advise_finds():
    capture = nvprof_kit.open(DATA / "metrics" / "llama-2023.4.sqlite.xz")
    page, findings = capture.report().data.decode(), capture.advise().findings
    assert "gpu-metrics" in {one.rule for one in findings}
    for finding in findings:
        assert html.escape(finding.title) in page
        assert f"{finding.confidence.capitalize()} confidence; wrong if {html.escape(finding.refuted_by)}" in page


def test_the_page_is_one_file_whose_own_script_alone_may_run(file):
    file.range_("</script><script>alert(1)</script>", 10, 700, category="forward")
    file.kernel(1000, 1300, launched=(30, 31))
    text = nvprof_kit.open(file.write()).report().data.decode()
    assert re.findall("<script[^>]*>", text) == ['<script type="application/json" id="data">', "<script>"]
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", text)


def test_without_a_gpu_nothing_is_called_one(tmp_path):
    layer = event("user_annotation", "nvprof_kit:forward:layers.0", 5, 40)
    runs = [[event("cpu_op", "aten::mm", 10, 20), layer, event("cpu_op", "aten::mm", 33, us)] for us in (5, 9)]
    base, slower = (nvprof_kit.open(write(tmp_path / f"{run[2]['dur']}.json", run)) for run in runs)
    page = base.report(slower).data
    labels = [group["label"] for group in data_of(page)["timeline"]["groups"]]
    assert labels == ["CPU operators", "CPU thread 0: when its ranges were open"]
    texts = "".join(re.findall(r"<(?:dt|h2|th)\b.*?</(?:dt|h2|th)>|<p class=.quiet.>.*?</p>", page.decode(), re.S))
    assert "GPU" not in texts and ">gpu" not in texts and "unless within a factor of 3.0, as two" in texts
    assert 'class="number worse"' not in page.decode()  # +16 %, of which diff says nothing
