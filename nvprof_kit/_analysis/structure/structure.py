"""Adds the layers that the order of kernels shows to a capture that names none.

A block becomes a range on the thread that launched it, from its first launch to its last; in it are ranges of its
parts. Kernels of a CUDA graph's replay share one launch, so the replay's blocks are ranges of the order of its nodes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np

from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.structure.align import Aligner
from nvprof_kit._analysis.structure.blocks import Block, Pass, find_passes, number_blocks
from nvprof_kit._analysis.structure.parts import Part, parts_of
from nvprof_kit._analysis.structure.tokens import BACKWARD, FORWARD, Bools, Sequence, sequences
from nvprof_kit._trace.frames import MISSING_PAYLOAD, labels, make_frame
from nvprof_kit._trace.schema import Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import Category

_LEAST_BLOCKS = 3

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
    total, explained, devices = 0, 0, []
    for sequence in sequences(trace):
        total += int(sequence.duration.sum())
        passes = find_passes(sequence)
        stacks = number_blocks(passes, sequence)
        if max((len(model_pass.blocks) for model_pass in passes), default=0) < _LEAST_BLOCKS:
            continue
        names = _names(stacks)
        for model_pass in passes:
            for block in model_pass.blocks:
                explained += int(sequence.duration[block.first : block.last + 1].sum())
        ranges.add(sequence, passes, names)
        devices.append((passes, stacks, names))
    if not devices:
        sentence = (
            "nothing names the layers, and the order of kernels shows no blocks that repeat; annotate the model with "
            "nvprof_kit.annotate_model(model), or capture several steps"
        )
        issue = Issue("no-evidence", "warning", 1.0, sentence)
        return replace(trace, info=replace(trace.info, evidence="none", warnings=(*trace.info.warnings, issue)))
    issue = Issue("structure", "note", 1.0, _sentence(devices, explained / max(total, 1)))
    info = replace(trace.info, evidence=EVIDENCE, warnings=(*trace.info.warnings, issue))
    return ranges.trace(info)


def _names(stacks: list[Pass]) -> list[str]:
    if len(stacks) == 1:
        return ["blocks"]
    widths = [model_pass.width for model_pass in stacks]
    if len(stacks) == 2 and sorted(widths) == [1, 2]:
        return ["decoder.blocks" if width == 2 else "encoder.blocks" for width in widths]
    return [f"stack{number}.blocks" for number in range(len(stacks))]


def _sentence(devices: list[tuple[list[Pass], list[Pass], list[str]]], share: float) -> str:
    """What the layers are from, how much they explain, and what speaks against them."""
    texts = []
    doubts = []
    for passes, stacks, names in devices:
        for number, (stack, name) in enumerate(zip(stacks, names, strict=True)):
            same = [model_pass for model_pass in passes if model_pass.stack == number]
            forward = sum(model_pass.direction == FORWARD for model_pass in same)
            texts.append(f"{len(stack.blocks)} {name} in {forward} forward and {len(same) - forward} backward passes")
            if forward and len(same) - forward and forward != len(same) - forward:
                doubts.append(f"{name} have {forward} forward, {len(same) - forward} backward passes")
    text = "; ".join(f"{text} (of {count} devices)" if count > 1 else text for text, count in Counter(texts).items())
    doubt = f"; in doubt: {', '.join(dict.fromkeys(doubts))}" if doubts else ""
    explained = f"{share:.1%} of the kernels' time in blocks"
    return f"layers are from structure, the order of kernels alone: {text}; {explained}{doubt}"


class _Ranges:
    """Ranges to be added to a capture, and the graph nodes that they hold."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rows: list[tuple[int, int, int, int, str, str]] = []
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}
        threads = [frame["tid"].to_numpy() for frame in (trace.api, trace.ranges, trace.graph_nodes) if len(frame)]
        self._free_tid = int(max((values.max() for values in threads), default=0)) + 1
        self._call_tid = trace.api["tid"].to_numpy()
        self._node = trace.ops["graph_node"].to_numpy().astype(np.int64).copy()
        self._pid = trace.ops["pid"].to_numpy()

    def add(self, sequence: Sequence, passes: list[Pass], names: list[str]) -> None:
        """Add the ranges of one device's passes."""
        shared = _shared_launch(sequence)
        self._aligner = Aligner(sequence.kind)
        tid = np.where(sequence.call == NONE, NONE, self._call_tid[sequence.call])
        self._changes: list[int] = np.concatenate([[0], np.cumsum(tid[1:] != tid[:-1])]).tolist()
        self._tid: list[int] = tid.tolist()
        self._time: list[int] = sequence.time.tolist()
        self._process = int(self._pid[sequence.row[0]])
        cache: dict[tuple[bytes, tuple[int, ...]], list[Part]] = {}
        forward: dict[tuple[int, int], Block] = {}
        seen: set[int] = set()
        for model_pass in passes:
            for block in model_pass.blocks:
                if model_pass.direction == FORWARD:
                    forward[block.stack, block.number] = block
                name = f"{names[block.stack]}.{block.number}"
                if shared[block.first] and not self._add_nodes(sequence, block, name, seen):
                    continue
                first = block.first
                if block.recomputes and (block.stack, block.number) in forward:
                    first = self._add_recompute(sequence, block, forward[block.stack, block.number], name)
                category = Category.BACKWARD if model_pass.direction == BACKWARD else Category.FORWARD
                # communication between two blocks gathers for the next one forward, and reduces the last one's backward
                edge = block.first - 1 if model_pass.direction == FORWARD else block.last + 1
                self._add(sequence, (block.first, block.last), category, name, edge)
                key = (
                    sequence.token[first : block.last + 1].tobytes(),
                    (model_pass.direction, *(edge - first for anchor in block.anchors for edge in anchor[:2])),
                )
                if key not in cache:
                    parts = parts_of(sequence, block, first)
                    cache[key] = [Part(section.name, section.first - first, section.last - first) for section in parts]
                for section in cache[key]:
                    self._add(
                        sequence, (first + section.first, first + section.last), category, f"{name}.{section.name}"
                    )
        has_steps = Category.STEP.value in set(self._trace.ranges["category"].astype(str))
        for number, step in enumerate([] if has_steps else _steps(sequence, passes)):
            self._add(sequence, step, Category.STEP, f"step {number}")
        self._free_tid += 1

    def _add_recompute(self, sequence: Sequence, block: Block, forward: Block, name: str) -> int:
        """Add the range of the forward pass that a backward block begins with; return where the backward begins."""
        recomputed_tokens = sequence.token[block.first : block.anchors[0].first]
        size, _, _ = self._aligner.start(recomputed_tokens, sequence.token[forward.first : forward.last + 1])
        if size:
            self._add(sequence, (block.first, block.first + size - 1), Category.FORWARD, name)
        return block.first + size

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
            self._nodes.setdefault((pid, node), (self._free_tid, position))
        return True

    def _add(
        self,
        sequence: Sequence,
        span: tuple[int, int],
        category: Category,
        text: str,
        edge: int = -1,
    ) -> None:
        """Add a range around the launches of these positions, on each thread that launched some; up to the launch
        of the kernel `edge` beside them, if there is one.
        """
        first, last = span
        row = int(sequence.row[first])
        is_replayed = (int(self._pid[row]), int(self._node[row])) in self._nodes
        if is_replayed and category is not Category.STEP:
            self._rows.append((first, last + 1, self._process, self._free_tid, category.value, text))
            return
        for thread, begin_at, end_at in self._threads(first, last):
            start_at, end = self._time[begin_at], self._time[end_at] + 1
            if 0 <= edge < len(self._tid) and self._tid[edge] == thread:
                other = self._time[edge]
                start_at, end = (min(start_at, other + 1), end) if edge < first else (start_at, max(end, other))
            self._rows.append((start_at, end, self._process, thread, category.value, text))

    def _threads(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """The threads that launched some positions, each with its first and last of them."""
        if self._changes[first] == self._changes[last]:
            return [(self._tid[first], first, last)] if self._tid[first] != NONE else []
        tid = np.array(self._tid[first : last + 1])
        threads = [int(thread) for thread in np.unique(tid) if thread != NONE]
        places = [first + np.flatnonzero(tid == thread) for thread in threads]
        return [(thread, int(position[0]), int(position[-1])) for thread, position in zip(threads, places, strict=True)]

    def trace(self, info: object) -> Trace:
        """The capture with the ranges added."""
        trace = self._trace
        old = trace.ranges
        count = len(self._rows)
        start, end, pid, tid = (np.array([row[column] for row in self._rows], dtype=np.int64) for column in range(4))
        texts = [*old["text"].astype(str), *(row[5] for row in self._rows)]
        old_categories = (category or Category.USER.value for category in old["category"].astype(str))
        categories = [*old_categories, *(row[4] for row in self._rows)]
        payload = old["payload"].to_numpy(dtype=np.int64, na_value=MISSING_PAYLOAD)
        ranges = make_frame(
            "ranges",
            {
                "start_ns": np.concatenate([old["start_ns"].to_numpy(), start]),
                "end_ns": np.concatenate([old["end_ns"].to_numpy(), end]),
                "pid": np.concatenate([old["pid"].to_numpy(), pid]),
                "tid": np.concatenate([old["tid"].to_numpy(), tid]),
                "nested": np.concatenate([old["nested"].to_numpy(), np.ones(count, dtype=bool)]),
                "left_open": np.concatenate([old["left_open"].to_numpy(), np.zeros(count, dtype=bool)]),
                "payload": np.concatenate([payload, np.full(count, MISSING_PAYLOAD)]),
                **{name: labels(*_codes(values)) for name, values in (("text", texts), ("category", categories))},
            },
        )
        return replace(trace, info=info, ranges=ranges, **self._graph_tables())  # type: ignore[arg-type]

    def _graph_tables(self) -> dict[str, object]:
        if not self._nodes:
            return {}
        trace = self._trace
        nodes = trace.graph_nodes
        keys = list(zip(nodes["pid"].tolist(), nodes["node"].tolist(), strict=True))
        opposite = nodes[np.array([key not in self._nodes for key in keys], dtype=bool)]
        added = np.array([(pid, node, tid, time) for (pid, node), (tid, time) in self._nodes.items()], dtype=np.int64)
        columns = {"pid": added[:, 0], "node": added[:, 1], "tid": added[:, 2], "start_ns": added[:, 3]}
        columns["original"] = np.full(len(added), NONE)
        columns_after = {name: np.concatenate([opposite[name].to_numpy(), values]) for name, values in columns.items()}
        return {"graph_nodes": make_frame("graph_nodes", columns_after), "ops": trace.ops.assign(graph_node=self._node)}


def _codes(values: list[str]) -> tuple[Int64Array, list[str]]:
    names = list(dict.fromkeys(values))
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[value] for value in values], dtype=np.int64), names


def _shared_launch(sequence: Sequence) -> Bools:
    """Which kernels share their launching call with another: those of a graph's replay."""
    call = sequence.call
    same = (call[1:] == call[:-1]) & (call[1:] != NONE)
    shared: Bools = np.append(same, False) | np.append(False, same)
    return shared


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
    return [(start_at, end - 1) for start_at, end in itertools.pairwise(edges)]
