"""Captures of other programs are read without an option: what they range is recognised."""

from __future__ import annotations

from pathlib import Path

from support.captures.nsys_file import NsysFile

import nvprof_kit


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
