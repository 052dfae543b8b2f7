"""The timeline: layers as runs of operations over streams, CPU ranges, idle gaps, and the length of steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.attribution.windows import step_times
from nvprof_kit._analysis.breakdown.breakdown import OPTIONAL as BREAKDOWN
from nvprof_kit._analysis.breakdown.breakdown import breakdown
from nvprof_kit._analysis.timeline import OPTIONAL, _parts, timeline
from nvprof_kit._trace.open import open_capture

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("name", ["slow-2024.2", "ddp.rank0-2024.2", "llama-2023.4", "generate-2024.2"])
def test_idle_time_is_that_of_the_breakdown(name: str) -> None:
    trace = open_capture(DATA / f"{name}.sqlite.xz", optional=(*OPTIONAL, *BREAKDOWN))
    attribution = attribute(trace)
    steps = breakdown(trace).steps
    for place, number in enumerate(attribution.ranges.steps.tolist()):
        shown, row = timeline(trace, attribution, place), steps[steps["step"] == number].iloc[0]
        begin, end = shown.own_window(int(row["device"]))
        assert (begin, end - begin) == (row["start_ns"], row["wall_ns"])
        assert shown.idle_in_step(int(row["device"])).sum() == row["idle_ns"]


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


def test_a_number_that_two_loops_share(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    for begin in (0, 10_000):  # training, then evaluation, each with a step 0
        file.range_("step 0", begin, begin + 500, category="step", payload=0)
        file.range_("a", begin + 10, begin + 100, category="forward")
        file.kernel(begin + 200, begin + 300, launched=(begin + 20, begin + 21))
        file.kernel(begin + 700, begin + 900, launched=(begin + 30, begin + 31))  # ends after its range
    trace = open_capture(file.write(), optional=OPTIONAL)
    attribution = attribute(trace)
    # twice: 500 of the range, 100 + 200 on the GPU, from 200 to 900
    assert step_times(trace, attribution).values.tolist() == [
        [0, 500, 300, 300, 700, 900, 0, 900],
        [0, 500, 300, 300, 700, 900, 10_000, 10_900],
    ]
    shown = timeline(trace, attribution, 0)
    assert (shown.start_ns, shown.end_ns) == (0, 900) and len(shown.ops) == 2 and len(shown.ranges) == 2


def test_some_steps_are_their_stretches_of_time(tmp_path: Path) -> None:
    """Steps 0, 2 and 3 of four: the trace has what ran in them and between 2 and 3, and no gap where step 1 was."""
    file = NsysFile(tmp_path / "run.sqlite")
    for number in range(4):
        at = 1000 * number
        file.range_(f"step {number}", at, at + 800, category="step", payload=number)
        file.kernel(at + 100, at + 300, launched=(at + 10, at + 20), name=f"in {number}")
        file.kernel(at + 900, at + 950, launched=(at + 820, at + 830), name=f"after {number}")
    trace = open_capture(file.write(), optional=OPTIONAL)
    attribution = attribute(trace)
    shown = timeline(trace, attribution, chosen=np.array([True, False, True, True]))
    assert shown.ops["name"].tolist() == ["in 0", "in 2", "after 2", "in 3"]
    assert shown.ranges["text"].tolist() == ["step 0", "step 2", "step 3"]
    gaps = [tuple(row[1:3]) for row in shown.idle.values.tolist()]
    # a step lasts on the device from its range's begin to its range's end, since its last kernel ends before
    assert gaps == [(0, 100), (300, 800), (2000, 2100), (2300, 2900), (2950, 3100), (3300, 3800)]
    assert (shown.start_ns, shown.end_ns, shown.step, shown.instance) == (0, 3800, None, None)
