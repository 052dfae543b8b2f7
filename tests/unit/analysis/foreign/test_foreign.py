"""Captures with the ranges of others: renamed by rules, and the backward pass told from sequence numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit

NODE = "autograd::engine::evaluate_function: "
ENGINE = 8


@pytest.fixture
def file(tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "capture.sqlite")


def table(file: NsysFile, rules: str, **opening: Any) -> nvprof_kit.Layers:
    if rules.startswith("[["):
        text, rules = rules, str(file.path.with_name("own.toml"))
        Path(rules).write_text(text, encoding="utf-8")
    return nvprof_kit.open(file.write(), rules=rules, **opening).layers()


def sums(result: nvprof_kit.Layers, column: str = "gpu_self_ns") -> dict[tuple[str, str], int]:
    rows = result.rows
    return {
        key: value
        for *key_, value in rows[["layer", "phase", column]].itertuples(index=False)
        if (key := tuple(key_)) and value
    }


def plain(file: NsysFile, text: str, start: int, end: int, **more: Any) -> None:
    """A range of the default domain, whose text is not registered."""
    file.range_(text, start, end, category=None, domain="", registered=False, **more)


def test_rules_of_the_user_and_what_they_leave_out(file: NsysFile) -> None:
    for text, start in (("block 0", 100), ("block 1", 200)):
        file.range_(text, start, start + 90, category=None, domain="mine")
        file.range_("qkv", start + 10, start + 20, category=None, domain="mine")
        file.range_("who knows", start + 30, start + 40, category=None, domain="mine")
        file.kernel(start + 2000, start + 2001, launched=(start + 12, start + 13))
        file.kernel(start + 2010, start + 2012, launched=(start + 32, start + 33))
    rules = r"""[[rule]]
match = 'block (?P<number>\d+)'
layer = "layers.{number}"
[[rule]]
match = '(?P<part>qkv|out)'
layer = ".{part}"
"""
    result = table(file, rules, domain="mine")
    assert sums(result) == {  # the part continues the path of the block around it; what fits no rule is the block's
        ("layers.0.qkv", "forward"): 1,
        ("layers.0", "forward"): 2,
        ("layers.1.qkv", "forward"): 1,
        ("layers.1", "forward"): 2,
    }
    (issue,) = (issue for issue in result.warnings if "2 of 6 ranges fit no rule" in issue)
    assert "own.toml" in issue and "'who knows'" in issue


def test_reentrant_checkpointing_numbers_on_its_own_thread(file: NsysFile) -> None:
    """Inside a node, a recompute on the engine's thread made node 5 anew, and a backward pass in the backward pass
    runs it: its maker is the recompute's, not the main thread's node 5 of another layer.
    """
    plain(file, "model", 90, 300)
    plain(file, "model.other", 100, 150)
    plain(file, "aten::mm, seq = 5, op_id = 1", 110, 120)
    plain(file, "CheckpointFunction, seq = 6, op_id = 2", 160, 290)
    plain(file, "model.block", 170, 280)
    file.kernel(4000, 4001, launched=(175, 176))
    plain(file, f"{NODE}CheckpointFunctionBackward, seq = 6, op_id = 3", 500, 900, tid=ENGINE)
    plain(file, "model.block", 510, 600, tid=ENGINE)
    plain(file, "aten::mm, seq = 5, op_id = 4", 520, 530, tid=ENGINE)
    file.kernel(5000, 5002, launched=(525, 526), tid=ENGINE)
    plain(file, f"{NODE}MmBackward0, seq = 5, op_id = 5", 700, 750, tid=ENGINE)
    file.kernel(5010, 5014, launched=(710, 711), tid=ENGINE)
    assert sums(table(file, "emit-nvtx")) == {
        ("model.block", "forward"): 1,
        ("model.block", "recompute"): 2,
        ("model.block", "backward"): 4,
    }


def test_backward_of_our_ranges_beside_emit_nvtx_in_a_window_that_began_behind_a_forward(file: NsysFile) -> None:
    """AccumulateGrad, which nothing made, is of the layer whose node ran before it."""
    file.range_("layers.0", 100, 200)
    plain(file, "aten::mm, seq = 5, op_id = 1", 110, 120)
    for node, start in (("MmBackward0, seq = 4", 500), ("MmBackward0, seq = 5", 600), ("AccumulateGrad", 700)):
        plain(file, f"{NODE}{node}, op_id = 2", start, start + 50, tid=ENGINE)
        file.kernel(start + 1000, start + 1000 + start // 100, launched=(start + 1, start + 2), tid=ENGINE)
    result = table(file, "emit-nvtx")
    assert sums(result) == {("layers.0", "backward"): 6 + 7, ("(none)", "backward"): 5}
    assert sums(result, "calls")["layers.0", "backward"] == 1
    assert any("of 2 backward operators 1 (50%) found" in warning for warning in result.warnings)
