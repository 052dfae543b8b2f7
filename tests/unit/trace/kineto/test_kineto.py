"""PyTorch traces: with a GPU and without, with our ranges and without."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.captures import as_kineto, kineto_file
from support.captures.kineto_file import Event, event, kernel

import nvprof_kit
from nvprof_kit._trace.kineto import stream
from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError


def write(path: Path, *events: Event, **whole: Any) -> Path:
    return kineto_file.write(path, [{"ph": "M", "name": "process_name"}, *events], **whole)


GPU_EVENTS = (
    event("cuda_runtime", "cudaLaunchKernel", 10, 2, correlation=1),
    event("cuda_driver", "cuLaunchKernelEx", 50, 2, tid=2, correlation=2),
    event("kernel", "gemm", 100, 1.5, correlation=1, device=0, stream=7),
    event("kernel", "gemm", 110, 2.25, correlation=2, device=0, stream=7),
)


def sums(path: Path) -> dict[tuple[str, str], int]:
    rows = nvprof_kit.open(path).layers().rows
    return {(row.layer, row.phase): row.gpu_self_ns for row in rows.itertuples() if row.gpu_self_ns}


def test_pytorchs_annotation_of_a_phase_that_is_ours_is_no_second_call(tmp_path):
    path = write(
        tmp_path / "a.json",
        event("user_annotation", "nvprof_kit:step:step 0", 0, 90),
        event("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 1, 2),  # ours begin once the model is known
        event("user_annotation", "nvprof_kit:phase:optimizer", 5, 20),
        event("user_annotation", "Optimizer.step#AdamW.step", 6, 18),
        *GPU_EVENTS,
    )
    ranges = open_capture(path).ranges
    begins = sorted(zip(ranges["text"], ranges["start_ns"] - ranges["start_ns"].min(), strict=True))
    assert begins == [("data", 1000), ("optimizer", 5000), ("step 0", 0)]


def test_old_category_names_and_a_bare_list_of_events(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([event("Operator", "aten::mm", 0, 3)]))
    assert sums(tmp_path / "a.json") == {("(none)", "other"): 3000}


def test_no_domains(tmp_path):
    with pytest.raises(CaptureError, match="no NVTX domains"):
        open_capture(write(tmp_path / "a.json", event("cpu_op", "aten::mm", 0, 3)), domain="other")


def operator(name: str, start: float, tid: int, sequence: int, forward_thread: int = 0) -> Event:
    numbers = {"Sequence number": sequence, "Fwd thread id": forward_thread}
    return event("cpu_op", name, start, 8, tid=tid, **numbers)


def arrow(number: int, ends: str, start: float, tid: int) -> Event:
    return {"ph": ends, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 1, "tid": tid, "ts": start}


@pytest.mark.parametrize("arrows", [True, False])
def test_backward_without_our_ranges_over_two_forward_threads(tmp_path, arrows):
    """PyTorch numbers forward threads by itself; the arrows say which is which, and without them nobody is guessed."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        event("python_function", "nn.Module: Net_0", 0, 100),
        event("python_function", "nn.Module: Linear_0", 10, 50),
        operator("aten::mm", 20, 1, 5),
        event("python_function", "nn.Module: Other_0", 0, 100, tid=3),
        operator("aten::mm", 20, 3, 5),
        operator(node, 200, 2, 5, forward_thread=11),
        operator("MmBackward0", 202, 2, 5, forward_thread=11),
        operator(node, 300, 2, 5, forward_thread=12),
        operator("MmBackward0", 302, 2, 5, forward_thread=12),
    ]
    launched = ((21, 1, 1), (204, 2, 2), (304, 2, 3))
    events += [event("cuda_runtime", "cudaLaunchKernel", at, 1, tid=tid, correlation=n) for at, tid, n in launched]
    events += [event("kernel", "gemm", 1000 + n, n / 1000, correlation=n, device=0, stream=7) for _, _, n in launched]
    if arrows:
        for number, (forward, backward) in enumerate(((1, 202), (3, 302))):
            events += [arrow(number, "s", 20, forward), arrow(number, "f", backward, 2)]
    forward = {("Net.Linear", "forward"): 1}
    told = {("Net.Linear", "backward"): 2, ("Other", "backward"): 3}
    assert sums(write(tmp_path / "a.json", *events)) == forward | (told if arrows else {("(none)", "backward"): 5})


def test_rules_for_what_the_user_annotated(tmp_path):
    path = write(tmp_path / "a.json", event("user_annotation", "blk 3 fwd", 5, 20), *GPU_EVENTS)
    rules = tmp_path / "own.toml"
    rules.write_text("[[rule]]\nmatch = 'blk (?P<n>.+) fwd'\nlayer = 'layers.{n}'")
    rows = nvprof_kit.open(path, rules=rules).layers().rows
    assert rows["layer"].tolist()[0] == "layers.3"


ODD = {
    "a half letter in a name": ('"name": "aten::mm"', '"name": "aten::m\\ud800"'),
    "a time that is NaN": ('"dur": 7', '"dur": NaN'),
    "a time as text": ('"dur": 7', '"dur": "7"'),
    "arguments that are a list": ('"args": {}', '"args": [1]'),
    "a category that is a number": ('"cat": "cpu_op"', '"cat": 7'),
    "an event that is none": ('{"ph": "M"', '7, {"ph": "M"'),
    "a control character": ('"name": "aten::mm"', '"name": "aten::\tmm"'),
    "a number of 40 digits": ('"pid": 1', f'"pid": 1{"0" * 40}'),
}


@pytest.mark.parametrize(("old", "new"), ODD.values(), ids=ODD)
def test_what_the_quick_decoder_refuses_is_read_event_by_event(tmp_path, old, new, monkeypatch):
    """The window with the odd event gives what the standard library's decoder gives for all."""
    events = [event("cpu_op", f"aten::mm{number % 7}", 10 * number, 7 if number == 50 else 5) for number in range(100)]
    path = write(tmp_path / "a.json", *events)
    text = path.read_text()
    place = text.index('"dur": 7') - 60 if "dur" in old else len(text) // 2
    path.write_text(text[:place] + text[place:].replace(old, new, 1) if "ph" not in old else text.replace(old, new, 1))

    def answer() -> object:
        try:
            trace = open_capture(path, optional=["name", "calls"])
        except CaptureError as error:
            return str(error)
        return trace.ops.to_csv(), trace.calls.to_csv() if trace.calls is not None else "", trace.info

    quick = answer()
    monkeypatch.setattr(stream, "_TRIES", 0)
    assert answer() == quick


BOOTED_US = 51 * 86_400 * 1e6
"""Kineto counts from when the machine was booted, here 51 days ago."""


def trace(path: Path, changed: int = -1, **change: Any) -> Path:
    """30 calls, each 10 µs after the other, and the kernels that they launch; one of the calls changed."""
    events = []
    for number in range(30):
        at = BOOTED_US + 10 * number
        call, run = kernel("gemm", at + 5, 4.0, at, number + 1)
        events += [call | {"dur": 2.0} | (change if number == changed else {}), run]
    return kineto_file.write(path, events, schemaVersion=1)


@pytest.mark.parametrize("moment", [-1.0, 0.0, 99.0, BOOTED_US + 86_400e6])
def test_a_call_hours_away_from_all_others(tmp_path, moment):
    warnings = open_capture(trace(tmp_path / "run.json", 7, ts=moment)).info.warnings
    assert any("ts of cuda_runtime lies hours away from the rest of the trace in 1 events" in text for text in warnings)


def test_a_category_of_another_release_is_warned_of(tmp_path):
    """A kernel that is not read is missing in every sum."""
    (said,) = open_capture(trace(tmp_path / "run.json", 7, cat="gpu_runtime")).info.warnings[:1]
    assert said == "cat is 'gpu_runtime' in 1 events, a category that is not known: they are not read"
    assert open_capture(trace(tmp_path / "run.json", 7, cat="cuda_sync")).info.warnings == ()


@pytest.mark.parametrize("more", ["{}", "\n[1]", " end", "\0"])
def test_what_follows_the_trace_is_refused(tmp_path, more):
    """Of two traces in one file only the first was read."""
    path = trace(tmp_path / "run.json")
    whole = path.read_text()
    for text in (whole, json.dumps(json.loads(whole)["traceEvents"])):
        path.write_text(text + "\r\n")
        assert open_capture(path).info.warnings == ()
        path.write_text(text + more)
        with pytest.raises(CaptureError, match=r"more follows at .* after the end of the trace; needed one trace"):
            open_capture(path)


def test_two_lists_of_events_are_refused(tmp_path):
    path = trace(tmp_path / "run.json")
    path.write_text(path.read_text().removesuffix("}") + ', "traceEvents": []}')
    with pytest.raises(CaptureError, match="traceEvents is in it twice"):
        open_capture(path)


def test_modules_without_names_are_told_of(tmp_path):
    path = write(
        tmp_path / "a.json",
        event("python_function", "nn.Module: Block_1", 0, 30),
        event("python_function", "nn.Module: Linear_7", 5, 20),
        event("cpu_op", "aten::mm", 10, 5),
    )
    trace = open_capture(path)
    assert trace.ranges["text"].tolist() == ["Block", "Block.Linear"]
    said = "by class and order (Block.Linear), not by their names in the model"
    assert any(said in warning for warning in trace.info.warnings)


def test_calls_and_the_hosts_end_of_copies_are_those_of_a_pytorch_trace(file, tmp_path):
    file.kernel(300, 330, launched=(110, 115))
    file.call("cudaStreamSynchronize_v3020", 120, 340)
    for start, kind, memory in ((350, 1, (0, 2)), (360, 2, (2, 1)), (370, 8, (2, 2))):
        file.kernel(
            start, start + 9, launched=(start - 220, start - 218), table="MEMCPY", copy_kind=kind, memory=memory
        )
    file.write()
    as_kineto.write(file.path, tmp_path / "run.json.gz")
    file.overhead("CUPTI: Buffer flush", 150, 160)
    read = [open_capture(path, optional=("calls", "host_memory")) for path in (file.write(), tmp_path / "run.json.gz")]
    for trace in read:
        calls = trace.calls
        assert calls is not None
        api, overhead = calls[calls["kind"] == 0].sort_values("start_ns"), calls[calls["kind"] == 1]
        assert api["name"].tolist() == ["cudaLaunchKernel", "cudaStreamSynchronize", *["cudaLaunchKernel"] * 3]
        assert (api["end_ns"] - api["start_ns"]).tolist() == [5, 220, 2, 2, 2]
        assert calls["tid"].nunique() == calls["pid"].nunique() == 1
        assert trace.ops.sort_values("start_ns")["host_memory"].tolist() == ["", "pageable", "pinned", ""]
        expected = [[150, 160, -1]] if trace is read[0] else []
        assert overhead[["start_ns", "end_ns", "correlation"]].to_numpy().tolist() == expected
