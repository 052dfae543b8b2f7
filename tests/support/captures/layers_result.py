"""A per-layer table made by hand: a model with two blocks and a head, two steps, and an optimizer outside layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.steps import StepChoice
from nvprof_kit._analysis.layers.layers import Layers, Summary
from nvprof_kit._trace.schema import CaptureInfo

MS = 1_000_000

# layer, phase, parent, depth, calls, forward, backward, recompute, other, total, self, cpu (in ms over both steps)
_TREE = [
    ("model", "", "", 0, 2, 12, 18, 0, 0, 30, 0, 40),
    ("model.layers.0", "", "model", 1, 2, 6, 10, 0, 0, 16, 4, 20),
    ("model.layers.0.attn", "", "model.layers.0", 2, 2, 5, 7, 0, 0, 12, 12, 15),
    ("model.layers.1", "", "model", 1, 2, 4, 6, 0, 0, 10, 10, 12),
    ("lm_head", "", "model", 1, 2, 2, 2, 0, 0, 4, 4, 3),
    ("(none)", "forward", "", 0, 2, 0, 0, 0, 2, 2, 2, 44),
    ("(none)", "optimizer", "", 0, 2, 0, 0, 0, 8, 8, 8, 1),
    ("(none)", "other", "", 0, 0, 0, 0, 0, 0, 0, 0, 0),
]
_TREE_COLUMNS = ["layer", "phase", "parent", "depth", "calls"]
_TREE_TIMES = ["forward_ns", "backward_ns", "recompute_ns", "other_ns", "total_ns", "self_ns", "cpu_ns"]
_TREE_ALL = [*_TREE_TIMES[:-1], "comm_ns", "cpu_ns"]

# step, layer, phase, own time in ms
_ROWS: list[tuple[int | None, str, str, int]] = [
    (0, "model.layers.0", "forward", 1),
    (0, "model.layers.0", "backward", 2),
    (0, "model.layers.0.attn", "forward", 3),
    (0, "model.layers.0.attn", "backward", 3),
    (0, "model.layers.1", "backward", 5),
    (0, "lm_head", "forward", 2),
    (0, "(none)", "optimizer", 4),
    (1, "model.layers.0", "backward", 1),
    (1, "model.layers.0.attn", "forward", 2),
    (1, "model.layers.0.attn", "backward", 4),
    (1, "model.layers.1", "forward", 5),
    (1, "lm_head", "backward", 2),
    (1, "(none)", "forward", 2),
    (1, "(none)", "optimizer", 3),
    (None, "(none)", "optimizer", 1),
]


def tree() -> pd.DataFrame:
    """The tree, in nanoseconds."""
    made = pd.DataFrame.from_records(_TREE, columns=[*_TREE_COLUMNS, *_TREE_TIMES])
    made[_TREE_TIMES] *= MS
    made["comm_ns"] = 0
    return made[[*_TREE_COLUMNS, *_TREE_ALL]]


def rows_by_step() -> pd.DataFrame:
    """The rows by step, in nanoseconds; they add up to the tree's 40 ms."""
    parents = {layer: parent for layer, _, parent, *_ in _TREE}
    times: dict[tuple[int | None, str, str], list[int]] = {}
    for step, layer, phase, own in _ROWS:
        times.setdefault((step, layer, phase), [0, 0])[0] += own
        around = layer
        while around:
            times.setdefault((step, around, phase), [0, 0])[1] += own
            around = parents[around]
    columns = ["step", "layer", "phase", "gpu_self_ns", "gpu_total_ns"]
    made = pd.DataFrame([(*key, *ns) for key, ns in times.items()], columns=columns).astype({"step": "Int64"})
    made.insert(1, "instance", made["step"])
    made[columns[-2:]] *= MS
    return made


def layers_result(**changes: Any) -> Layers:
    """The result, with some of its attributes replaced."""
    result = Layers(
        rows=rows_by_step(),
        tree=tree(),
        summary=Summary(
            total_ns=40 * MS,
            capture_ns=40 * MS,
            outside_ns=0,
            left_out_ns=0,
            comm_ns=0,
            layer_ns=30 * MS,
            work_ns=40 * MS,
            wall_ns=50 * MS,
            busy_ns=40 * MS,
            ops=1234,
            steps=2,
            all_steps=2,
            layers=5,
            by_how={"launch": 40 * MS},
            loop_layer_share=0.9375,
        ),
        warnings=("nsys dropped 3 events; record less at once",),
        steps=StepChoice(np.ones(2, dtype=bool)),
        info=CaptureInfo(path="run.sqlite", tool="nsys 2023.4.4.54", gpus=("NVIDIA H200",)),
    )
    return replace(result, **changes)
