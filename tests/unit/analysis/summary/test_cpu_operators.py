"""Operators of a recording without a GPU: each call counts once, whatever it calls on its way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import nvprof_kit

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


def test_the_kernel_view_counts_calls_and_takes_the_mean_over_them(recorded: Path) -> None:
    calls, own = calls_and_own_time(recorded)
    table = nvprof_kit.open(recorded).summary("kernel", steps="all").to_frame()
    assert dict(zip(table["name"], table["calls"], strict=True)) == calls
    for row in table.itertuples():
        # times of the JSON are rounded to ns at both ends of each event
        assert row.gpu_total_ns == pytest.approx(own[row.name], abs=2 * calls[row.name] + 2)
        assert row.gpu_avg_ns == round(row.gpu_total_ns / row.calls)


def test_without_a_gpu_nothing_is_said_of_one(recorded: Path) -> None:
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


def test_operators_of_the_summary_are_the_same_ones(recorded: Path) -> None:
    calls, _ = calls_and_own_time(recorded)
    table = nvprof_kit.open(recorded).summary("operator", steps="all").to_frame()
    assert dict(zip(table["operator"], table["calls"], strict=True)) == calls


def test_diff_and_export_count_calls(recorded: Path, tmp_path: Path) -> None:
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

    capture.export(tmp_path / "run.perfetto.json")
    slices = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    shown = Counter(one["name"] for one in slices if one.get("cat") == "operation")
    assert {name: count for name, count in shown.items() if not name.endswith(" (continued)")} == calls
