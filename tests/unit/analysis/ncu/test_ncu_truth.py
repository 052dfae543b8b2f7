"""What a plan says of each layer, against every launch measured one by one on an H200.

An encoder of 28 layers, one training step of 1,280 launches. ncu measured each of them in 642.1 s, and in another run
the 67 of the plan in 42.3 s.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.cli import execute

from nvprof_kit._analysis.kernels.signatures import NEEDED, Kernels, read_kernels
from nvprof_kit._analysis.ncu.counters import counters
from nvprof_kit._analysis.ncu.layers import ncu_layers
from nvprof_kit._analysis.ncu.owners import _plain
from nvprof_kit._analysis.ncu.plan import plan
from nvprof_kit._trace.open import open_capture, open_ncu
from nvprof_kit._trace.schema import Trace

DATA = Path(__file__).parents[3] / "data" / "ncu"
PERCENTAGES = ["compute_pct", "memory_pct", "dram_pct", "l2_pct", "l1_pct", "tensor_pct", "occupancy_pct"]
BLOCK = r"(encoder\.layers\.\d+)"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_capture(DATA / "encoder-2024.2.sqlite.xz", optional=NEEDED)


def truth(kernels: Kernels, trace: Trace) -> pd.DataFrame:
    """Each block as every launch by itself says: means over the capture's times of its first step, launch by launch."""
    measured = open_ncu(DATA / "encoder-full-2025.3.csv.xz")
    ops = trace.ops[trace.ops["kind"] == 0]
    order = np.lexsort((ops["start_ns"], ops["correlation"]))[: len(measured.kernels)]
    names = [_plain(kernels.signatures[one].name) for one in kernels.signature[order]]
    same = [one == _plain(other) for one, other in zip(names, measured.kernels["kernel"], strict=True)]
    assert (len(same), sum(same)) == (1280, 1279)
    table = counters(measured)[PERCENTAGES].assign(
        ns=kernels.duration[order],
        layer=[kernels.owners[one][0] for one in kernels.owner[order]],
        phase=[kernels.owners[one][1] for one in kernels.owner[order]],
    )
    table["block"] = table["layer"].str.extract(BLOCK)
    blocks = {
        key: [np.average(rows[name], weights=rows["ns"]) for name in PERCENTAGES]
        for key, rows in table.groupby(["block", "phase"])
    }
    return pd.DataFrame(blocks, index=PERCENTAGES).T


def test_a_plan_is_within_a_few_percent_of_every_launch_one_by_one(trace: Trace) -> None:
    expected = truth(read_kernels(trace), trace)
    assert expected.groupby(level=1).size().to_dict() == {"backward": 28, "forward": 28}
    planned = open_ncu(DATA / "encoder-plan-2025.3.csv.xz")
    assert (len(planned.kernels), planned.invocations) == (67, (1, 56, 84, 85))
    made = ncu_layers(planned, trace).rows.set_index(["layer", "phase"]).loc[expected.index]
    apart = (made[PERCENTAGES] / expected - 1).abs()
    assert apart.median().max() < 0.02
    assert apart.max().max() < 0.04
    assert made["covered"].min() > 0.92


def test_the_plan_of_today(trace: Trace) -> None:
    made = plan(trace, every_layer=True)
    assert made.covered >= 0.9 and made.least_covered[1] > 0.9
    assert made.invocations == (1, 56, 84, 85)
    assert made.measurements == 67  # of 1,280
    seconds = replace(made, memory_gb=1.18).predicted_seconds()
    assert seconds is not None
    assert seconds[0] == pytest.approx(42.3, rel=0.15)


def test_the_table_of_docs_is_what_ncu_measured_beside_what_was_counted() -> None:
    """Traffic at least as counted, and operations of products exactly or up to 4 % more: exit 0."""
    root = Path(__file__).parents[4]
    command = [sys.executable, str(root / "tests" / "bench" / "limits_beside_ncu.py")]
    run = execute(*command)
    assert run.returncode == 0, run.stderr
    assert run.stdout in (root / "docs" / "flops.md").read_text()
