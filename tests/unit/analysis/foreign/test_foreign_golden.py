"""Real captures with other programs' ranges: their golden tables, and operation for operation what our own ranges say.

All are of the same two training steps, so where a layer's operations can be told they are the same ones, however the
layer was told.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.golden import Golden

import nvprof_kit
from nvprof_kit.names import LAYER_CATEGORIES

TESTS = Path(__file__).parents[3]
CAPTURES = {path.name.partition(".sqlite")[0].partition(".json")[0]: path for path in TESTS.glob("data/foreign/*.xz")}
RULES = {"emit-nvtx": "emit-nvtx", "torch-nvtx": "torch-nvtx", "plain-nvtx": "torch-nvtx"}
DOMAINS = {"plain-nvtx": "train"}
LAYER_PHASES = {category.value for category in LAYER_CATEGORIES}


@cache
def table(name: str) -> nvprof_kit.Layers:
    rules = next((rules for start, rules in RULES.items() if name.startswith(start)), None)
    domain = next((domain for start, domain in DOMAINS.items() if name.startswith(start)), None)
    return nvprof_kit.open(CAPTURES[name], rules=rules, domain=domain).layers(steps="all")


def operations(name: str, *phases: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and operations of each layer in some phases."""
    return {
        (row.layer, row.phase): (row.calls, row.gpu_ops)
        for row in table(name).rows.itertuples()
        if row.phase in phases and row.layer != "(none)"
    }


@pytest.mark.parametrize("name", sorted(CAPTURES))
def test_the_table_is_the_golden_one(name: str, golden: Golden) -> None:
    columns = (TESTS / f"golden/foreign/{name}.csv").read_text(encoding="utf-8").partition("\n")[0].split(",")
    golden(f"foreign/{name}.csv", table(name).rows[columns].to_csv(index=False))
    said = " ".join(table(name).warnings)
    assert "emit" not in name or re.search(r"of (\d+) backward operators \1 \(100%\) found", said)
    assert ("each operator stands for a layer" in said) == name.startswith(("emit-nvtx-plain", "kineto-modules"))


@pytest.mark.parametrize("name", ["emit-nvtx-2024.2", "emit-nvtx-shapes-2024.2", "emit-nvtx-checkpoint-2024.2"])
def test_sequence_numbers_tell_each_layer_the_operations_that_our_ranges_tell_it(name: str) -> None:
    """66 rows, module by module: the same number of calls and of operations, forward and backward."""
    ours = operations("ours-2024.2", "forward", "backward")
    assert len(ours) > 60
    assert operations(name, "forward", "backward") == ours


@pytest.mark.parametrize("name", ["torch-nvtx-2024.2", "plain-nvtx-2024.2"])
def test_module_paths_alone_tell_the_forward(name: str) -> None:
    assert operations(name, "forward") == operations("ours-2024.2", "forward")
    assert not operations(name, "backward")


def by_block(name: str, block: str) -> Counter[tuple[str, str]]:
    """Operations of each block with all in it, by phase."""
    sums: Counter[tuple[str, str]] = Counter()
    for (layer, phase), (_, ops) in operations(name, *LAYER_PHASES).items():
        found = re.search(block, layer)
        sums[found[1] if found else "", phase] += ops
    return sums


@pytest.mark.parametrize(
    ("trace", "ranged"), [("kineto-stack", "ours-2024.2"), ("kineto-checkpoint", "emit-nvtx-checkpoint-2024.2")]
)
def test_a_pytorch_trace_tells_the_same_operations(trace: str, ranged: str) -> None:
    """By class and number instead of by path, block by block."""
    stacked = by_block(trace, r"LlamaDecoderLayer\.(\d+)")
    assert stacked == by_block(ranged, r"layers\.(\d+)")
    assert {block for block, _ in stacked} == {"0", "1", ""}


def fsdp(path: Path) -> Path:
    """Two blocks between FSDP's ranges under emit_nvtx, a third that the window cuts, and kernels around them."""
    file = NsysFile(path)

    def ranged(text: str, start: int, end: int) -> None:
        file.range_(text, start, end, category=None, domain="")

    at = 0
    for number in range(3):
        path_of_block = f"blocks.{number}._checkpoint_wrapped_module"
        ranged(f"FSDP::pre_forward ({path_of_block}), op_id = {number}", at, at + 10)
        ranged(f"aten::linear, seq = {number}, op_id = {10 + number}", at + 20, at + 30)
        ranged(f"FlashAttnFunc, seq = {number}, op_id = {20 + number}", at + 32, at + 40)
        file.kernel(1000 + at, 1005 + at, launched=(at + 2, at + 3), name="copy_kernel")
        file.kernel(1020 + at, 1050 + at, launched=(at + 22, at + 23), name="nvjet_sm90")
        file.kernel(1050 + at, 1070 + at, launched=(at + 34, at + 35), name="flash_fwd_kernel")
        if number < 2:
            ranged(f"FSDP::post_forward ({path_of_block}), op_id = {30 + number}", at + 50, at + 60)
            file.kernel(1080 + at, 1081 + at, launched=(at + 62, at + 63), name="nvjet_sm90")
        at += 100
    return file.write()


def test_a_block_lasts_from_the_start_before_to_the_end_after(tmp_path: Path) -> None:
    table = nvprof_kit.open(fsdp(tmp_path / "a.sqlite")).layers()
    total = dict(zip(table.rows["layer"], table.rows["gpu_total_ns"], strict=True))
    for number in range(3):
        block = f"blocks.{number}"
        assert total[block] == 55
        assert (total[f"{block}.unshard"], total[f"{block}.linear"], total[f"{block}.FlashAttnFunc"]) == (5, 30, 20)
    assert total["(none)"] == 2
    cut = "1 layers are cut by the window's edge, so only a part of them counts: blocks.2"
    assert any(warning == cut for warning in table.warnings)
    assert any("from the ranges of emit_nvtx" in warning for warning in table.warnings)


def test_ranges_of_libraries_are_no_layers(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "a.sqlite")
    file.range_("ncclAllReduce", 0, 50, category=None, domain="NCCL")
    file.kernel(100, 130, launched=(10, 12), name="ncclDevKernel_AllReduce")
    table = nvprof_kit.open(file.write()).layers()
    assert set(table.rows["layer"]) == {"(none)"}
