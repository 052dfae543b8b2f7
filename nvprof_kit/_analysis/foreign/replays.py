"""Names the kernels of CUDA graph replays in a PyTorch trace by the trace of the graph's capture.

All kernels of a replay share one launch, and no module or operator runs. While the graph was captured they did: the
calls in that trace that launched nothing are the graph's nodes, in the order in which the replay runs them. The two
sequences are aligned, and the kernels get the operators and modules around those calls.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.intervals import NONE, Int64Array, inherit, nest
from nvprof_kit._analysis.foreign.translate import BLOCK
from nvprof_kit._analysis.kernels.classes import CLASSES, classify, family_of
from nvprof_kit._analysis.structure.blocks import similarity
from nvprof_kit._analysis.structure.structure import replay_tid, with_ranges
from nvprof_kit._trace.frames import labels
from nvprof_kit._trace.schema import CALL_KINDS, OP_KINDS, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_PHASES, Category

NEEDED = frozenset({"calls", "name"})
"""Optional tables and columns of the trace of a capture."""

_LAUNCH = re.compile(r"(?:cu|cuda|hip)(?:\w*Launch\w*Kernel|Mem(cpy|set))")
_BEGIN = re.compile(r"(?:cu|cuda|hip)StreamBeginCapture")
_REGION = re.compile(r"Torch-Compiled Region|## |AOTDispatcher|Pregraph|CompiledFunction|TorchDynamo|CUDAGraph")
"""What torch.compile records as operators around those that it calls."""
_ALIKE = 0.5
"""A replay is of a captured graph only if at least this share of their kernels is the same."""


def name_replays(trace: Trace, capture: Trace) -> Trace:
    """Name the kernels of the replays in a trace.

    Args:
        trace: A PyTorch trace with replays, with the names of its operations.
        capture: The PyTorch trace of the capture of their graphs, with `NEEDED`.

    Returns:
        The trace with the capture's layers around the replayed kernels if some are numbered, as the blocks of a model
        are; else only with the kernels' operators, in the column ``captured_by``. `CaptureInfo.warnings` says what
        share was named.

    Raises:
        CaptureError: The trace has no replays, or the other one no capture.
    """
    ops, path = trace.ops, capture.info.path
    for other in (trace, capture):
        if (other.calls is None and other is capture) or not other.info.tool.startswith("PyTorch"):
            raise CaptureError(f"{other.info.path}: not a PyTorch trace, which --with needs: nsys records the nodes")
    nodes = _nodes(capture)
    start, correlation = (ops[name].to_numpy() for name in ("start_ns", "correlation"))
    launched = np.lexsort((start, correlation))
    groups = np.split(launched, np.flatnonzero(np.diff(correlation[launched])) + 1)
    # the operations of a replay share their launch
    replays = [rows for rows in groups if len(rows) > 1 and correlation[rows[0]] >= 0]
    replays.sort(key=lambda rows: start[rows[0]])
    if not replays:
        raise CaptureError(f"{trace.info.path}: no replay of a CUDA graph in it; leave --with {path} out")
    if not len(nodes):
        raise CaptureError.of("no-graph-capture", path=path)
    node = _matches(ops, replays, nodes)
    named = node != NONE
    operator = labels(np.append(nodes["operator"].cat.codes, len(nodes["operator"].cat.categories))[node],
                      [*nodes["operator"].cat.categories, ""])  # fmt: skip
    duration = (ops["end_ns"] - ops["start_ns"]).to_numpy()
    share = duration[named].sum() / max(duration[np.concatenate(replays)].sum(), 1)
    trace = replace(trace, ops=ops.assign(captured_by=operator))
    ranges = _layers(capture, nodes, node[named])
    has_blocks = ranges["text"].str.contains(BLOCK).any()
    if not has_blocks and trace.ranges["text"].str.contains(BLOCK).any():  # so the order of kernels is not asked
        ranges = pd.concat([ranges, _operators(ranges, nodes, node[named])])
    elif not has_blocks:
        ranges = ranges[:0]
    if len(ranges):
        pid, tid, start_ns = int(ops["pid"].iloc[0]), replay_tid(trace), int(start[replays[0][0]])
        old_node = ops["graph_node"].to_numpy().astype(np.int64)
        new_node = np.where(named, node + old_node.max() + 1, old_node)
        creations = zip(new_node[named].tolist(), node[named].tolist(), strict=True)
        created = {(pid, key): (tid, start_ns + position) for key, position in creations}
        edges = {name: ranges[name] + start_ns for name in ("start_ns", "end_ns")}
        ranges = ranges.assign(pid=pid, tid=tid, **edges)
        trace = with_ranges(trace, {str(name): column for name, column in ranges.items()}, created, new_node)
    how = "modules" if has_blocks else "operators"
    text = f"{share:.1%} of the GPU time of {len(replays)} graph replays is named by the {how} in {Path(path).name}"
    issue = Issue("replays", "note" if share > 0.95 else "warning", 1.0, text)
    return replace(trace, info=replace(trace.info, warnings=(*trace.info.warnings, issue)))


def _nodes(capture: Trace) -> pd.DataFrame:
    """The calls that became nodes of a graph, by thread and time.

    Each has the number of its ``graph``, the outermost ``operator`` around it, and a ``token``, by which `_matches`
    compares it with the operations of a replay: ``memcpy`` or ``memset``, or the kernel's name where calls have it, as
    ROCm's do; CUDA's do not, so it is the kernel class of the innermost operator.
    """
    calls = capture.calls
    assert calls is not None, "read with NEEDED"
    calls = calls.astype({"name": object, "kernel": object})
    api = calls[calls["kind"] == CALL_KINDS.index("api")].sort_values(["tid", "start_ns"], kind="stable")
    memory_token = "mem" + api["name"].str.extract(f"^{_LAUNCH.pattern}", expand=False)
    api = api.assign(graph=api["name"].str.match(_BEGIN).cumsum(), token=memory_token)
    is_node = api["name"].str.match(_LAUNCH) & (api["graph"] > 0)
    if capture.info.on_gpu:
        is_node &= ~api["correlation"].isin(capture.ops["correlation"])
    nodes: pd.DataFrame = api[is_node].reset_index(drop=True)
    operators = calls[(calls["kind"] == CALL_KINDS.index("operator")) & ~calls["name"].str.match(_REGION)]
    nesting = nest(*(operators[column].to_numpy() for column in ("start_ns", "end_ns", "tid")))
    innermost = nesting.innermost(nodes["tid"].to_numpy(), nodes["start_ns"].to_numpy())
    outermost = np.where(nesting.depth == 0, np.arange(len(operators)), NONE)
    names = np.append(operators["name"], "")
    nodes["operator"] = pd.Categorical(names[np.append(inherit(outermost, nesting), NONE)[innermost]])
    launching_operator = pd.Series(names[innermost], dtype=object)
    has_kernel_names = nodes["kernel"].ne("").any()
    classes = launching_operator.map({name: family_of(name).kernel_class for name in launching_operator.unique()})
    nodes["token"] = nodes["token"].fillna(nodes["kernel"] if has_kernel_names else classes)
    return nodes


def _layers(capture: Trace, nodes: pd.DataFrame, used: Int64Array) -> pd.DataFrame:
    """The capture's layers in which some of the nodes were created, from and to positions of nodes."""
    layers = capture.ranges[capture.ranges["category"].isin(LAYER_PHASES)]
    # the nodes on the threads before, and on the layer's thread until then
    edges = {name: np.searchsorted(nodes["tid"], layers["tid"]) for name in ("start_ns", "end_ns")}
    for tid, created_ns in nodes.groupby("tid")["start_ns"]:
        on_thread = (layers["tid"] == tid).to_numpy()
        for name, position in edges.items():
            position[on_thread] += np.searchsorted(created_ns, layers.loc[on_thread, name])
    used_before = np.concatenate([[0], np.cumsum(np.bincount(used, minlength=len(nodes)) > 0)])
    is_used = used_before[edges["end_ns"]] > used_before[edges["start_ns"]]
    return layers.assign(**edges).loc[is_used, ["start_ns", "end_ns", "category", "text"]]


def _operators(layers: pd.DataFrame, nodes: pd.DataFrame, used: Int64Array) -> pd.DataFrame:
    """Layers inside of these for each run of nodes with one operator, named by it."""
    position = np.arange(len(nodes))
    same = np.zeros(max(len(layers), len(nodes)), dtype=np.int64)
    nesting = nest(layers["start_ns"].to_numpy(), layers["end_ns"].to_numpy(), same[: len(layers)])
    layer = nesting.innermost(same[: len(nodes)], position)
    operator = nodes["operator"].astype(object).to_numpy()
    run = np.cumsum((np.diff(layer, prepend=NONE) != 0) | (operator != np.roll(operator, 1)))
    runs = pd.DataFrame({"run": run, "position": position, "layer": layer, "operator": operator})
    runs = runs[np.isin(position, used) & (operator != "")]
    first, last = (runs.drop_duplicates("run", keep=side) for side in ("first", "last"))
    outer = np.append(layers["text"].astype(object) + ".", "")[first["layer"]]
    text = (outer + first["operator"].str.replace(".", "_")).array
    edges = {"start_ns": first["position"].array, "end_ns": last["position"].array + 1}
    return pd.DataFrame({**edges, "category": Category.FORWARD.value, "text": text})


def _matches(ops: pd.DataFrame, replays: list[Int64Array], nodes: pd.DataFrame) -> Int64Array:
    """The node of each operation, a row of `nodes`, or `NONE`."""
    classes = pd.Series(np.array(list(CLASSES), dtype=object)[classify(ops).code], index=ops.index)
    kernels = ops["name"].astype(object) if nodes["kernel"].ne("").any() else classes
    tokens = ops["kind"].map(dict(enumerate(OP_KINDS))).mask(ops["kind"] == OP_KINDS.index("kernel"), kernels)
    code, _ = pd.factorize(pd.concat([tokens, nodes["token"]]))
    code_of_op, code_of_node = np.split(code, [len(ops)])
    stream = ops["stream"].to_numpy()
    graphs = [rows.to_numpy() for _, rows in nodes.groupby("graph").groups.items()]
    node = np.full(len(ops), NONE, dtype=np.int64)
    graphs_of: dict[bytes, deque[Int64Array]] = {}
    alignments: dict[tuple[bytes, bytes], Int64Array] = {}
    for rows in replays:
        key = code_of_op[rows].tobytes()
        if key not in graphs_of:
            scores = [similarity(code_of_op[rows], code_of_node[graph]) for graph in graphs]
            best = max(scores)
            best_graphs = (graph for graph, score in zip(graphs, scores, strict=True) if score == best >= _ALIKE)
            graphs_of[key] = deque(best_graphs)
        if graphs_of[key]:
            graph = graphs_of[key][0]
            graphs_of[key].rotate(-1)  # graphs that are alike, as of equal blocks, are replayed in the order of capture
            pair = key, code_of_node[graph].tobytes()
            if pair not in alignments:
                in_order = len(rows) == len(graph) and np.unique(stream[rows]).size == 1
                alignment = np.arange(len(graph)) if in_order else _align(code_of_op[rows], code_of_node[graph])
                alignments[pair] = alignment
            node[rows] = np.append(graph, NONE)[alignments[pair]]
    return node


def _align(replay: Int64Array, graph: Int64Array) -> Int64Array:
    """The position in a graph of each operation of its replay, or `NONE`."""
    position = np.full(len(replay), NONE, dtype=np.int64)
    matcher = SequenceMatcher(None, replay.tolist(), graph.tolist(), autojunk=False)
    for first, node, size in matcher.get_matching_blocks():
        position[first : first + size] = np.arange(node, node + size)
    # streams run beside each other: what is not in the common order is elsewhere in both
    is_free = ~np.isin(np.arange(len(graph)), position)
    for token in np.unique(replay[position == NONE]):
        rows, nodes = np.flatnonzero((position == NONE) & (replay == token)), np.flatnonzero(is_free & (graph == token))
        if len(rows) == len(nodes):
            position[rows], is_free[nodes] = nodes, False
    # a kernel that was chosen anew is between the same kernels as the one was that it stands for
    bounds = np.flatnonzero(np.concatenate([[True], position != NONE, [True]])) - 1
    for before, after in pairwise(bounds.tolist()):
        low = position[before] + 1 if before >= 0 else 0
        high = position[after] if after < len(replay) else len(graph)
        between = low + np.flatnonzero(is_free[low:high])
        if after > before + 1 and len(between):
            evenly = np.linspace(0, len(between), after - before - 1, endpoint=False, dtype=np.int64)
            position[before + 1 : after] = between[evenly]
    return position
