"""What runs inside the program, on a GPU: operations, memory, snapshots, the layer profiler, timers."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.gpu import Program

from nvprof_kit._analysis.hardware import peaks_of


def test_operations_counted_are_those_of_the_formula(program: Program, tmp_path: Path) -> None:
    """Forward once and backward twice the formula, whichever attention; recompute for what is checkpointed."""
    printed = program("flops.py", tmp_path)
    eager = re.findall(r"^(\w+_attention|math): of the formula's forward (\{.*?\})", printed, re.MULTILINE)
    assert len(eager) == 4, printed
    for name, ratios in eager:
        assert json.loads(ratios.replace("'", '"'))["forward"] == pytest.approx(1, abs=0.01), name
    assert "OTHER BITS" not in "\n".join(line for line in printed.splitlines() if "compiled" not in line)
    assert re.search(r"^triton: \[\{.*add_one", printed, re.MULTILINE), "a kernel that PyTorch never sees is named"


@pytest.mark.parametrize("options", [(), ("--checkpoint",)], ids=["plain", "checkpoint"])
def test_memory_is_accounted_for(options: tuple[str, ...], program: Program, tmp_path: Path) -> None:
    program("memory.py", tmp_path, "--layers", "4", "--width", "1024", *options)
    found = json.loads((tmp_path / "expected.json").read_text())
    assert found["worst_unexplained"] < 0.01
    assert found["same_losses"] or not found["same_losses_without_profiler"]
    assert found["boundaries"] > 0


def test_snapshots_of_the_allocator(program: Program, tmp_path: Path) -> None:
    program("snapshot.py", tmp_path)
    found = json.loads((tmp_path / "expected.json").read_text())
    assert found["written_at_step"] and found["written_on_oom"]
    assert found["oom"] == "OutOfMemoryError"


def test_the_layer_profiler_agrees_with_cuda_events(program: Program, tmp_path: Path) -> None:
    program("layer_profiler.py", tmp_path, "--pairs", "2", "--width", "1024")
    found = json.loads((tmp_path / "found.rank0.json").read_text())
    least, median, most = found["kernels_over_events"]
    assert 0 < least <= median <= most <= 1.02, "kernels cannot take longer than the events around them"
    assert found["same_results"] or not found["same_results_without_profiler"]
    assert found["survives_out_of_memory"]


def test_a_stage_never_waits_for_the_gpu(program: Program, tmp_path: Path) -> None:
    printed = program("timers.py", tmp_path)
    left, whole = map(float, re.search(r"left after ([\d.]+) ms of ([\d.]+) ms", printed).groups())
    assert left < 0.5 * whole, printed


def test_the_peaks_of_this_gpu_are_measured(tmp_path: Path) -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "nvprof_kit", "doctor", "--measure", str(tmp_path)], check=False)
    assert time.monotonic() - began < 20
    measured = json.loads((tmp_path / "gpu_peaks.json").read_text())
    listed = peaks_of([measured["gpu"]])
    if listed is not None:
        for dtype, flops in measured["flops"].items():
            assert 0.5 < flops / listed.flops[dtype] < 1.1, dtype
        assert 0.75 < measured["bandwidth"] / listed.bandwidth < 1.02
