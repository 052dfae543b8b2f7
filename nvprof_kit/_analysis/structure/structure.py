"""Adds the layers that the order of kernels shows to a capture that names none.

A block becomes a range on the thread that launched it, from its first launch to its last; in it are ranges of its
parts. Kernels of a CUDA graph's replay share one launch, so the replay's blocks are ranges of the order of its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.structure.blocks import Aligner, Block, Pass, find_passes, number_blocks
from nvprof_kit._analysis.structure.tokens import BACKWARD, FORWARD, Sequence, sequences
from nvprof_kit._trace.frames import MISSING_PAYLOAD, appended, labels
from nvprof_kit._trace.schema import REPLAYED, CaptureInfo, Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import Category

_LEAST_BLOCKS = 3

_CATEGORIES = list(Category)

EVIDENCE = "structure"
"""`CaptureInfo.evidence` of a capture whose layers are from here."""


def add_structure(trace: Trace) -> Trace:
    """Add the ranges of steps, blocks and their parts that the order of kernels shows.

    Args:
        trace: A capture without ranges of layers, with the names of its operations.

    Returns:
        The capture with the ranges, or as it was if nothing repeats; `CaptureInfo.warnings` says which.
    """
    ranges = _Ranges(trace)
    total, explained = 0, 0
    texts, doubts = [], []
    for sequence in sequences(trace):
        total += int(sequence.duration.sum())
        passes, given_up = find_passes(sequence)
        stacks = number_blocks(passes, sequence)
        if max((len(model_pass.blocks) for model_pass in passes), default=0) < _LEAST_BLOCKS:
            continue
        names = _names(stacks)
        time_before = np.concatenate([[0], np.cumsum(sequence.duration)])
        edges = [(block.first, block.last + 1) for model_pass in passes for block in model_pass.blocks]
        explained += int(np.diff(time_before[np.array(edges)]).sum())
        ranges.add(sequence, passes, names)
        for number, (stack, name) in enumerate(zip(stacks, names, strict=True)):
            directions = [model_pass.direction for model_pass in passes if model_pass.stack == number]
            forward, backward = directions.count(FORWARD), directions.count(BACKWARD)
            texts.append(f"{len(stack.blocks)} {name} in {forward} forward and {backward} backward passes")
            if forward and backward and forward != backward:
                doubts.append(f"{name} have {forward} forward, {backward} backward passes")
        if given_up:
            doubts.append(
                f"no repetition found in {given_up} of {given_up + len(passes)} passes, which are in no block"
            )
    if not texts:
        warnings = (*trace.info.warnings, Issue.of("no-evidence"))
        return replace(trace, info=replace(trace.info, evidence="none", warnings=warnings))
    text = "; ".join(f"{text} (of {count} devices)" if count > 1 else text for text, count in Counter(texts).items())
    doubt = f"; in doubt: {', '.join(dict.fromkeys(doubts))}" if doubts else ""
    issue = Issue.of("structure", stacks=text, in_blocks=explained / max(total, 1), doubt=doubt)
    info = replace(trace.info, evidence=EVIDENCE, warnings=(*trace.info.warnings, issue))
    return ranges.trace(info)


def _names(stacks: list[Pass]) -> list[str]:
    if len(stacks) == 1:
        return ["blocks"]
    widths = [len(model_pass.groups[0]) for model_pass in stacks]
    if len(stacks) == 2 and sorted(widths) == [1, 2]:
        return ["decoder.blocks" if width == 2 else "encoder.blocks" for width in widths]
    return [f"stack{number}.blocks" for number in range(len(stacks))]


class _Ranges:
    """Ranges to be added to a capture, and the graph nodes that they hold."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._spans: list[Int64Array] = []
        self._offsets: list[int] = []
        self._rows: list[Int64Array] = []
        self._texts: dict[str, int] = {}
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}
        self._replay_tid = replay_tid(trace)
        self._call_tid = trace.api["tid"].to_numpy()
        self._node = trace.ops["graph_node"].to_numpy().astype(np.int64).copy()
        self._pid = trace.ops["pid"].to_numpy()
        self._operators, self._operator = [""], np.zeros(len(trace.ops), dtype=np.int64)
        if "captured_by" in trace.ops:
            operator = trace.ops["captured_by"].cat
            self._operators, self._operator = list(operator.categories), np.asarray(operator.codes, np.int64)

    def add(self, sequence: Sequence, passes: list[Pass], names: list[str]) -> None:
        """Add the ranges of one device's passes."""
        # kernels that share their launching call with another: those of a graph's replay
        same = (sequence.call[1:] == sequence.call[:-1]) & (sequence.call[1:] != NONE)
        in_replay: Bools = np.append(same, False) | np.append(False, same)
        self._first_replay = int(sequence.time[np.argmax(in_replay)]) if len(in_replay) else 0
        self._aligner = Aligner(sequence)
        rows_of_block: dict[tuple[bytes, bytes, tuple[int, ...]], Int64Array] = {}
        forward_blocks: dict[tuple[int, int], Block] = {}
        seen: set[int] = set()
        for model_pass in passes:
            for block in model_pass.blocks:
                layer = block.stack, block.number
                if block.direction == FORWARD:
                    forward_blocks[layer] = block
                name = f"{names[block.stack]}.{block.number}"
                if in_replay[block.first] and not self._add_nodes(sequence, block, name, seen):
                    continue
                recomputed_kernels = 0
                if block.recomputes and layer in forward_blocks:
                    tokens = sequence.token[block.first : block.anchors[0].first]
                    other = sequence.token[forward_blocks[layer].first : forward_blocks[layer].last + 1]
                    recomputed_kernels = int(np.argmax(self._aligner.start(other, [tokens])[0]))
                anchors = (position - block.first for anchor in block.anchors for position in anchor[:2])
                tokens = sequence.token[block.first : block.last + 1]
                operators = self._operator[sequence.row[block.first : block.last + 1]]
                key = tokens.tobytes(), operators.tobytes(), (block.direction, *layer, recomputed_kernels, *anchors)
                if key not in rows_of_block:
                    rows_of_block[key] = self._rows_of_block(sequence, block, name, recomputed_kernels)
                self._add(block.first, rows_of_block[key])
        has_steps = Category.STEP.value in set(self._trace.ranges["category"].astype(str))
        for number, (first, last) in enumerate([] if has_steps else _steps(sequence, passes)):
            # it begins with the end of the one before: what the host does between them delays it
            self._add(first, np.array([(0, last - first, *self._labels(Category.STEP, f"step {number}"), -1)]))
        self._place(sequence)
        self._replay_tid += 1

    def _rows_of_block(self, sequence: Sequence, block: Block, name: str, recomputed: int) -> Int64Array:
        """Rows of `_add` for a block: the forward pass that a backward block begins with, the block, and its parts."""
        is_backward = block.direction == BACKWARD
        category = Category.BACKWARD if is_backward else Category.FORWARD
        # communication between two blocks gathers for the next one forward, and reduces the last one's backward
        beside = 1 if is_backward else -1
        rows = [(0, recomputed - 1, *self._labels(Category.FORWARD, name), 0)] if recomputed else []
        rows.append((0, block.last - block.first, *self._labels(category, name), beside))
        for section in _parts(sequence, block, block.first + recomputed):
            numbers = self._labels(category, f"{name}.{section.name}")
            rows.append((section.first - block.first, section.last - block.first, *numbers, 0))
            position = section.first - block.first
            for operator, run in groupby(self._operator[sequence.row[section.first : section.last + 1]]):
                end = position + len(list(run))
                if self._operators[operator]:
                    path = f"{name}.{section.name}.{self._operators[operator].replace('.', '_')}"
                    rows.append((position, end - 1, *self._labels(category, path), 0))
                position = end
        return np.array(rows, dtype=np.int64)

    def _add_nodes(self, sequence: Sequence, block: Block, name: str, seen: set[int]) -> bool:
        """Let the kernels of a replayed graph be created in the block's range; False if an earlier replay did."""
        rows = sequence.row[block.first : block.last + 1]
        without = rows[self._node[rows] < 0]
        self._node[without] = (1 << 62) + without
        nodes = self._node[rows]
        new_nodes = [node for node in nodes.tolist() if node not in seen]
        if not new_nodes:
            return False
        seen.update(new_nodes)
        pid = int(self._pid[rows[0]])
        for node, position in zip(nodes.tolist(), range(block.first, block.last + 1), strict=True):
            self._nodes.setdefault((pid, node), (self._replay_tid, self._first_replay + position))
        return True

    def _add(self, offset: int, rows: Int64Array) -> None:
        """Add ranges around the launches of positions.

        Args:
            offset: Added to the positions.
            rows: First and last position, numbers of the category and the text, and -1 or 1 if the range extends to the
                launch of the kernel before or after its own, else 0; shape ``(ranges, 5)``.
        """
        self._offsets.append(offset)
        self._spans.append(rows)

    def _labels(self, category: Category, text: str) -> tuple[int, int]:
        """The numbers of a category and a text."""
        return _CATEGORIES.index(category), self._texts.setdefault(text, len(self._texts))

    def _place(self, sequence: Sequence) -> None:
        """Turn the positions of the ranges of one device into times, on each thread that launched some; those of a
        replayed graph into the order of its nodes.
        """
        if not self._spans:
            return
        offset = np.repeat(np.array(self._offsets), [len(rows) for rows in self._spans])
        spans = np.concatenate(self._spans)
        self._spans, self._offsets = [], []
        first, last, category, _, beside = spans.T
        first, last = first + offset, last + offset
        edge = np.where(beside < 0, first - 1, np.where(beside > 0, last + 1, NONE))
        replayed = np.zeros(len(spans), dtype=bool)
        if self._nodes:
            rows = sequence.row[first]
            nodes = zip(self._pid[rows].tolist(), self._node[rows].tolist(), strict=True)
            replayed = np.array([node in self._nodes for node in nodes], dtype=bool)
            replayed &= category != _CATEGORIES.index(Category.STEP)
        tid = np.where(sequence.call == NONE, NONE, self._call_tid[sequence.call])
        thread_of_position = np.concatenate([[0], np.cumsum(tid[1:] != tid[:-1])])
        span, start, end = np.arange(len(spans)), first.copy(), last.copy()
        several = np.flatnonzero((thread_of_position[first] != thread_of_position[last]) & ~replayed)
        pieces = [
            (number, int(first[number] + positions[0]), int(first[number] + positions[-1]))
            for number in several.tolist()
            for threads in (tid[first[number] : last[number] + 1],)
            for positions in (np.flatnonzero(threads == thread) for thread in np.unique(threads))
        ]
        if pieces:
            pairs = zip((span, start, end), np.array(pieces, dtype=np.int64).T, strict=True)
            span, start, end = (np.concatenate([np.delete(old, several), new]) for old, new in pairs)
            order = np.argsort(span, kind="stable")
            span, start, end = span[order], start[order], end[order]
        replayed, thread, edge = replayed[span], tid[start], edge[span]
        launched = replayed | (thread != NONE)
        start_ns, end_ns = sequence.time[start], sequence.time[end] + 1
        inside = (edge >= 0) & (edge < len(tid))
        edge = np.where(inside, edge, 0)
        inside &= tid[edge] == thread
        before = inside & (edge < first[span])
        start_ns = np.where(before, np.minimum(start_ns, sequence.time[edge] + 1), start_ns)
        end_ns = np.where(inside & ~before, np.maximum(end_ns, sequence.time[edge]), end_ns)
        start_ns = np.where(replayed, self._first_replay + start, start_ns)
        end_ns = np.where(replayed, self._first_replay + end + 1, end_ns)
        thread = np.where(replayed, self._replay_tid, thread)
        pid = np.full(len(span), self._pid[sequence.row[0]], dtype=np.int64)
        columns = np.stack([start_ns, end_ns, pid, thread, spans[span, 2], spans[span, 3]])
        self._rows.append(columns[:, launched])

    def trace(self, info: CaptureInfo) -> Trace:
        """The capture with the ranges added."""
        old = self._trace.ranges
        names = [str(name) or Category.USER.value for name in old["category"].cat.categories]
        old = old.assign(category=labels(old["category"].cat.codes.to_numpy(), names))
        start, end, pid, tid, category, text = np.concatenate([np.zeros((6, 0), dtype=np.int64), *self._rows], axis=1)
        columns = {
            "start_ns": start,
            "end_ns": end,
            "pid": pid,
            "tid": tid,
            "category": labels(category, [name.value for name in _CATEGORIES]),
            "text": labels(text, list(self._texts)),
        }
        trace = replace(self._trace, info=info, ranges=old)
        return with_ranges(trace, columns, self._nodes, self._node)


def replay_tid(trace: Trace) -> int:
    """A `tid` for the order of a graph's nodes that the capture does not have, see `REPLAYED`."""
    tid = trace.ranges["tid"].to_numpy()
    return int(tid[tid < REPLAYED].max(initial=-(2**63))) + 1


def with_ranges(
    trace: Trace, columns: Mapping[str, Any], nodes: Mapping[tuple[int, int], tuple[int, int]], node_of_op: Int64Array
) -> Trace:
    """A capture with more ranges, and with graph nodes that were created in them.

    Args:
        trace: The capture.
        columns: Columns of the ranges.
        nodes: Thread and time of each node's creation, by process and node.
        node_of_op: The node of each operation, or `NONE`.
    """
    count = len(columns["start_ns"])
    more = {"nested": np.ones(count, dtype=bool), "left_open": np.zeros(count, dtype=bool)}
    more["payload"] = np.full(count, MISSING_PAYLOAD)
    trace = replace(trace, ranges=appended("ranges", trace.ranges, {**columns, **more}))
    if not nodes:
        return trace
    old = trace.graph_nodes
    is_replaced = [key in nodes for key in zip(old["pid"].tolist(), old["node"].tolist(), strict=True)]
    pid, node, tid, start = np.array([(*key, *creation) for key, creation in nodes.items()], dtype=np.int64).T
    created = {"pid": pid, "node": node, "tid": tid, "start_ns": start, "original": np.full(len(nodes), NONE)}
    graph_nodes = appended("graph_nodes", old[~np.array(is_replaced, dtype=bool)], created)
    return replace(trace, graph_nodes=graph_nodes, ops=trace.ops.assign(graph_node=node_of_op))


def _steps(sequence: Sequence, passes: list[Pass]) -> list[tuple[int, int]]:
    """Where the steps begin and end: at each first forward pass of the model."""
    starts_at = []
    previous = None
    common = Counter(model_pass.stack for model_pass in passes if model_pass.direction == FORWARD).most_common(1)
    for index, model_pass in enumerate(passes):
        if model_pass.direction == BACKWARD:
            previous = model_pass
            continue
        if previous is None or previous.direction == BACKWARD or previous.stack == common[0][0]:
            start_at = passes[index - 1].blocks[-1].last + 1 if index else 0
            ends = start_at + np.flatnonzero(sequence.end[start_at : model_pass.blocks[0].first])
            starts_at.append(int(ends[-1]) + 1 if len(ends) else start_at)
        previous = model_pass
    if len(starts_at) < 2:
        return []
    edges = [*starts_at, len(sequence.token)]
    return [(start_at, end - 1) for start_at, end in pairwise(edges)]


_CODE = {name: code for code, name in enumerate(CLASSES)}


class _Part(NamedTuple):
    """A run of kernels with one purpose: positions ``first`` to ``last`` of the sequence."""

    name: str
    first: int
    last: int


def _parts(sequence: Sequence, block: Block, first: int) -> list[_Part]:
    """The parts of a block from the position `first` on, in order of launch."""
    positions = np.arange(first, block.last + 1)
    is_backward = block.direction == BACKWARD
    if is_backward:  # as in the forward pass: the backward pass runs the parts in reverse
        positions = positions[::-1]
    product, coarse = sequence.product[positions], sequence.coarse[positions]
    names = np.empty(len(positions), dtype=object)
    left = 0
    spans = sorted(sorted((abs(edge.first - positions[0]), abs(edge.last - positions[0]))) for edge in block.anchors)
    for number, span in enumerate(spans):
        start, end = span
        classes = coarse[start : end + 1]
        is_attention = np.isin(classes, (_CODE["attention"], _CODE["softmax"])).any() and classes[0] != _CODE["ssm"]
        if (classes == _CODE["softmax"]).all():  # attention of several kernels: the products around its softmax
            before, after = np.flatnonzero(product[left:start]), np.flatnonzero(product[end + 1 :])
            start = left + int(before[-1]) if len(before) else start
            end = end + 1 + int(after[0]) if len(after) else end
        inputs = left + np.flatnonzero(product[left:start])
        outputs = end + 1 + np.flatnonzero(product[end + 1 :])
        out = int(outputs[min(int(is_backward), len(outputs) - 1)]) if len(outputs) else end
        prefix = "cross_" if number else ""
        qkv = slice(inputs[0], inputs[-1] + 1) if len(inputs) else slice(start, start)
        names[left : qkv.start] = f"{prefix}norm"
        names[qkv] = f"{prefix}qkv"
        names[qkv.stop : end + 1] = prefix + ("attention" if is_attention else "mixer")
        for kind in ("rope", "kv_cache"):
            names[left : end + 1][coarse[left : end + 1] == _CODE[kind]] = kind
        names[end + 1 : out + 1] = f"{prefix}out"
        left = out + 1
    has_experts = np.isin(coarse[left:], (_CODE["experts"], _CODE["softmax"])).any()
    names[left:] = "experts" if has_experts else "mlp"
    names[left:][np.cumsum(product[left:]) == 0] = "mlp_norm" if product[left:].any() else names[-1]
    cuts = np.flatnonzero(names[1:] != names[:-1]) + 1
    edges = [(positions[start], positions[end - 1]) for start, end in pairwise([0, *cuts, len(names)])]
    return [_Part(name, int(min(edge)), int(max(edge))) for name, edge in zip(names[[0, *cuts]], edges, strict=True)]
