"""Memory of the layers: what their ranges carry, and CUDA's own allocations, by hand and on a real capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.captures.nsys_memory import Allocations, carry
from support.golden import Golden
from support.lane import examples

import nvprof_kit
from nvprof_kit.errors import CaptureError

DATA = Path(__file__).parents[3] / "data"
MAIN, BACKWARD = 7, 8
MEMORY = [name for name in nvprof_kit.Layers.columns["layers"] if name.startswith(("memory_", "cuda_"))]


def table(path: Path, *, by_step: bool = False) -> pd.DataFrame:
    return nvprof_kit.open(path).layers(steps="all", by="step" if by_step else None, memory=True).rows


def numbers(rows: pd.DataFrame, *names: str) -> dict[tuple[str, str], tuple[int, ...]]:
    return {
        (row["layer"], row["phase"]): tuple(None if pd.isna(row[name]) else int(row[name]) for name in names)
        for row in rows.to_dict("records")
    }


def two_steps(file: NsysFile) -> NsysFile:
    """Steps of a model with one layer; its backward is on another thread.

    step 0: model 1000 -> 1300, layers.0 in it 1100 -> 1250 with a peak of 1900 inside; backward 1300 -> 1000
    step 1: model 1000 -> 1500, layers.0 in it 1100 -> 1350, its peak not known;        backward 1500 -> 1020
    """
    for step, (inner_end, end, after, peak) in enumerate([(1250, 1300, 1000, 1900), (1350, 1500, 1020, 0)]):
        at = 1000 * step
        file.range_(f"step {step}", at, at + 900, category="step", payload=step)
        file.range_("forward", at + 5, at + 405, category="phase")
        file.range_("model", at + 10, at + 400)
        file.range_("model.layers.0", at + 100, at + 200)
        carry(file, (at + 11, 1000), (at + 399, end))
        carry(file, (at + 101, 1100), (at + 199, inner_end), peak=peak)
        file.range_("model.layers.0 backward", at + 500, at + 600, category="backward", tid=BACKWARD)
        carry(file, (at + 501, end), (at + 599, after), tid=BACKWARD)
        file.kernel(at + 150, at + 160, launched=(at + 120, at + 130))
    return file


def test_what_the_ranges_carry(tmp_path: Path) -> None:
    path = two_steps(NsysFile(tmp_path / "a.sqlite")).write()
    names = [name for name in MEMORY if name.startswith("memory")]
    assert numbers(table(path), *names) == {
        # begin and end are medians of two calls: (1300 + 1500) / 2; the peak is that of the layer in it
        ("model", "forward"): (1000, 1400, 400, 1900),
        ("model.layers.0", "forward"): (1100, 1300, 200, 1900),
        # retained: (-300 + -480) / 2; the most that was seen is 1500 at the second one's begin
        ("model.layers.0", "backward"): (1400, 1010, -390, 1500),
        ("(none)", "forward"): (None,) * 4,
    }
    by_step = table(path, by_step=True)
    assert numbers(by_step[by_step["step"] == 1], *names) == {
        ("model", "forward"): (1000, 1500, 500, 1500),
        ("model.layers.0", "forward"): (1100, 1350, 250, 1350),
        ("model.layers.0", "backward"): (1500, 1020, -480, 1500),
        ("(none)", "forward"): (None,) * 4,
    }
    assert table(path)["cuda_alloc_bytes"].isna().all(), "nsys traced none"


def test_more_bytes_than_a_machine_has_are_refused(tmp_path: Path) -> None:
    file = two_steps(NsysFile(tmp_path / "a.sqlite"))
    events = Allocations()
    events.add(125, 2**63 - 1, file.call("cudaMalloc_v3020", 122, 126))
    with pytest.raises(CaptureError, match=r"MEMORY_USAGE_EVENTS\.bytes is 9223372036854775807 in 1 rows"):
        table(events.into(file.write()))


def test_a_capture_without_memory_says_how_to_get_it(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "a.sqlite")
    file.range_("layers.0", 100, 200)
    file.kernel(150, 160, launched=(120, 130))
    with pytest.raises(CaptureError, match=r"no memory in this capture; record it with .*--preset memory") as error:
        table(file.write())
    assert "\n" not in str(error.value)


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 40), st.sampled_from("ab"), st.integers(7, 8)), max_size=6
    ),
    events=st.lists(
        st.tuples(
            st.integers(1, 120), st.integers(-99, 99), st.integers(7, 9), st.booleans(), st.sampled_from([1, 2, 5])
        ),
        min_size=1,
        max_size=8,
    ),
    by_step=st.booleans(),
)
@settings(max_examples=examples(20))
def test_nothing_that_cuda_handed_out_is_lost(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[Any], events: list[Any], by_step: bool
) -> None:
    file = NsysFile(tmp_path_factory.mktemp("random") / "a.sqlite")
    file.range_("step 4", 20, 100, category="step", payload=4)
    for start, length, layer, tid in ranges:
        file.range_(layer, start, start + length, tid=tid)
        carry(file, (start, 10), (start + length, 20), tid=tid)
    file.kernel(150, 160, launched=(30, 31))
    allocations = Allocations()
    for when, count, tid, called, kind in events:
        call = file.call("cudaMalloc_v3020", when - 1, when, tid=tid) if called else None
        allocations.add(when, count or 1, call, kind=kind)
    rows = table(allocations.into(file.write()), by_step=by_step)
    counts = [count or 1 for _, count, _, _, kind in events if kind == 2]
    assert int(rows["cuda_alloc_bytes"].sum()) == sum(count for count in counts if count > 0)
    assert int(rows["cuda_free_bytes"].sum()) == -sum(count for count in counts if count < 0)
    assert not rows.duplicated([name for name in ("step", "layer", "phase") if name in rows]).any()


@pytest.mark.parametrize("capture", ["caching-2024.2", "uncached-2024.2"])
def test_golden_tables(capture: str, golden: Golden) -> None:
    made = table(DATA / "memory" / f"{capture}.sqlite.xz")
    found = made[["layer", "phase", "calls", *MEMORY]].to_csv(index=False)
    golden(f"memory/{capture}.csv", found)


def test_a_real_capture() -> None:
    """An H200 with --cuda-memory-usage=true: 76 calls of cudaMalloc, 3,493,855,232 bytes, by
    ``SELECT sum(bytes) FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE start > 0 AND memKind = 2 AND memoryOperationType = 0``.
    """
    result = nvprof_kit.open(DATA / "hooks-graph-2023.4.sqlite.xz").layers(memory=True)
    assert result.memory is not None
    assert int(result.rows["cuda_alloc_bytes"].sum()) == 3_493_855_232
    assert int(result.rows["cuda_free_bytes"].sum()) == 3_376_414_720
    assert result.memory.before_bytes == 5_360_635_400
    inside = result.rows[result.rows["layer"] != "(none)"]
    assert int(inside["cuda_alloc_bytes"].sum()) == 1492 << 20, "of them, in the six layers"
    assert result.rows["memory_peak_bytes"].isna().all()
    assert any("carry no memory" in warning for warning in result.warnings)
