"""The timeline: layers as runs of operations over streams, CPU ranges, idle gaps, and the length of steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.attribution.attribution import Operations, attribute
from nvprof_kit._analysis.breakdown.breakdown import OPTIONAL as BREAKDOWN
from nvprof_kit._analysis.breakdown.breakdown import breakdown
from nvprof_kit._analysis.timeline import OPTIONAL, _parts, timeline
from nvprof_kit._trace.open import open_capture

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("name", ["slow-2024.2", "ddp.rank0-2024.2", "llama-2023.4", "generate-2024.2"])
def test_idle_time_is_that_of_the_breakdown(name: str) -> None:
    trace = open_capture(DATA / f"{name}.sqlite.xz", optional=(*OPTIONAL, *BREAKDOWN))
    attribution = attribute(trace)
    steps = breakdown(Operations(trace)).steps
    whole = timeline(trace, attribution).idle_times()
    for place, number in enumerate(attribution.ranges.steps.tolist()):
        row = steps[steps["step"] == number].iloc[0]
        shown = timeline(trace, attribution, np.arange(len(attribution.ranges.steps)) == place)
        for times in (shown.idle_times(), whole):
            step = times[(times["instance"] == place) & (times["device"] == row["device"])].iloc[0]
            assert (step["start_ns"], step["end_ns"] - step["start_ns"]) == (row["start_ns"], row["wall_ns"])
            assert step["idle_ns"] == row["idle_ns"]


intervals = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 12)), max_size=30)


@given(intervals)
def test_no_two_operations_of_a_lane_overlap(drawn: list[tuple[int, int, int]]) -> None:
    lane, start, length = (np.array(column, dtype=np.int64) for column in zip(*drawn, strict=True)) if drawn else (
        np.zeros(0, dtype=np.int64),
    ) * 3  # fmt: skip
    part = _parts(start, start + length, lane)
    frame = pd.DataFrame({"lane": lane, "part": part, "start": start, "end": start + length})
    for _, one in frame.groupby(["lane", "part"]):
        ordered = one.sort_values(["start", "end"])
        assert (ordered["start"].to_numpy()[1:] >= ordered["end"].to_numpy()[:-1]).all()


@pytest.mark.parametrize("name", ["llama-2023.4", "graph-2023.4", "hooks-ddp-2024.2", "checkpoint-2023.4"])
def test_nothing_of_a_real_capture_is_lost(name: str) -> None:
    trace = open_capture(DATA / f"{name}.sqlite.xz", optional=OPTIONAL)
    attribution = attribute(trace)
    whole = timeline(trace, attribution)
    total = (trace.ops["end_ns"] - trace.ops["start_ns"]).sum()
    assert (whole.ops["end_ns"] - whole.ops["start_ns"]).sum() == total
    # a span holds the operations of its layer, so the innermost spans are at least as long as their operations
    named = whole.ops[whole.ops["layer"] != "(none)"]
    outermost = whole.spans[whole.spans["level"] == 0]
    assert (outermost["end_ns"] - outermost["start_ns"]).sum() >= (named["end_ns"] - named["start_ns"]).sum()
    busy = (
        whole.ops["end_ns"].max() - whole.ops["start_ns"].min() - (whole.idle["end_ns"] - whole.idle["start_ns"]).sum()
    )
    assert busy <= total
    for _, lane in whole.spans.groupby(["lane", "level"]):
        assert (lane["start_ns"].to_numpy()[1:] >= lane["end_ns"].to_numpy()[:-1]).all()


def test_idle_time_of_a_step_whose_range_begins_while_another_step_still_runs(file: NsysFile) -> None:
    file.range_("step 1", 0, 100, category="step", payload=1)
    file.kernel(100, 200, launched=(10, 11))
    file.kernel(250, 900, launched=(20, 21))  # still running in step 2, which is open from 110 on
    file.range_("step 2", 110, 1000, category="step", payload=2)
    file.kernel(1000, 1100, launched=(120, 121))
    file.kernel(1200, 1400, launched=(130, 131))
    trace = open_capture(file.write(), optional=OPTIONAL)
    shown = timeline(trace, attribute(trace), np.array([False, True]))
    assert shown.idle[["start_ns", "end_ns"]].values.tolist() == [[200, 250], [900, 1000], [1100, 1200]]
    # from the end of step 1 to the end of the last operation
    assert shown.window() == (900, 1400)
    assert shown.idle_times()[["device", "instance", "idle_ns", "gaps"]].values.tolist() == [[0, 1, 200, 2]]
