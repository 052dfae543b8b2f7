"""One number in two verbs is one number: times, calls and steps of layers, breakdown, summary and SQL."""

import json
import lzma
import re
from functools import lru_cache

import numpy as np
import pytest
from support.data import DATA
from support.page import data_of

import nvprof_kit
from nvprof_kit import Capture, StepOptions

CAPTURES = sorted([*DATA.glob("*.sqlite.xz"), *DATA.glob("kineto/*.json.xz"), *DATA.glob("profiler/*.json.xz")])
PARTS = {"optimizer": ("optimizer", "zero_grad"), "data": ("data", "dataloader")}
PARTS |= {part: (part,) for part in ("forward", "backward")}
"""The phases whose calls a part of the loop has: the first that there is."""

SCOPES = {"steps": None, "all": StepOptions(everything=True)}


@pytest.fixture(scope="module", params=CAPTURES, ids=lambda path: path.name.removesuffix(".xz"))
def capture(request: pytest.FixtureRequest) -> Capture:
    return nvprof_kit.open(request.param)


@lru_cache(2)
def answers(capture: Capture, scope: str) -> tuple[nvprof_kit.Layers, nvprof_kit.Breakdown, nvprof_kit.Summary]:
    """What is compared, asked once for all tests of a capture."""
    steps = SCOPES[scope]
    return capture.layers(steps=steps), capture.breakdown(steps=steps), capture.summary(steps=steps)


@pytest.mark.parametrize("scope", SCOPES)
def test_times_and_steps(capture, scope):
    layers, breakdown, summary = answers(capture, scope)
    rows = layers.to_frame()
    assert layers.summary.steps == summary.steps
    assert set(rows["steps"]) == {layers.summary.steps}

    # the time of all operations
    total = int(rows["gpu_self_ns"].sum())
    assert total == layers.tree[layers.tree["depth"] == 0]["total_ns"].sum() == layers.summary.total_ns
    assert rows["share"].sum() == pytest.approx(1)
    views = [summary.to_frame(view)["gpu_total_ns"].sum() for view in ("kernel", "memory")]
    assert total == sum(views)

    # wall time and busy time of the devices
    windows = breakdown.steps
    if scope == "steps" and len(layers.steps.shown):
        windows = windows[np.append(layers.steps.shown, False)[breakdown.instances]]
    wall, idle = int(windows["wall_ns"].sum()), int(windows["idle_ns"].sum())
    assert (layers.summary.wall_ns, layers.summary.busy_ns) == (wall, wall - idle)
    devices = summary.to_frame("device")
    devices = devices[devices["device"].notna()]
    if layers.info.on_gpu:
        assert (devices["wall_ns"].sum(), devices["busy_ns"].sum()) == (wall, wall - idle)
    distributed = summary.to_frame("distributed")
    if len(distributed):
        both = windows[["compute_ns", "exposed_comm_ns"]].sum()
        assert distributed["exposed_comm_ns"].sum() == both["exposed_comm_ns"]


@pytest.mark.parametrize("scope", SCOPES)
def test_calls(capture, scope):
    layers, _, summary = answers(capture, scope)
    rows = layers.to_frame()
    outside = rows[rows["layer"] == "(none)"].set_index("phase")
    top = rows[rows["layer"].isin(layers.tree["layer"][layers.tree["depth"] == 0])]
    models = top[(top["layer"] != "(none)") & (top["cpu_ns"] > 0)].groupby("phase")[["calls", "cpu_ns"]].sum()
    parts = summary.to_frame("model").set_index("part")
    ranges = summary.to_frame("user")
    for part, phases in PARTS.items():
        named = [phase for phase in phases if phase in outside.index]  # else a part is the model's own ranges
        calls = (outside["calls"][named] if named else models["calls"]).get(*named[:1] or [part], 0)
        assert calls == parts["calls"].get(part, 0), part
        assert named or models["cpu_ns"].get(part, 0) == parts["cpu_total_ns"].get(part, 0), part
    for phase in outside.index[outside["calls"] > 0]:
        named = ranges[(ranges["range"] == phase) & ranges["category"].isin(["phase", "optimizer", "data"])]
        # one range in another of the same text is not another call
        assert named["calls"].max() <= outside["calls"][phase] <= named["calls"].sum(), phase
    in_layers = rows[rows["layer"] != "(none)"]
    loop = in_layers[in_layers["phase"].isin(["forward", "backward", "recompute"])]
    assert loop["gpu_ops"].sum() + outside["gpu_ops"].sum() == rows["gpu_ops"].sum()


STEPS = re.compile(r" · ((?:\d+ of )?\w+ steps?)\b")


def test_headings_say_the_same_steps(capture):
    """How many steps there are, and of how many the figures are if warm-up is left out."""
    results = [*answers(capture, "steps")]
    if capture.info.on_gpu:
        results.append(capture.advise())
    texts = {tuple(STEPS.findall(str(result).partition("\n")[0])) for result in results}
    choice = results[0].steps
    of = "" if choice.count == len(choice.shown) else f"{choice.count} of "
    assert texts == {(f"{of}{len(choice.shown) or 'no'} step{'s' * (len(choice.shown) != 1)}",)}


PAGES = ("eager-2024.2", "hooks-ddp-2024.2", "graph-2024.2", "checkpoint-2023.4", "generate-2024.2", "slow-2024.2")


@pytest.mark.parametrize("name", PAGES)
def test_the_page(name):
    """Each layer's time and CPU time, the operations, the steps and the median step, as the tables have them."""
    capture = nvprof_kit.open(DATA / f"{name}.sqlite.xz")
    page = capture.report().data.decode()
    layers, breakdown = capture.layers(), capture.breakdown()
    assert f"{layers.summary.ops:,} operations" in page
    (steps,) = STEPS.findall(str(layers).partition("\n")[0])
    assert f" · {steps}" in page  # the same heading as the table's
    for step in data_of(page.encode())["timeline"]["steps"]:
        rows = breakdown.steps[breakdown.steps["step"] == step["step"]]
        idle = {
            f"GPU {row.device}: idle {100 * row.idle_ns / row.wall_ns:.1f} % of the time" for row in rows.itertuples()
        }
        assert {sentence.partition(",")[0] for sentence in step["idle"].values()} <= idle and step["idle"]
    tree = layers.tree.copy()
    tree.index = tree["layer"].where(tree["layer"] != "(none)", "(none) " + tree["phase"])
    rows = re.findall(r'<tr [^>]*data-path="([^"]*)"(?![^>]*data-fold)[^>]*>(.*?)</tr>', page, re.S)
    assert {path for path, _ in rows} <= set(tree.index) and rows
    for path, cells in rows:
        values = [int(float(value)) for value in re.findall(r'<td class="number" data-value="([^"]*)"', cells)]
        assert tree["total_ns"][path] in values and tree["cpu_ns"][path] in values, path
    if layers.steps.count > 1 and breakdown.steps["device"].nunique() == 1:
        shown = breakdown.steps[np.append(layers.steps.shown, False)[breakdown.instances]]["wall_ns"]
        usual_ms = shown.sort_values().iloc[(len(shown) - 1) // 2] / 1e6
        told = re.search(r"Median step</dt><dd><b>([\d.,]+) ms", page)
        assert told and float(told[1].replace(",", "")) == pytest.approx(usual_ms, rel=0.01)


def test_the_median_step():
    """The line about warm-up has the median of the table."""
    text = str(nvprof_kit.open(DATA / "eager-2024.2.sqlite.xz").breakdown())
    (told,) = {*re.findall(r"median of the others is ([\d.,]+) ms", text)}
    assert re.search(rf"median of \d+\s+{re.escape(told)} ", text)


@pytest.mark.parametrize("path", [path for path in CAPTURES if ".json" in path.name], ids=lambda path: path.name)
def test_times_of_a_pytorch_trace_count_from_its_first_event(path):
    trace = json.loads(lzma.decompress(path.read_bytes()))["traceEvents"]
    events = [event for event in trace if event["ph"] == "X" and event["cat"] != "Trace"]
    first_us, last_us = min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)
    capture = nvprof_kit.open(path)
    times = {
        "steps": capture.steps[["start_ns", "end_ns"]],
        "breakdown": capture.breakdown().steps["start_ns"],
        "idle": capture.breakdown().to_frame("idle")["longest_at_ns"],
        "sql": capture.sql("SELECT start_ns, end_ns FROM ops"),
    }
    if capture.info.on_gpu:
        times["advise"] = capture.advise().to_frame()[["start_ns", "end_ns"]]
    for verb, values in times.items():
        found = values.to_numpy()
        assert len(found) or verb == "advise"  # which has nothing to say of some
        assert ((found >= 0) & (found <= 1000 * (last_us - first_us) + 1)).all(), verb
