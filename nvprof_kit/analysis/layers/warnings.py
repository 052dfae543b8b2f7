"""What the attribution itself gives reason to doubt, as sentences that tell what to do."""

from __future__ import annotations

import numpy as np

from nvprof_kit.analysis.attribution.attribution import HOW, Attribution
from nvprof_kit.analysis.attribution.nesting import NONE
from nvprof_kit.names import LAYER_CATEGORIES
from nvprof_kit.trace.schema import OP_KINDS, Trace

_NOTABLE = 0.01


def layer_doubts(trace: Trace, owned: Attribution, total_ns: int) -> tuple[str, ...]:
    """Every doubt about the owners of a capture's operations."""
    return (
        *_layers(owned, total_ns),
        *_launches(owned, len(trace.ops)),
        *_lost(trace, owned),
        *_graphs(trace, owned),
        *_steps(trace, owned),
    )


def _layers(owned: Attribution, total_ns: int) -> list[str]:
    if not owned.ranges.is_one_of(LAYER_CATEGORIES).any():
        return [
            "no layer's range in the window, so every operation is outside layers; call "
            "nvprof_kit.annotate_model(model) before it, or say with --rules how the program names its layers"
        ]
    if not total_ns:
        return ["all operations of the capture have no length"]
    return []


def _launches(owned: Attribution, ops: int) -> list[str]:
    if not owned.unlaunched:
        return []
    return [
        f"{owned.unlaunched} of {ops} operations were launched by calls that are not in the capture (before "
        "its window, or dropped), "
        "so they have no layer; begin and end the window at a synchronize"
    ]


def _lost(trace: Trace, owned: Attribution) -> list[str]:
    """Layers that still ran when the last launch was over: the profiler stopped recording CUDA before the end.

    Seen with nsys 2023.4 under a driver of CUDA 13, in captures of a whole run: it gives up at a callback that it
    does not know.
    """
    ranges, pid = owned.ranges, trace.api["pid"].to_numpy()
    is_layer = ranges.is_one_of(LAYER_CATEGORIES)
    late = 0
    for process in np.unique(pid):
        last = trace.api["start_ns"].to_numpy()[pid == process].max()
        late += int(np.count_nonzero(is_layer & (ranges.pid == process) & (ranges.start > last)))
    if late <= _NOTABLE * np.count_nonzero(is_layer):
        return []
    return [
        f"{late} of {np.count_nonzero(is_layer)} ranges of layers begin after the last CUDA launch in the "
        "capture: launches "
        "were lost, so the table is too small; capture a window (profile.sh --step N, --delay, "
        "cudaProfilerStart), or use "
        "an nsys as new as the driver"
    ]


def _graphs(trace: Trace, owned: Attribution) -> list[str]:
    doubts = []
    if owned.uncreated:
        doubts.append(
            f"{owned.uncreated} operations replay CUDA graphs that were built outside the collected window, "
            "so they belong to what launched the replay; let the window hold the graph's capture too"
        )
    whole = np.count_nonzero(trace.ops["kind"].to_numpy() == OP_KINDS.index("graph"))
    if whole and not any("--cuda-graph-trace" in doubt for doubt in trace.info.doubts):
        doubts.append(
            f"{whole} CUDA-graph replays are one row each, whatever layers they ran; record with "
            "--cuda-graph-trace=node"
        )
    return doubts


def _steps(trace: Trace, owned: Attribution) -> list[str]:
    doubts = []
    left_open = int(trace.ranges["left_open"].sum())
    if left_open:
        doubts.append(
            f"{left_open} ranges were still open when the capture ended and were closed there; end the window "
            "between two steps"
        )
    outside = int(np.count_nonzero(owned.step == NONE))
    if len(owned.ranges.steps) and outside > _NOTABLE * len(owned.step):
        doubts.append(
            f"{outside} of {len(owned.step)} operations lie in no step; averages per step hold them, --by step "
            "tells them apart"
        )
    untold = int(np.count_nonzero(owned.how == HOW.index("none")))
    if untold > _NOTABLE * len(owned.how):
        doubts.append(
            f"{untold} of {len(owned.how)} operations were launched where no layer and no phase was open; "
            "wrap the rest of the loop in nvprof_kit.phase(...)"
        )
    return doubts
