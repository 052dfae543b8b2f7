"""Memory of the layers: what their ranges carry, and CUDA's own allocations, by hand and on a real capture."""

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.data import DATA, unpacked
from support.lane import examples

import nvprof_kit
from nvprof_kit._analysis.layers.profile import layer_profile
from nvprof_kit._trace.open import open_capture
from nvprof_kit.errors import CaptureError

MEMORY = [name for name in nvprof_kit.Layers.columns["layers"] if name.startswith(("memory_", "cuda_"))]


def table(path: Path, *, by_step: bool = False) -> pd.DataFrame:
    return nvprof_kit.open(path).layers(steps="all", by="step" if by_step else None, columns="memory").rows


def test_a_capture_of_which_nsys_traced_no_memory_has_what_its_ranges_carry(file):
    file.range_("model.layers.0", 100, 200)
    file.carry((101, 1100), (199, 1250), peak=1900)
    file.kernel(150, 160, launched=(120, 130))
    rows = table(file.write())
    assert rows[[name for name in MEMORY if name.startswith("memory_")]].iloc[0].tolist() == [1100, 1250, 150, 1900]
    assert rows["cuda_alloc_bytes"].isna().all()


def test_more_bytes_than_a_machine_has_are_refused(file):
    file.range_("layers.0", 100, 200)
    file.kernel(150, 160, launched=(120, 130))
    file.allocation(125, 2**63 - 1, file.call("cudaMalloc_v3020", 122, 126))
    with pytest.raises(CaptureError, match=r"MEMORY_USAGE_EVENTS\.bytes is 9223372036854775807 in 1 rows"):
        table(file.write())


number, one_of = st.integers, st.sampled_from
RANGES = st.lists(st.tuples(number(0, 90), number(1, 40), one_of("ab"), number(7, 8)), max_size=6)
EVENT = st.tuples(number(1, 120), number(-99, 99), number(7, 9), st.booleans(), one_of([1, 2, 5]))


@given(ranges=RANGES, events=st.lists(EVENT, min_size=1, max_size=8), by_step=st.booleans())
@settings(max_examples=examples(20))
def test_nothing_that_cuda_handed_out_is_lost(tmp_path_factory, ranges, events, by_step):
    file = NsysFile(tmp_path_factory.mktemp("random") / "a.sqlite")
    file.range_("step 4", 20, 100, category="step", payload=4)
    for start, length, layer, tid in ranges:
        file.range_(layer, start, start + length, tid=tid)
        file.carry((start, 10), (start + length, 20), tid=tid)
    file.kernel(150, 160, launched=(30, 31))
    for when, count, tid, called, kind in events:
        call = file.call("cudaMalloc_v3020", when - 1, when, tid=tid) if called else None
        file.allocation(when, count or 1, call, kind=kind)
    rows = table(file.write(), by_step=by_step)
    counts = [count or 1 for _, count, _, _, kind in events if kind == 2]
    assert int(rows["cuda_alloc_bytes"].sum()) == sum(count for count in counts if count > 0)
    assert int(rows["cuda_free_bytes"].sum()) == -sum(count for count in counts if count < 0)
    assert not rows.duplicated([name for name in ("step", "layer", "phase") if name in rows]).any()


@pytest.mark.parametrize("capture", ["caching-2024.2", "uncached-2024.2"])
def test_golden_tables(capture, golden):
    made = table(DATA / "memory" / f"{capture}.sqlite.xz")
    golden(f"memory/{capture}.csv", made[["layer", "phase", "calls", *MEMORY]].to_csv(index=False))


def test_a_real_capture():
    """An H200 with --cuda-memory-usage=true: 76 calls of cudaMalloc, 3,493,855,232 bytes, by
    ``SELECT sum(bytes) FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE start > 0 AND memKind = 2 AND memoryOperationType = 0``.
    """
    result = nvprof_kit.open(DATA / "hooks-graph-2023.4.sqlite.xz").layers(columns="memory")
    assert result.memory is not None
    assert int(result.rows["cuda_alloc_bytes"].sum()) == 3_493_855_232
    assert result.tree["cuda_bytes"][result.tree["depth"] == 0].sum() == 3_493_855_232, "in the printed rows"
    assert int(result.rows["cuda_free_bytes"].sum()) == 3_376_414_720
    assert result.memory.before_bytes == 5_360_635_400
    inside = result.rows[result.rows["layer"] != "(none)"]
    assert int(inside["cuda_alloc_bytes"].sum()) == 1492 << 20, "of them, in the six layers"
    assert result.rows["memory_peak_bytes"].isna().all()
    assert any("carry no memory" in warning for warning in result.warnings)


@pytest.mark.parametrize("name", ["llama-2023.4", "checkpoint-2023.4", "checkpoint-reentrant-2023.4"])
def test_real_captures_lose_nothing(name, tmp_path):
    plain = unpacked(f"{name}.sqlite.xz", tmp_path / "run.sqlite")
    trace = open_capture(plain, optional=("name",))
    blocks = {f"model.layers.{number}": "Block" for number in range(4)}
    profile = layer_profile(trace, blocks)
    table = nvprof_kit.open(plain).layers(steps="all")
    assert profile.rows["gpu_self_ns"].sum() == table.summary.total_ns
    # the blocks' time is that of the tree for reading, phase by phase
    tree = table.tree[table.tree["layer"].isin(blocks)]
    kind = profile.kinds.iloc[0]
    for phase in ("forward", "backward", "recompute"):
        assert kind[f"{phase}_ns"] == tree[f"{phase}_ns"].sum()
    attention = profile.kinds[~profile.kinds["is_block"].astype(bool)]["gpu_ns"].sum()
    assert kind["attention_ns"] == attention > 0  # all of it is in the blocks


def test_a_recording_of_an_h200_agrees_with_cuda_events():
    """Each block's forward, beside what CUDA events in hooks of their own took in the very same steps."""
    kinds = {f"{kind}_blocks.{number}": kind for kind in ("spatial", "temporal") for number in range(4)}
    profile = layer_profile(open_capture(DATA / "profiler" / "video.json.xz", optional=("name",)), kinds)
    forward = profile.rows[profile.rows["kind"].notna() & (profile.rows["phase"] == "forward")]
    both = forward.merge(pd.read_csv(DATA / "profiler" / "video-events.csv"), on=["step", "layer"])
    assert len(both) == 32  # 8 blocks in 4 steps
    share = both["gpu_ns"] / 1e6 / both["events_ms"]
    # the gaps between a block's kernels are some 1 %; at the window's begin the GPU waits for the first launches
    assert 0.985 < share.median() < 1.0 and share.max() < 1.0 and share[both["step"] > 12].min() > 0.98
    flash = profile.kinds.set_index("kind").loc["flash attention"]
    # a forward kernel and three of the backward, in 8 blocks and 4 steps
    assert (flash["layers"], flash["count"]) == (8, 128)
    assert profile.busy is not None and 0.95 < profile.busy < 1.0
