"""The timeline: layers as runs of operations over streams, CPU ranges, idle gaps, and the length of steps."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import DATA

from nvprof_kit._analysis.attribution.attribution import Operations, attribute
from nvprof_kit._analysis.breakdown.breakdown import breakdown
from nvprof_kit._analysis.timeline import _parts, timeline
from nvprof_kit._api.capture import NEEDS
from nvprof_kit._trace.open import open_capture


@pytest.mark.parametrize("name", ["slow-2024.2", "ddp.rank0-2024.2", "llama-2023.4", "generate-2024.2"])
def test_idle_time_is_that_of_the_breakdown(name):
    trace = open_capture(DATA / f"{name}.sqlite.xz", optional=(*NEEDS["timeline"], *NEEDS["breakdown"]))
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
def test_no_two_operations_of_a_lane_overlap(drawn):
    lane, start, length = (np.array(column, dtype=np.int64) for column in zip(*drawn, strict=True)) if drawn else (
        np.zeros(0, dtype=np.int64),
    ) * 3  # fmt: skip
    part = _parts(start, start + length, lane)
    frame = pd.DataFrame({"lane": lane, "part": part, "start": start, "end": start + length})
    for _, one in frame.groupby(["lane", "part"]):
        ordered = one.sort_values(["start", "end"])
        assert (ordered["start"].to_numpy()[1:] >= ordered["end"].to_numpy()[:-1]).all()
