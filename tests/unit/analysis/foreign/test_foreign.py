"""Captures with the ranges of others: renamed by rules, and the backward pass told from sequence numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit

NODE = "autograd::engine::evaluate_function: "
MAIN, ENGINE = 7, 8


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


def test_paths_in_the_default_domain(file: NsysFile) -> None:
    plain(file, "step 3", 0, 1000)
    plain(file, "model.layers.0", 100, 300)
    plain(file, "model.layers.0.mlp", 150, 250)
    plain(file, "backward", 400, 600)
    file.kernel(2000, 2010, launched=(110, 115))  # 10 ns of the block
    file.kernel(2010, 2030, launched=(160, 165))  # 20 ns of the mlp
    file.kernel(2030, 2060, launched=(450, 455))  # 30 ns of the backward pass, whose layer nothing tells
    result = table(file, "torch-nvtx")
    assert sums(result) == {
        ("model.layers.0", "forward"): 10,
        ("model.layers.0.mlp", "forward"): 20,
        ("(none)", "backward"): 30,
    }
    assert result.summary.steps == 1


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


def emit_nvtx(file: NsysFile, *, modules: bool = True) -> None:
    """Two linear layers, forward on the main thread and backward on autograd's.

    layers.0 makes nodes 10 (a transposition; the linear around it bears the number too, and began before) and 11,
    layers.1 makes 12, the loss outside every layer 13.
    """
    if modules:
        plain(file, "model", 90, 400)
        plain(file, "model.layers.0", 100, 200)
        plain(file, "model.layers.1", 200, 300)
    plain(file, "aten::linear, seq = 10, op_id = 1", 105, 195)
    plain(file, "aten::t, seq = 10, op_id = 2", 110, 120)
    plain(file, "aten::addmm, seq = 11, op_id = 3, sizes = [[2, 2]]", 130, 190)
    plain(file, "aten::empty, op_id = 4", 135, 140)
    plain(file, "aten::relu, seq = 12, op_id = 5", 210, 290)
    plain(file, "aten::mean, seq = 13, op_id = 6", 450, 490)
    for name, number, start in (("Mean", 13, 500), ("Relu", 12, 600), ("Addmm", 11, 700), ("T", 10, 900)):
        plain(file, f"{NODE}{name}Backward0, seq = {number}, op_id = 7", start, start + 80, tid=ENGINE)
        plain(file, f"{name}Backward0, seq = {number}, op_id = 8", start + 5, start + 75, tid=ENGINE)
        file.kernel(start + 5000, start + 5000 + number, launched=(start + 10, start + 12), tid=ENGINE)
    plain(file, f"{NODE}torch::autograd::AccumulateGrad, op_id = 9", 800, 880, tid=ENGINE)
    file.kernel(5800, 5803, launched=(810, 812), tid=ENGINE)  # 3 ns, of the layer whose node ran before it
    file.kernel(4000, 4001, launched=(132, 133))  # 1 ns of layers.0's forward


def test_backward_by_sequence_numbers(file: NsysFile) -> None:
    emit_nvtx(file)
    result = table(file, "emit-nvtx")
    assert sums(result) == {
        ("model.layers.0", "forward"): 1,
        ("model.layers.0", "backward"): 11 + 10 + 3,
        ("model.layers.1", "backward"): 12,
        ("(none)", "backward"): 13,  # the loss
    }
    assert sums(result, "gpu_total_ns")["model", "backward"] == 12 + 11 + 10 + 3
    calls = sums(result, "calls")
    # Addmm, AccumulateGrad and T ran one after another: one stretch, inside one of the model's
    assert calls["model.layers.0", "backward"] == calls["model.layers.1", "backward"] == calls["model", "backward"] == 1
    told = "of 4 backward operators 4 (100%) found the operator that made them, 3 (75%) in a layer"
    assert any(told in warning for warning in result.warnings)


def test_backward_of_our_ranges_beside_emit_nvtx(file: NsysFile) -> None:
    emit_nvtx(file, modules=False)
    file.range_("layers.0", 100, 200)
    file.range_("layers.1", 200, 300)
    assert sums(table(file, "emit-nvtx")) == {
        ("layers.0", "forward"): 1,
        ("layers.0", "backward"): 24,
        ("layers.1", "backward"): 12,
        ("(none)", "backward"): 13,
    }


def test_a_window_that_begins_behind_the_forward(file: NsysFile) -> None:
    plain(file, "model.layers.0", 100, 200)
    plain(file, "aten::mm, seq = 5, op_id = 1", 110, 120)
    for number, start in ((4, 500), (5, 600)):
        plain(file, f"{NODE}MmBackward0, seq = {number}, op_id = 2", start, start + 50, tid=ENGINE)
        file.kernel(start + 1000, start + 1000 + number, launched=(start + 1, start + 2), tid=ENGINE)
    result = table(file, "emit-nvtx")
    assert sums(result) == {("model.layers.0", "backward"): 5, ("(none)", "backward"): 4}
    assert any("of 2 backward operators 1 (50%) found" in warning for warning in result.warnings)


def test_numbers_count_on_each_thread(file: NsysFile) -> None:
    """Two threads made a node 5: which one's backward runs on the engine's thread is unknown, so none is guessed."""
    for tid, layer in ((MAIN, "replica.0"), (9, "replica.1")):
        plain(file, layer, 100, 200, tid=tid)
        plain(file, "aten::mm, seq = 5, op_id = 1", 110, 120, tid=tid)
    plain(file, f"{NODE}MmBackward0, seq = 5, op_id = 2", 500, 550, tid=ENGINE)
    file.kernel(1000, 1007, launched=(510, 511), tid=ENGINE)
    result = table(file, "emit-nvtx")
    assert sums(result) == {("(none)", "backward"): 7}
    assert any("of 1 backward operators 0 (0%) found" in warning for warning in result.warnings)


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


def test_operators_stand_for_layers_where_nothing_else_does(file: NsysFile) -> None:
    emit_nvtx(file, modules=False)
    result = table(file, "emit-nvtx")
    assert sums(result) == {
        ("aten::addmm", "forward"): 1,
        ("aten::addmm", "backward"): 11 + 3,
        ("aten::t", "backward"): 10,
        ("aten::relu", "backward"): 12,
        ("aten::mean", "backward"): 13,
    }
    assert any("each operator stands for a layer" in warning for warning in result.warnings)
