"""The plan of an ncu run: which kernels, what they cover, and the script that measures them."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.cli import executable, execute
from support.data import DATA, ROOT
from support.lane import examples

import nvprof_kit
from nvprof_kit._analysis.kernels.signatures import NEEDED, Kernels, read_kernels
from nvprof_kit._analysis.ncu.counters import counters
from nvprof_kit._analysis.ncu.layers import ncu_layers
from nvprof_kit._analysis.ncu.owners import _plain
from nvprof_kit._analysis.ncu.plan import plan
from nvprof_kit._trace.open import open_capture, open_ncu
from nvprof_kit._trace.schema import Trace
from nvprof_kit.errors import CaptureError, UsageError

LLAMA = DATA / "llama-2023.4.sqlite.xz"
NCU_DATA = DATA / "ncu"


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    """Two layers alike, 140 ns each, and an optimizer of 20 ns: 300 ns of kernels and copies."""
    file = NsysFile(tmp_path / "run.sqlite")
    for layer, at in (("model.layers.0", 0), ("model.layers.1", 1000)):
        file.range_(layer, at, at + 500, category="forward")
        file.kernel(at + 10, at + 110, launched=(at + 1, at + 2), name="gemm", grid=(4, 1, 1))
        file.kernel(at + 110, at + 140, launched=(at + 3, at + 4), name="gemm", grid=(8, 1, 1))
        file.kernel(at + 140, at + 150, launched=(at + 5, at + 6), name="add")
    file.kernel(2000, 2012, launched=(2000, 2001), name="adam")
    file.kernel(2012, 2020, launched=(2002, 2003), name="copy", table="MEMCPY")
    return file


def planned(file: NsysFile, **options: Any) -> nvprof_kit.NcuPlan:
    return nvprof_kit.open(file.write()).ncu_plan(**options)


def test_the_name_that_covers_most_is_measured_in_each_of_its_configurations(file):
    # gemm in both grids: 2 * (100 + 30) = 260 of 300 ns; both come with the name
    made = planned(file, share=0.6)
    assert made.names == ("_Zgemm",)
    columns = ["kernel", "grid", "block", "registers", "shared_bytes", "launches", "gpu_ns"]
    assert made.rows[columns].values.tolist() == [
        ["gemm", "(4, 1, 1)", "(32, 1, 1)", 16, 1024, 2, 200],
        ["gemm", "(8, 1, 1)", "(32, 1, 1)", 16, 1024, 2, 60],
    ]
    assert made.rows["share"].tolist() == pytest.approx([200 / 300, 60 / 300])
    assert made.rows["covered"].tolist() == pytest.approx([200 / 300, 260 / 300])
    assert made.covered == pytest.approx(260 / 300)
    assert (made.gpu_ns, made.launches) == (300, 7)
    with pytest.raises(UsageError, match=r"--share 0\.99 cannot be reached: .* take 97\.33% of the GPU time"):
        planned(file, share=0.99)  # copies cannot be measured


def test_collectives_are_left_out_and_said(file):
    file.kernel(3000, 9000, launched=(3000, 3001), name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)")
    made = planned(file, share=0.9)
    assert made.names == ("_Zgemm", "_Zadd")  # as without the collective
    assert (made.gpu_ns, made.collectives_ns, made.launches) == (300, 6000, 7)
    # 6000 of 6300 ns
    assert "collectives are left out (95.2 % of the GPU time)" in str(made)
    file.range_("sync", 2990, 3100, category="forward")
    with pytest.raises(CaptureError, match="every kernel in sync is a collective's"):
        planned(file, layer="sync")


def test_one_layer(file):
    made = planned(file, layer="model.layers.1")
    assert (made.gpu_ns, made.launches, made.covered) == (140, 3, pytest.approx(130 / 140))
    with pytest.raises(CaptureError, match=r"no kernel in model\.layers\.7;"):
        planned(file, layer="model.layers.7")


def test_every_layer_reaches_the_share(file):
    file.range_("head", 3000, 3500, category="forward")
    file.kernel(3010, 3011, launched=(3001, 3002), name="tiny")
    assert "_Ztiny" not in planned(file).names
    made = planned(file, every_layer=True)
    assert "_Ztiny" in made.names
    assert made.least_covered[1] >= 0.9


@settings(max_examples=examples(20))
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), min_size=1, max_size=9), st.floats(0.05, 0.99))
def test_the_cover_is_enough_none_of_it_superfluous_and_near_the_optimum(tmp_path_factory, kernels, share):
    file = NsysFile(tmp_path_factory.mktemp("any") / "run.sqlite")
    for number, (ns, name) in enumerate(kernels):  # each of a grid of its own, so a signature
        at = 100 * number
        file.kernel(at, at + ns, launched=(at, at + 1), name=f"k{name}", grid=(number + 1, 1, 1))
    chosen = {int(name.removeprefix("_Zk")) for name in planned(file, share=share).names}
    need = share * sum(ns for ns, _ in kernels)
    gain = {name: sum(ns for ns, other in kernels if other == name) for _, name in kernels}
    price = {name: sum(other == name for _, other in kernels) for name in gain}
    covered = sum(gain[name] for name in chosen)
    assert covered >= need * (1 - 1e-9)
    assert all(covered - gain[name] < need * (1 + 1e-6) for name in chosen)
    best = min(
        sum(price[name] for name in some)
        for count in range(1, len(gain) + 1)
        for some in itertools.combinations(gain, count)
        if sum(gain[name] for name in some) >= need * (1 - 1e-9)
    )
    assert sum(price[name] for name in chosen) <= best + max(price.values()) - 1


def test_the_prediction_of_a_measured_run():
    """12 layers, 71 launches with 3.75 GB on an H200: 51.3 s, of which the program alone takes 12.6 s.

    Those were the first of each configuration; six numbers of launches measure each role's.
    """
    made = nvprof_kit.open(NCU_DATA / "run-2023.4.sqlite.xz").ncu_plan(every_layer=True)
    seconds = made.predicted_seconds(3.75)
    assert (made.measurements, made.invocations) == (89, (1, 50, 60, 72, 108, 145))
    assert made.covered == pytest.approx(0.903, abs=0.001)
    assert seconds[0] == pytest.approx(51.3 + (89 - 71) * 0.545, rel=0.06)
    assert replace(made, section_set="my own set").predicted_seconds() is None


@pytest.fixture(scope="module")
def llama_plan() -> nvprof_kit.NcuPlan:
    return nvprof_kit.open(LLAMA).ncu_plan(share=0.5)


def test_the_script_measures_the_names_and_nothing_else(llama_plan):
    names = ("_ZN2at6gemmILi4EEvPf", "triton_poi_0", "f.cold$1")
    info = replace(llama_plan.info, own_window=True)
    text = replace(llama_plan, names=names, invocations=(1, 60), info=info).script("plan")
    assert len([line for line in text.splitlines() if line[:1] != "#"]) <= 20
    (line,) = [line for line in text.splitlines() if line.startswith('"${NCU')]
    argv = shlex.split(line.removesuffix('"$@" <&0 &'))
    assert argv == [
        *("${NCU:-ncu}", "--target-processes", "all", "--nvtx", "--set", "basic"),
        *("--replay-mode", "kernel", "--clock-control", "none", "--cache-control", "all"),
        *("--profile-from-start", "off", "--filter-mode", "per-launch-config", "--kernel-name-base", "mangled"),
        *("--kernel-id", f"::regex:^({'|'.join(map(re.escape, names))})$:1|60", "--export", "plan"),
    ]
    assert all(re.search(argv[argv.index("--kernel-id") + 1].split(":")[3], name) for name in names)


NCU = """#!/bin/bash
case $1 in
  --import) [ -e "$2" ] && echo '"ID"' ;;
  *)
    while [ "$1" != --export ]; do shift; done
    report=$2.ncu-rep
    "${@:3}" &
    trap 'kill -TERM $!' TERM
    while kill -0 $! 2>/dev/null; do wait $!; done
    wait $!
    status=$?
    touch "$report"
    exit $status ;;
esac
"""


@pytest.fixture
def script(llama_plan: nvprof_kit.NcuPlan, tmp_path: Path) -> Path:
    """A script of a plan beside a stand-in for ncu, which runs the program and leaves an empty report."""
    executable(tmp_path / "ncu", NCU)
    path = tmp_path / "plan.sh"
    path.write_text(replace(llama_plan, invocations=(1, 7)).script("plan"))
    return path


@pytest.mark.parametrize(("rank", "measured"), [("0", True), ("3", False)])
def test_one_rank_of_several_is_measured(script, tmp_path, rank, measured):
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", "plan.sh", "--", "bash", "-c", "echo trained; exit 7"]
    done = execute(*command, cwd=tmp_path, PATH=path, RANK=rank, NVPROF_KIT_NCU_RANK="0")
    assert (done.returncode, done.stdout) == (7, "trained\n")
    assert (tmp_path / "plan.ncu-rep").exists() is measured


def test_a_script_of_any_name(llama_plan, script):
    """Neither the script's name nor that of the capture becomes a command."""
    script.write_text(replace(llama_plan, layer="of a\ntouch line").script("my plan $(touch name)"))
    running = start(script, "true")
    assert (running.communicate(timeout=30)[1], running.returncode) == ("", 0)
    names = {"my plan $(touch name).ncu-rep", "my plan $(touch name).csv"}
    assert {path.name for path in script.parent.iterdir()} == {"ncu", "plan.sh", *names}


def start(script: Path, *program: str) -> subprocess.Popen[str]:
    environ, words = {**os.environ, "NCU": str(script.parent / "ncu")}, ["bash", script, "--", *program]
    return subprocess.Popen(words, cwd=script.parent, env=environ, stderr=subprocess.PIPE, text=True)


def test_the_script_leaves_whole_files_and_the_programs_status(script):
    running = start(script, "sh", "-c", "exit 7")
    assert (running.communicate(timeout=30)[1], running.returncode) == ("", 7)
    assert {path.name for path in script.parent.iterdir()} == {"ncu", "plan.sh", "plan.ncu-rep", "plan.csv"}
    assert (script.parent / "plan.csv").read_text() == '==nvprof_kit== launches: 1|7\n"ID"\n'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_script_and_the_program(script, number):
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    running = start(script, sys.executable, "-c", program)
    pid = script.parent / "pid"
    for _ in range(200):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.05)
    running.send_signal(number)
    running.communicate(timeout=30)
    assert running.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid.read_text()}").exists()


PERCENTAGES = ["compute_pct", "memory_pct", "dram_pct", "l2_pct", "l1_pct", "tensor_pct", "occupancy_pct"]
BLOCK = r"(encoder\.layers\.\d+)"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_capture(NCU_DATA / "encoder-2024.2.sqlite.xz", optional=NEEDED)


def truth(kernels: Kernels, trace: Trace) -> pd.DataFrame:
    """Each block as every launch by itself says: means over the capture's times of its first step, launch by launch."""
    measured = open_ncu(NCU_DATA / "encoder-full-2025.3.csv.xz")
    ops = trace.ops[trace.ops["kind"] == 0]
    order = np.lexsort((ops["start_ns"], ops["correlation"]))[: len(measured.kernels)]
    launches = kernels.launches.iloc[order]
    names = [_plain(kernels.signatures[signature].name) for signature in launches["signature"]]
    same = [one == _plain(other) for one, other in zip(names, measured.kernels["kernel"], strict=True)]
    assert (len(same), sum(same)) == (1280, 1279)
    table = counters(measured)[PERCENTAGES].assign(
        ns=launches["ns"].to_numpy(),
        layer=[kernels.owners[owner][0] for owner in launches["owner"]],
        phase=[kernels.owners[owner][1] for owner in launches["owner"]],
    )
    table["block"] = table["layer"].str.extract(BLOCK)
    blocks = {
        key: [np.average(rows[name], weights=rows["ns"]) for name in PERCENTAGES]
        for key, rows in table.groupby(["block", "phase"])
    }
    return pd.DataFrame(blocks, index=PERCENTAGES).T


def test_a_plan_is_within_a_few_percent_of_every_launch_one_by_one(trace):
    expected = truth(read_kernels(trace), trace)
    assert expected.groupby(level=1).size().to_dict() == {"backward": 28, "forward": 28}
    planned = open_ncu(NCU_DATA / "encoder-plan-2025.3.csv.xz")
    assert (len(planned.kernels), planned.invocations) == (67, (1, 56, 84, 85))
    made = ncu_layers(planned, trace).rows.set_index(["layer", "phase"]).loc[expected.index]
    apart = (made[PERCENTAGES] / expected - 1).abs()
    assert apart.median().max() < 0.02
    assert apart.max().max() < 0.04
    assert made["covered"].min() > 0.92


def test_the_plan_of_today(trace):
    made = plan(trace, every_layer=True)
    assert made.covered >= 0.9 and made.least_covered[1] > 0.9
    assert made.invocations == (1, 56, 84, 85)
    assert made.measurements == 67  # of 1,280
    seconds = made.predicted_seconds(1.18)
    assert seconds[0] == pytest.approx(42.3, rel=0.15)


@pytest.mark.slow
def test_the_table_of_docs_is_what_ncu_measured_beside_what_was_counted():
    """Traffic at least as counted, and operations of products exactly or up to 4 % more: exit 0."""
    run = execute(sys.executable, ROOT / "tests" / "bench" / "limits_beside_ncu.py", check=True)
    assert run.stdout in (ROOT / "docs" / "flops.md").read_text()
