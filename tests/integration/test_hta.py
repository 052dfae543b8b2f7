"""The breakdown beside Holistic Trace Analysis on the same H200 runs.

HTA has dependencies of its own, so it runs in a Python of its own: set NVPROF_KIT_HTA_PYTHON to one that has
``HolisticTraceAnalysis``.
"""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest
from support.captures import as_kineto
from support.data import unpacked

import nvprof_kit

PYTHON = os.environ.get("NVPROF_KIT_HTA_PYTHON")
ASK = """
import json, sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[2])
times = trace.get_temporal_breakdown(visualize=False).iloc[0]
overlap = trace.get_comm_comp_overlap(visualize=False)
print(json.dumps({**{name: float(times[name]) for name in times.index}, "overlap": float(overlap.iloc[0, 1])}))
"""


@pytest.mark.skipif(PYTHON is None, reason="NVPROF_KIT_HTA_PYTHON names no Python with HolisticTraceAnalysis")
@pytest.mark.parametrize(
    "capture", ["eager-2023.4.sqlite", "hooks-ddp-2024.2.sqlite", "kineto/ddp.rank0.json", "kineto/fsdp.rank0.json"]
)
def test_the_same_times(capture, tmp_path):
    plain, trace = tmp_path / f"run{Path(capture).suffix}", tmp_path / "rank0.json.gz"
    unpacked(f"{capture}.xz", plain)
    if plain.suffix == ".sqlite":
        as_kineto.write(plain, trace)
    else:
        trace.write_bytes(gzip.compress(plain.read_bytes()))
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1", "PYTHONPATH": ""}
    command = [str(PYTHON), "-c", ASK, str(trace), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    opened = nvprof_kit.open(plain)
    steps = opened.breakdown().steps
    # HTA's whole is from the first operation to the last; ours begins with the first step's range and ends with the
    # last step's, both idle
    ops = opened.tables["ops"]
    outside = int(steps["wall_ns"].sum()) - int(ops["end_ns"].max() - ops["start_ns"].min())
    exposed = int(steps["exposed_comm_ns"].sum() + steps["exposed_copy_ns"].sum())
    assert theirs["compute_time(us)"] * 1000 == pytest.approx(int(steps["compute_ns"].sum()), abs=100)
    assert theirs["non_compute_time(us)"] * 1000 == pytest.approx(exposed, abs=100)
    assert theirs["idle_time(us)"] * 1000 == pytest.approx(int(steps["idle_ns"].sum()) - outside, abs=100)
    comm = int(steps["comm_ns"].sum())
    if comm:
        hidden = 100 * (comm - int(steps["exposed_comm_ns"].sum())) / comm
        assert theirs["overlap"] == pytest.approx(hidden, abs=0.01)
