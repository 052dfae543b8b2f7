"""Attribution: the layer, phase and step of every operation, and how each was found.

An operation belongs to the innermost range open on the launching thread when its launching API call starts; the two
are joined by process and correlation id. An operation of a CUDA graph replay belongs to the range that was open when
its node was created during graph capture, and to the step that launched the replay. Operations that an autograd
thread launches outside every range take their phase and step from the range open on another thread of the process at
that moment, if exactly one other thread has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Integers, nest
from nvprof_kit._analysis.attribution.ranges import OwnerLookup, Ranges, understand
from nvprof_kit._analysis.kernels.classes import CLASSES, KernelClasses, Rule, classify, is_comm
from nvprof_kit._trace.files.process import return_freed_memory
from nvprof_kit._trace.schema import Trace, read_tables
from nvprof_kit.issues import Issue
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd


Int32Array = npt.NDArray[np.int32]

HOW = ("launch", "graph node", "other thread", "none", "structure")
"""How an operation was attributed; values of `Attribution.how`."""

_LAUNCH, _GRAPH_NODE, _OTHER_THREAD, _UNATTRIBUTED, _STRUCTURE = range(5)
_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class Attribution:
    """The owner of every operation (shape ``(n,)`` each, in the order of `Trace.ops`).

    Attributes:
        ranges: What the ranges mean.
        launch_range: The innermost range open on the launching thread at the launch, or `NONE`.
        layer_range: The range of the owning layer, or `NONE`.
        phase: Index into `Ranges.phases`: the layer's phase, or outside layers the phase range's text or ``other``.
        step: The step instance that it belongs to, an index into `Ranges.steps`, or `NONE`.
        how: Index into `HOW`.
        replay: Launch of the CUDA graph replay that ran it, an index into `Trace.api`, if its owner comes from the
            graph; else `NONE`. Not to be written to.
    """

    ranges: Ranges
    launch_range: Int32Array
    layer_range: Int32Array
    phase: Int32Array
    step: Int32Array
    how: npt.NDArray[np.int8]
    replay: Int32Array

    @property
    def phases(self) -> tuple[str, ...]:
        """The distinct phases."""
        return self.ranges.phases

    @cached_property
    def owners(self) -> tuple[pd.Categorical, pd.Categorical]:
        """Layer and phase of each operation."""
        return layer_column(self.ranges, self.layer_range), _categorical(self.phase, self.phases)


def attribute(trace: Trace, ranges: Ranges | None = None) -> Attribution:
    """Find the owner of every operation of a capture. See the module docstring for the rules.

    Args:
        trace: The capture.
        ranges: What its ranges mean; they are understood if it is not given.
    """
    ranges = understand(trace) if ranges is None else ranges
    owners, pid = OwnerLookup(ranges), trace.ops["pid"].to_numpy()
    calls, nodes = trace.launching_calls, trace.created_nodes
    # index `NONE` finds what is appended
    launched, created = (
        (np.append(table["tid"].to_numpy(), NONE), np.append(table["start_ns"].to_numpy(), 0))
        for table in (trace.api, trace.graph_nodes)
    )
    phase_of_range = np.append(ranges.phase, ranges.phases.index(NO_PHASE)).astype(np.int32)
    inner_ranges, layers, phases, steps = np.empty((4, len(pid)), dtype=np.int32)
    hows = np.empty(len(pid), dtype=np.int8)
    replays = np.broadcast_to(np.int32(NONE), len(pid))
    if (nodes >= 0).any():
        replays = replays.copy()

    # in blocks, whose arrays stay in the CPU cache
    for block in (slice(low, low + _BLOCK) for low in range(0, len(pid), _BLOCK)):
        call, node = calls[block], nodes[block]
        inner, layer, phase, step, is_elsewhere = owners.at(pid[block], *(column[call] for column in launched))
        how = np.select([is_elsewhere, phase >= 0], [_OTHER_THREAD, _LAUNCH], _UNATTRIBUTED)
        replayed = np.flatnonzero(node >= 0)
        if len(replayed):
            creator = owners.at(pid[block][replayed], *(column[node[replayed]] for column in created))
            has_owner = creator.phase >= 0
            rows = replayed[has_owner]
            layer[rows], phase[rows], how[rows] = creator.layer[has_owner], creator.phase[has_owner], _GRAPH_NODE
            replays[block][rows] = call[rows]
        layers[block], phases[block], steps[block], hows[block] = layer, phase_of_range[phase], step, how
        inner_ranges[block] = inner
    if trace.info.evidence == HOW[_STRUCTURE]:
        hows[layers >= 0] = _STRUCTURE
    return Attribution(ranges, inner_ranges, layers, phases, steps, hows, replays)


OWNER_COLUMNS = read_tables("nvprof_kit._analysis.attribution")["operations"]
"""The columns that `attributed` adds to those of `nvprof_kit._trace.schema.OPS`."""


class Operations:
    """The operations of a capture.

    Args:
        trace: The capture, with the operations' names.
        own_rules: The user's rules for kernel classes, tried before the built-in ones.
        operations: The same operations, to reuse their attribution and classes across several reports.

    Attributes:
        is_last_question: Whether the next question is the last one, which may `forget` what it has used.
    """

    def __init__(self, trace: Trace, own_rules: Sequence[Rule] = (), operations: Operations | None = None) -> None:
        self.trace, self._own_rules, self._operations = trace, own_rules, operations
        self.is_last_question: bool = operations is not None and operations.is_last_question

    def forget(self, **columns: Sequence[str]) -> None:
        """In the last question, free columns of these tables that the rest of it does not need."""
        if self.is_last_question:
            for table, names in columns.items():
                if (frame := getattr(self.trace, table)) is not None:
                    for name in names:
                        del frame[name]

    def return_memory(self) -> None:
        """In the last question, return to the system what was freed."""
        if self.is_last_question:
            return_freed_memory()

    @cached_property
    def ranges(self) -> Ranges:
        """What the ranges of the capture mean."""
        return understand(self.trace) if self._operations is None else self._operations.ranges

    @cached_property
    def attribution(self) -> Attribution:
        """The owner of each operation."""
        return attribute(self.trace, self.ranges) if self._operations is None else self._operations.attribution

    @cached_property
    def classes(self) -> KernelClasses:
        """The class of each operation."""
        return classify(self.trace.ops, self._own_rules) if self._operations is None else self._operations.classes

    @cached_property
    def is_comm(self) -> Bools:
        """Which operations are of the class ``comm``, which is known before `classes`."""
        return is_comm(self.trace.ops, self._own_rules) if self._operations is None else self._operations.is_comm


def layer_column(ranges: Ranges, layer_range: Integers) -> pd.Categorical:
    """The layer of each of these ranges, `NO_LAYER` for `NONE`."""
    texts = [named.text for named in ranges.names]
    return _categorical(np.append(ranges.name, len(texts))[layer_range], [*texts, NO_LAYER])


def range_owners(ranges: Ranges) -> tuple[pd.Categorical, pd.Categorical]:
    """Layer and phase of each range, with those of range `NONE` appended."""
    layer = np.append(ranges.layer_range, NONE)
    owner = np.where(layer >= 0, layer, np.append(ranges.phase_range, NONE))
    phase = np.append(ranges.phase, ranges.phases.index(NO_PHASE))[owner]
    return layer_column(ranges, layer), _categorical(phase, ranges.phases)


def _categorical(codes: Any, names: Any) -> pd.Categorical:
    """A categorical column from codes into names that can contain duplicates."""
    from nvprof_kit._trace.frames import labels

    categories: pd.Categorical = labels(np.asarray(codes), list(names))
    return categories


def attributed(operations: Operations, ops: pd.DataFrame) -> pd.DataFrame:
    """Add the owners to a table of operations.

    Args:
        operations: The operations and their attribution.
        ops: Their table, in the same order.

    Returns:
        The table with the additional columns `OWNER_COLUMNS`.
    """
    import pandas as pd

    attribution = operations.attribution
    layer, phase = attribution.owners
    step = np.append(attribution.ranges.steps, 0)[attribution.step]
    return ops.assign(
        layer=layer,
        phase=phase,
        step=pd.arrays.IntegerArray(step.astype(np.int64), attribution.step == NONE),
        kernel_class=_categorical(operations.classes.code, list(CLASSES)),
        how=_categorical(attribution.how, list(HOW)),
    )


def join_warnings(trace: Trace, ranges: Ranges) -> tuple[Issue, ...]:
    """What does not fit together in a capture: operations without a launch or a node, and ranges that do not nest."""
    durations = trace.ops["end_ns"].to_numpy() - trace.ops["start_ns"].to_numpy()
    is_unlaunched = trace.launching_calls == NONE
    unlaunched_ns, total_ns = int(durations[is_unlaunched].sum()), int(durations.sum())
    unlaunched, count = int(np.count_nonzero(is_unlaunched)), len(durations)
    is_replay = trace.ops["graph_node"].to_numpy() >= 0
    uncreated = int(np.count_nonzero(is_replay & (trace.created_nodes == NONE)))
    open_count = int(trace.ranges["left_open"].sum())
    crossing, share = 0, 0.0
    is_recorded = trace.info.tool.startswith("nsys") and trace.operators is None and "," not in trace.info.domain
    if is_recorded and ranges.crossing:  # those of operators can cross, and those of PyTorch traces do by rounding
        nested = trace.ranges[trace.ranges["nested"]]
        start, end, tid = (nested[name].to_numpy() for name in ("start_ns", "end_ns", "tid"))
        parent = nest(start, end, tid).parent
        crossing = int(np.count_nonzero((parent >= 0) & (end > end[parent])))
        share = crossing / max(len(start), 1)
    counts = (
        ("unlaunched", unlaunched_ns / max(total_ns, 1), unlaunched),
        ("uncreated", uncreated / max(count, 1), uncreated),
        ("open-ranges", open_count / max(len(trace.ranges), 1), open_count),
        ("crossing-ranges", share, crossing),
    )
    facts = {"total": count, "ms": unlaunched_ns / 1e6}
    return tuple(Issue.of(code, share, count=number, **facts) for code, share, number in counts if number)
