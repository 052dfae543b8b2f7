"""Time and memory by step, layer and kind of block: tiny captures with their arithmetic, real ones for what holds."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pandas as pd
import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit
from nvprof_kit._analysis.layers.profile import KIND_COLUMNS, LayerProfile, layer_profile
from nvprof_kit._trace.open import open_capture

DATA = Path(__file__).parents[3] / "data"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)64>>(Flash_fwd_params)"


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "run.sqlite")


def profiled(file: NsysFile, kinds: dict[str, str], memory: pd.DataFrame | None = None) -> LayerProfile:
    return layer_profile(open_capture(file.write(), optional=("name",)), kinds, memory)


def two_steps(file: NsysFile) -> None:
    """Two steps of a block with an attention part: 10 ns of its own, 20 of flash attention; in step 2 five more."""
    for step, base in ((1, 0), (2, 1000)):
        file.range_(f"step {step}", base, base + 900, category="step", payload=step)
        file.range_("blocks.0", base + 100, base + 400, category="forward")
        file.range_("blocks.0.attn", base + 200, base + 300, category="forward")
        file.range_("blocks.0 backward", base + 500, base + 600, category="backward")
        extra = 5 * (step - 1)
        file.kernel(base + 410, base + 420 + extra, launched=(base + 110, base + 120))
        file.kernel(base + 430, base + 450, launched=(base + 210, base + 220), name=FLASH)
        file.kernel(base + 610, base + 640, launched=(base + 510, base + 520))
        file.kernel(base + 700, base + 707, launched=(base + 680, base + 685))


def test_kinds_of_blocks_and_flash_attention_are_lines_of_their_own(file: NsysFile) -> None:
    two_steps(file)
    kinds = profiled(file, {"blocks.0": "Block"}).kinds
    assert list(kinds.columns) == list(KIND_COLUMNS)
    block, flash = kinds.to_dict("records")
    assert (block["kind"], block["is_block"], block["layers"], block["count"]) == ("Block", True, 1, 2)
    assert (block["forward_ns"], block["backward_ns"], block["gpu_ns"]) == (65, 60, 125)
    assert (block["mean_ns"], block["min_ns"], block["max_ns"]) == (62, 60, 65)  # 60 and 65, rounded to even
    assert (block["attention_ns"], block["cpu_ns"]) == (40, 800)  # 300 forward and 100 backward, twice
    assert (flash["kind"], flash["is_block"], flash["layers"], flash["count"]) == ("flash attention", False, 1, 2)
    assert (flash["forward_ns"], flash["gpu_ns"], flash["mean_ns"]) == (40, 40, 20)


def memory(rows: list[tuple[object, ...]]) -> pd.DataFrame:
    sizes = ["allocated_bytes", "retained_bytes", "transient_bytes", "peak_bytes", "reserved_bytes"]
    return pd.DataFrame(rows, columns=["step", "layer", "phase", *sizes])


@pytest.mark.parametrize("name", ["llama-2023.4", "checkpoint-2023.4", "checkpoint-reentrant-2023.4"])
def test_real_captures_lose_nothing(name: str, tmp_path: Path) -> None:
    plain = tmp_path / "run.sqlite"
    with lzma.open(DATA / f"{name}.sqlite.xz") as packed, plain.open("wb") as out:
        shutil.copyfileobj(packed, out)
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


def test_a_recording_of_an_h200_agrees_with_cuda_events() -> None:
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
