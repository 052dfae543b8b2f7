"""Warnings about uncertain attribution, with instructions to fix it."""

from __future__ import annotations

import numpy as np

from nvprof_kit._analysis.attribution.attribution import HOW, Attribution
from nvprof_kit._analysis.attribution.joins import join_warnings
from nvprof_kit._analysis.attribution.nesting import NONE
from nvprof_kit._analysis.attribution.warm_up import StepChoice
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES

NOTABLE = 0.01
"""A smaller share of the time changes no decision, and is told in the header alone."""


def layer_warnings(trace: Trace, attribution: Attribution, choice: StepChoice, total_ns: int) -> tuple[Issue, ...]:
    """All warnings about the owners of a capture's operations."""
    return (
        *_layers(attribution, total_ns),
        *join_warnings(trace, attribution.ranges, attribution.unjoined),
        *_lost(trace, attribution),
        *_graphs(trace, attribution),
        *_outside(trace, attribution, choice),
    )


def _layers(attribution: Attribution, total_ns: int) -> list[Issue]:
    if not attribution.ranges.is_one_of(LAYER_CATEGORIES).any():
        text = (
            "no layer's range in the window, so every operation is outside layers; call "
            "nvprof_kit.annotate_model(model) before it, or say with --rules how the program names its layers"
        )
        return [Issue("no-layers", "error", 1.0, text)]
    if not total_ns and len(attribution.how):
        return [Issue("no-time", "error", 1.0, "all operations of the capture have no length")]
    return []


def _lost(trace: Trace, attribution: Attribution) -> list[Issue]:
    """Warn about layers that still ran after the last launch: the profiler stopped recording CUDA before the end.

    Seen with nsys 2023.4 on a CUDA 13 driver, in captures of a whole run: nsys stops at a callback that it does not
    know.
    """
    ranges, pid = attribution.ranges, trace.api["pid"].to_numpy()
    is_layer = ranges.is_one_of(LAYER_CATEGORIES)
    later = 0
    for process in np.unique(pid):
        last = trace.api["start_ns"].to_numpy()[pid == process].max()
        later += int(np.count_nonzero(is_layer & (ranges.pid == process) & (ranges.start > last)))
    count = np.count_nonzero(is_layer)
    if later <= NOTABLE * count:
        return []
    text = (
        f"{later} of {count} ranges of layers begin after the last CUDA launch in the capture: launches were lost, so "
        "the table is too small; capture a window (profile.sh --step N, --delay, cudaProfilerStart), or use an nsys "
        "as new as the driver"
    )
    return [Issue("lost-launches", "error", later / count, text)]


def _graphs(trace: Trace, attribution: Attribution) -> list[Issue]:
    graphs = np.count_nonzero(trace.ops["kind"].to_numpy() == OP_KINDS.index("graph"))
    if not graphs or any(issue.code == "whole-graphs" for issue in trace.info.warnings):
        return []
    text = (
        f"{graphs} CUDA-graph replays are one row each, whatever layers they ran; record with --cuda-graph-trace=node"
    )
    return [Issue("whole-graphs", "warning", graphs / len(trace.ops), text)]


def _outside(trace: Trace, attribution: Attribution, choice: StepChoice) -> list[Issue]:
    """Operations that no step, layer or phase launched."""
    duration = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()
    is_shown = choice.of_ops(attribution)
    issues = []
    outside_ns = int(duration[(attribution.step == NONE) & ~is_shown].sum())
    if not choice.asked and outside_ns:
        share = outside_ns / duration.sum()
        text = f"{100 * share:.1f} % of the time is outside steps and left out; --steps all includes it"
        issues.append(Issue("outside-steps", "note", share, text))
    whole_graph = trace.ops["kind"].to_numpy() == OP_KINDS.index("graph")
    nowhere_ns = int(duration[is_shown & (attribution.how == HOW.index("none")) & ~whole_graph].sum())
    if nowhere_ns:
        share = nowhere_ns / duration[is_shown].sum()
        text = (
            f"{100 * share:.1f} % of the time was launched outside all layers and phases; wrap the rest of the loop in "
            "nvprof_kit.phase(...)"
        )
        issues.append(Issue("unattributed", "note", share, text))
    return issues
