"""Captures with the ranges of others: renamed by rules, and the backward pass told from sequence numbers."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile
from support.lane import examples

import nvprof_kit
from nvprof_kit._analysis.attribution.intervals import NONE
from nvprof_kit._analysis.foreign.autograd_links import envelopes, makers
from nvprof_kit.names import LAYER_CATEGORIES

NODE = "autograd::engine::evaluate_function: "
ENGINE = 8


def table(file: NsysFile, rules: str, **opening: Any) -> nvprof_kit.Layers:
    if rules.startswith("[["):
        text, rules = rules, str(file.path.with_name("own.toml"))
        Path(rules).write_text(text, encoding="utf-8")
    return nvprof_kit.open(file.write(), rules=rules, **opening).layers()


def sums(result: nvprof_kit.Layers, column: str = "gpu_self_ns") -> dict[tuple[str, str], int]:
    rows = result.rows
    values = rows[["layer", "phase", column]].itertuples(index=False)
    return {(layer, phase): value for layer, phase, value in values if value}


def plain(file: NsysFile, text: str, start: int, end: int, **more: Any) -> None:
    """A range of the default domain, whose text is not registered."""
    file.range_(text, start, end, category=None, domain="", registered=False, **more)


def test_rules_of_the_user_and_what_they_leave_out(file):
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


def test_reentrant_checkpointing_numbers_on_its_own_thread(file):
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
    expected = {"forward": 1, "recompute": 2, "backward": 4}
    assert sums(table(file, "emit-nvtx")) == {("model.block", phase): ns for phase, ns in expected.items()}


def test_backward_of_our_ranges_beside_emit_nvtx_in_a_window_that_began_behind_a_forward(file):
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


operators = st.lists(
    st.tuples(
        st.integers(1, 3),  # thread
        st.booleans(),  # a node
        st.integers(-1, 4),  # number
        st.sampled_from([NONE, 1, 2, 3]),  # the thread whose forward made it
    ),
    max_size=24,
)


def laid_out(rows: list[tuple[int, bool, int, int]]) -> pd.DataFrame:
    """The operators one behind the other, 10 ns each."""
    operators = pd.DataFrame(rows, columns=["tid", "backward", "sequence", "forward_tid"])
    start = 100 * np.arange(len(rows))
    return operators.assign(start_ns=start, end_ns=start + 10, pid=1, engine=operators["backward"])


def maker_of(rows: list[tuple[int, bool, int, int]], node: int) -> int:
    """The contract, word by word, where no node lies in another."""
    tid, backward, sequence, forward_tid = rows[node]
    if not backward or sequence < 0:
        return NONE
    last = {}
    for index, (thread, is_node, number, _) in enumerate(rows[:node]):
        if not is_node and number == sequence:
            last[thread] = index
    if forward_tid != NONE:
        return last.get(forward_tid, NONE)
    others = [index for thread, index in last.items() if thread != tid]
    if len(others) > 1:
        return NONE
    return others[0] if others else last.get(tid, NONE)


@settings(max_examples=examples(50))
@given(operators.filter(bool))
def test_any_operators(rows):
    assert makers(laid_out(rows)).tolist() == [maker_of(rows, index) for index in range(len(rows))]


OUTER = np.array([NONE, 0, 1, 0, NONE])
"""Four ranges of layers: 0 holds 1 and 3, 1 holds 2; and `NONE` behind the last."""


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(-1, 3)), min_size=1, max_size=20))
def test_envelopes_nest_and_cover_their_nodes(rows):
    """At each node, the envelopes around it are its layer and the layers around that, from the inside out."""
    found = laid_out([(thread, True, 0, NONE) for thread, _ in rows])
    owner = np.array([layer for _, layer in rows])
    made = envelopes(found, owner, OUTER)
    for node, layer in enumerate(owner.tolist()):
        tid, start = found.loc[node, ["tid", "start_ns"]]
        around = made[(made["tid"] == tid) & (made["start_ns"] <= start) & (start < made["end_ns"])]
        chain, outer = [], layer
        while outer != NONE:
            chain.append(outer)
            outer = int(OUTER[outer])
        assert around["layer_range"].tolist()[::-1] == chain


TESTS = Path(__file__).parents[3]
CAPTURES = {path.name.partition(".sqlite")[0].partition(".json")[0]: path for path in TESTS.glob("data/foreign/*.xz")}
RULES = {"emit-nvtx": "emit-nvtx", "torch-nvtx": "torch-nvtx", "plain-nvtx": "torch-nvtx"}
DOMAINS = {"plain-nvtx": "train"}
LAYER_PHASES = {category.value for category in LAYER_CATEGORIES}


@cache
def layers_of(name: str) -> nvprof_kit.Layers:
    rules = next((rules for start, rules in RULES.items() if name.startswith(start)), None)
    domain = next((domain for start, domain in DOMAINS.items() if name.startswith(start)), None)
    return nvprof_kit.open(CAPTURES[name], rules=rules, domain=domain).layers(steps="all")


def operations(name: str, *phases: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and operations of each layer in some phases."""
    return {
        (row.layer, row.phase): (row.calls, row.gpu_ops)
        for row in layers_of(name).rows.itertuples()
        if row.phase in phases and row.layer != "(none)"
    }


@pytest.mark.parametrize("name", sorted(CAPTURES))
def test_the_table_is_the_golden_one(name, golden):
    columns = (TESTS / f"golden/foreign/{name}.csv").read_text(encoding="utf-8").partition("\n")[0].split(",")
    golden(f"foreign/{name}.csv", layers_of(name).rows[columns].to_csv(index=False))
    said = " ".join(layers_of(name).warnings)
    assert "emit" not in name or re.search(r"of (\d+) backward operators \1 \(100%\) found", said)
    assert ("each operator stands for a layer" in said) == name.startswith(("emit-nvtx-plain", "kineto-modules"))


@pytest.mark.parametrize("name", ["emit-nvtx-2024.2", "emit-nvtx-shapes-2024.2", "emit-nvtx-checkpoint-2024.2"])
def test_sequence_numbers_tell_each_layer_the_operations_that_our_ranges_tell_it(name):
    """66 rows, module by module: the same number of calls and of operations, forward and backward."""
    ours = operations("ours-2024.2", "forward", "backward")
    assert len(ours) > 60
    assert operations(name, "forward", "backward") == ours


@pytest.mark.parametrize("name", ["torch-nvtx-2024.2", "plain-nvtx-2024.2"])
def test_module_paths_alone_tell_the_forward(name):
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
def test_a_pytorch_trace_tells_the_same_operations(trace, ranged):
    """By class and number instead of by path, block by block."""
    stacked = by_block(trace, r"LlamaDecoderLayer\.(\d+)")
    assert stacked == by_block(ranged, r"layers\.(\d+)")
    assert {block for block, _ in stacked} == {"0", "1", ""}


def test_a_block_lasts_from_the_start_before_to_the_end_after(file):
    """Two blocks between FSDP's ranges under emit_nvtx, a third that the window cuts, and kernels around them."""

    def ranged(text: str, start: int, end: int) -> None:
        file.range_(text, start, end, category=None, domain="")

    ranged("FSDP::post_forward (blocks.2), op_id = 9", 0, 10)  # of the step before: cut twice, one layer
    at = 100
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
    layers_of = nvprof_kit.open(file.write()).layers()
    total = dict(zip(layers_of.rows["layer"], layers_of.rows["gpu_total_ns"], strict=True))
    for number in range(3):
        block = f"blocks.{number}"
        assert total[block] == 55
        assert (total[f"{block}.unshard"], total[f"{block}.linear"], total[f"{block}.FlashAttnFunc"]) == (5, 30, 20)
    assert total["(none)"] == 2
    cut = "1 layers are cut by the window's edge, so only a part of them counts: blocks.2"
    assert any(warning == cut for warning in layers_of.warnings)
    assert any("from the ranges of emit_nvtx" in warning for warning in layers_of.warnings)


def test_ranges_of_libraries_are_no_layers(file):
    file.range_("ncclAllReduce", 0, 50, category=None, domain="NCCL")
    file.kernel(100, 130, launched=(10, 12), name="ncclDevKernel_AllReduce")
    layers_of = nvprof_kit.open(file.write()).layers()
    assert set(layers_of.rows["layer"]) == {"(none)"}
