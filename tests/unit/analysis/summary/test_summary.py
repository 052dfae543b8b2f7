"""The eight views: tiny captures with their arithmetic, and sums that must hold on real ones."""

import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import PID, NsysFile, thread
from support.data import DATA

import nvprof_kit
from nvprof_kit import Summary


def small(path: Path) -> Path:
    """Two steps of 1000 ns: a gemm in layers.0, a collective that overlaps it by half, a copy."""
    file = NsysFile(path)
    for number in (0, 1):
        at = 1000 * number
        file.range_(f"step {number}", at, at + 1000, category="step", payload=number)
        file.range_("forward", at, at + 50, category="phase")
        file.range_("layers.0", at + 10, at + 40)
        file.range_("aten::mm, seq = 3", at + 12, at + 20, category=None, domain="", registered=False)
        file.kernel(at + 100, at + 300 + 100 * number, launched=(at + 14, at + 18), name="nvjet_a")
        file.range_("optimizer", at + 60, at + 90, category="optimizer")
        file.kernel(at + 250, at + 350, launched=(at + 62, at + 64), name="ncclDevKernel_AllReduce", stream=9)
        file.kernel(at + 600, at + 620, launched=(at + 70, at + 75), table="MEMCPY", memory=(0, 2), size=400)
    return file.write()


def analysed(path: Path, **options: Any) -> Summary:
    return nvprof_kit.open(path).summary(**options)


def test_how_busy_the_cpu_is(file):
    """Thread 8 is on a CPU since before the first switch, thread 9 still on one at the last."""
    file.range_("step 0", 0, 1000, category="step", payload=0)
    file.kernel(100, 200, launched=(0, 5))
    own = [(-50, 7, PID, 1), (300, 7, PID, 0), (500, 8, PID, 0), (900, 9, PID, 1), (1200, 7, PID, 1)]
    for moment, tid, pid, put_on in (*own, (0, 50, 8, 1), (250, 50, 8, 0)):
        row = {"start": moment, "cpu": 0, "isSchedIn": put_on, "globalTid": thread(tid, pid)}
        file.rows["SCHED_EVENTS"].append(row)
    views = analysed(file.write())
    rows = views.views["device"]
    busy = {"Test GPU": 100, "CPU": 300 + 500 + 100, "CPU, other processes": 250}
    assert dict(zip(rows["name"], rows["busy_ns"], strict=True)) == busy
    assert "cores" in views.notes["device"]


def test_by_step_and_sorted(tmp_path):
    views = analysed(small(tmp_path / "run.sqlite"), by="step").views
    assert views["kernel"][["step", "name", "gpu_total_ns"]].to_numpy().tolist() == [
        [0, "nvjet_a", 200], [0, "ncclDevKernel_AllReduce", 100],
        [1, "nvjet_a", 300], [1, "ncclDevKernel_AllReduce", 100],
    ]  # fmt: skip
    ratios = views["kernel"].groupby("step")["gpu_ratio"].sum() + views["memory"].groupby("step")["gpu_ratio"].sum()
    assert ratios.tolist() == [1, 1] and views["overview"]["gpu_ratio"][0] == 0.2
    gpu = views["device"].dropna(subset="device")
    assert gpu[["step", "busy_ns", "utilisation"]].to_numpy().tolist() == [[0, 270, 0.27], [1, 320, 0.32]]
    ordered = analysed(small(tmp_path / "run.sqlite"), sort="calls", view="kernel").views["kernel"]
    assert ordered["calls"].is_monotonic_decreasing


@pytest.mark.parametrize("by", [None, "step"])
def test_ratios_are_of_the_wall_time_that_the_cpu_time_lies_in(file, by):
    """A host that runs ahead: most of step 1's forward is in the wall time of step 0."""
    for step, (begin, end) in enumerate([(0, 100), (100, 1100)]):
        file.range_(f"step {step}", begin, end, category="step", payload=step)
        file.range_("forward", begin, end - 50, category="phase")
        file.kernel(end - 90, 1000 + 90 * step, launched=(begin + 5, begin + 8))
    file.call("cudaMalloc", 900, 1020)
    views = analysed(file.write(), by=by, steps=1).views
    assert views["model"][["cpu_total_ns", "cpu_ratio"]].to_numpy().tolist() == [[950, 0.5]]
    assert 0.2 in views["overview"]["cpu_ratio"].tolist()


@pytest.mark.parametrize("by_step", [False, True])
def test_sorted_operators_keep_their_kernels(by_step):
    path, options = DATA / "slow-operators-2024.2.sqlite.xz", {"view": "operator", "by": "step" if by_step else None}
    plain, ordered = (analysed(path, **options, sort=sort).views["operator"] for sort in ("", "cpu_max_ns"))
    keys = ["step", "operator", "kernel"] if by_step else ["operator", "kernel"]
    assert sorted(map(str, ordered.to_numpy().tolist())) == sorted(map(str, plain.to_numpy().tolist()))
    above = ordered["operator"].where(ordered["kernel"] == "").ffill()
    assert (above == ordered["operator"]).all()
    for _, rows in ordered.groupby("step") if by_step else [(0, ordered)]:
        assert rows[rows["kernel"] == ""]["cpu_max_ns"].is_monotonic_decreasing
        assert not rows.duplicated(keys).any()


@pytest.mark.parametrize("capture", ["kineto-checkpoint", "kineto-stack"])
def test_kernels_are_below_the_operator_that_the_profiler_links_them_to(capture):
    """PyTorch's profiler gives a kernel the id of the operator that launched it; we tell it by thread and time."""
    path = DATA / "foreign" / f"{capture}.json.xz"
    events = json.loads(lzma.decompress(path.read_bytes()))["traceEvents"]
    operators = {event["args"]["External id"]: event["name"] for event in events if event.get("cat") == "cpu_op"}
    linked: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            linked[operators[event["args"]["External id"]], event["name"]] += round(event["dur"] * 1000)
    rows = analysed(path, view="operator").views["operator"]
    rows = rows[rows["kernel"] != ""].set_index(["operator", "kernel"])
    assert rows["gpu_total_ns"].to_dict() == linked


GOLDEN = {
    **dict.fromkeys(("eager-2023.4", "hooks-ddp-2024.2"), ("kernel", "model", "memory", "distributed", "user")),
    "slow-operators-2024.2": ("operator", "memory"),
    "slow-cpu-2024.2": ("device",),
}


@pytest.mark.parametrize(("capture", "view"), [(capture, view) for capture in GOLDEN for view in GOLDEN[capture]])
def test_the_golden_tables(capture, view, golden):
    found = analysed(DATA / f"{capture}.sqlite.xz", view=(view,), steps="all").views[view]
    golden(f"summary/{capture}.{view}.csv", found.to_csv(index=False, float_format="%.6g"))


def test_an_empty_view_says_which_switch_gives_it():
    result = analysed(DATA / "eager-2023.4.sqlite.xz", view=("operator", "distributed"))
    assert not len(result.views["operator"])
    assert "emit_nvtx" in result.notes["operator"] and "--pytorch" in result.notes["operator"]
    assert "no communication" in result.notes["distributed"]


torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpu") / "run.json"
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                layer(torch.randn(2, 8, 32)).square().mean().backward()
    profile.export_chrome_trace(str(path))
    return path


def calls_and_own_time(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Calls of each operator, and its time without what it calls in ns, by the nesting of the JSON's events alone."""
    calls: Counter[str] = Counter()
    own: Counter[str] = Counter()
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            calls[event["name"]] += 1
            threads.setdefault(event["tid"], []).append(event)
    for events in threads.values():
        events.sort(key=lambda one: (one["ts"], -one["dur"]))
        around: list[dict[str, Any]] = []
        for event in events:
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            length = round(event["dur"] * 1000)
            own[event["name"]] += length
            if around:
                own[around[-1]["name"]] -= length
            around.append(event)
    return calls, own


def test_the_kernel_view_counts_calls_and_takes_the_mean_over_them(recorded):
    calls, own = calls_and_own_time(recorded)
    table = nvprof_kit.open(recorded).summary("kernel", steps="all").to_frame()
    assert dict(zip(table["name"], table["calls"], strict=True)) == calls
    for row in table.itertuples():
        # times of the JSON are rounded to ns at both ends of each event
        assert row.gpu_total_ns == pytest.approx(own[row.name], abs=2 * calls[row.name] + 2)
        assert row.gpu_avg_ns == round(row.gpu_total_ns / row.calls)
    operators = nvprof_kit.open(recorded).summary("operator", steps="all").to_frame()
    assert dict(zip(operators["operator"], operators["calls"], strict=True)) == calls


def test_without_a_gpu_nothing_is_said_of_one(recorded):
    capture = nvprof_kit.open(recorded)
    for answer in (capture.summary(), capture.breakdown(), capture.layers()):
        text = str(answer)
        said = [line for line in text.splitlines() if "GPU" in line and "no GPU" not in line]
        assert not said
        headings = [
            text.splitlines()[place - 1].split() for place, line in enumerate(text.splitlines()) if "──" in line
        ]
        assert not any({"device", "stream"} & set(words) for words in headings)
        assert len(set(answer.warnings)) == len(answer.warnings)
    device = capture.summary("device").to_frame()
    assert device["name"].tolist() == ["CPU operators"] and device["device"].isna().all()


def test_diff_and_export_count_calls(recorded, tmp_path):
    calls, _ = calls_and_own_time(recorded)
    # one call of dropout was taken out of the second recording
    whole = json.loads(recorded.read_text())
    gone = max((one for one in whole["traceEvents"] if one.get("name") == "aten::dropout"), key=lambda one: one["ts"])
    whole["traceEvents"].remove(gone)
    (tmp_path / "less.json").write_text(json.dumps(whole))
    capture = nvprof_kit.open(recorded)
    kernels = capture.diff(nvprof_kit.open(tmp_path / "less.json")).kernels.set_index("name")
    base, new = kernels.loc["aten::dropout", ["base_count", "new_count"]].tolist()
    assert base * 3 == calls["aten::dropout"]  # the mean over steps; every step runs as many
    assert base - new in (pytest.approx(1 / 3), pytest.approx(1 / 2))  # one of three steps, or of two steady ones

    capture.export(data_format="json").save(tmp_path / "run.perfetto.json")
    slices = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    shown = Counter(one["name"] for one in slices if one.get("cat") == "operation")
    assert {name: count for name, count in shown.items() if not name.endswith(" (continued)")} == calls
