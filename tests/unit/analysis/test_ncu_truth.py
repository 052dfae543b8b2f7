"""What a plan says of each layer, against every launch measured one by one on an H200.

An encoder of 28 layers, one training step of 1,280 launches. ncu measured every launch in order until it was ended
after 410 s, which was after 846: all of the forward, and the backward of the last 15 layers. The plan took 42.5 s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvprof_kit.analysis.kernels import NEEDED, Kernels, read_kernels
from nvprof_kit.analysis.ncu_counters import counters
from nvprof_kit.analysis.ncu_layers import ncu_layers
from nvprof_kit.analysis.ncu_match import _plain
from nvprof_kit.analysis.ncu_plan import PlanOptions, plan, predicted_seconds
from nvprof_kit.trace.ncu import open_ncu
from nvprof_kit.trace.open import open_capture
from nvprof_kit.trace.schema import Trace

DATA = Path(__file__).parents[2] / "data" / "ncu"
PERCENTAGES = ["compute_pct", "memory_pct", "dram_pct", "l2_pct", "l1_pct", "tensor_pct", "occupancy_pct"]
BLOCK = r"(encoder\.layers\.\d+)"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return open_capture(DATA / "encoder-2024.2.sqlite.xz", optional=NEEDED)


def truth(kernels: Kernels, trace: Trace) -> pd.DataFrame:
    """The blocks of which every launch was measured: means over the capture's times, launch by launch."""
    measured = open_ncu(DATA / "encoder-full-2025.3.csv.xz")
    ops = trace.ops[trace.ops["kind"] == 0]
    order = np.lexsort((ops["start_ns"], ops["correlation"]))[: len(measured.kernels)]
    names = [_plain(kernels.signatures[one].name) for one in kernels.signature[order]]
    same = [one == _plain(other) for one, other in zip(names, measured.kernels["kernel"], strict=True)]
    assert (len(same), sum(same)) == (846, 845)  # the launches are the same; of one the tools write the name otherwise
    table = counters(measured)[PERCENTAGES].assign(
        ns=kernels.duration[order],
        layer=[kernels.owners[one][0] for one in kernels.owner[order]],
        phase=[kernels.owners[one][1] for one in kernels.owner[order]],
    )
    table["block"] = table["layer"].str.extract(BLOCK)
    blocks = {
        key: [np.average(rows[name], weights=rows["ns"]) for name in PERCENTAGES] + [len(rows)]
        for key, rows in table.groupby(["block", "phase"])
    }
    found = pd.DataFrame(blocks, index=[*PERCENTAGES, "launches"]).T
    whole = found["launches"] == found["launches"].groupby(level=1).transform("max")
    return found.loc[whole, PERCENTAGES]


def test_a_plan_is_within_a_few_percent_of_every_launch_one_by_one(trace: Trace) -> None:
    expected = truth(read_kernels(trace), trace)
    assert expected.groupby(level=1).size().to_dict() == {"backward": 15, "forward": 28}
    # the script that made it wrote no numbers yet
    planned = replace(open_ncu(DATA / "encoder-plan-2025.3.csv.xz"), invocations=(1, 56, 85))
    made = ncu_layers(planned, trace).rows.set_index(["layer", "phase"]).loc[expected.index]
    apart = (made[PERCENTAGES] / expected - 1).abs()
    assert apart.median().max() < 0.015
    assert apart.max().max() < 0.05
    assert made["covered"].min() > 0.88


def test_the_plan_of_today(trace: Trace) -> None:
    made = plan(trace, PlanOptions(every_layer=True))
    assert made.covered >= 0.9 and made.least_covered[1] > 0.9
    assert made.invocations == (1, 56, 84, 85)
    assert made.measurements == 67  # of 1,280
    # 63 launches took 42.5 s, of which the program alone 11.1 s
    seconds = predicted_seconds(made, "basic", memory_gb=1.18)
    assert seconds is not None
    assert seconds[0] == pytest.approx(42.5 + 4 * 0.47, rel=0.15)
