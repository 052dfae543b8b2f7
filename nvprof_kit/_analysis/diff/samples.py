"""GPU time per step by layer, phase and kernel class: the samples that two captures are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import begins, exact_sums
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import Operations, op_owners
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.attribution.warm_up import choose_steps, left_out_warnings
from nvprof_kit._analysis.attribution.windows import step_windows
from nvprof_kit._analysis.kernels.classes import CLASSES, KernelClasses, Rule
from nvprof_kit._trace.schema import OP_KINDS, Trace
from nvprof_kit.issues import as_issues

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str, str]
"""Layer, phase and kernel class."""


@dataclass(frozen=True)
class StepSums:
    """The samples of one capture.

    Attributes:
        steps: Number of each step, in order of time; numbers may repeat.
        wall: Length of each step in ns, the mean over devices, shape ``(len(steps),)``.
        by_key: GPU time in ns by key, a value per step, shape ``(len(steps),)`` each.
        kernels: A row per kernel name: name, kernel_class, count and gpu_ns per step, where (owners and counts, a
            hashable thing that is equal for kernels doing the same work).
        left_out: A sentence for each warm-up step that says whether it was compared.
    """

    steps: npt.NDArray[np.int64]
    wall: npt.NDArray[np.float64]
    by_key: dict[Key, npt.NDArray[np.int64]]
    kernels: pd.DataFrame
    left_out: tuple[str, ...] = ()


def step_sums(
    trace: Trace,
    own_rules: Sequence[Rule] = (),
    options: StepOptions = ALL_STEPS,
    least: int = 0,
    known: Operations | None = None,
) -> StepSums:
    """Sum a capture's operations by step and by layer, phase and class; operations outside these steps are left out.

    Args:
        trace: The capture, with the column ``name``.
        own_rules: Rules for kernel classes, tried before the package's.
        options: Which steps, by default all but warm-up.
        least: The number of steps needed; if there are fewer without warm-up, warm-up steps are included.
        known: The same operations, if their owners and classes are already known.
    """
    operations = Operations(trace, own_rules, known)
    attribution, classes = operations.attribution, operations.classes
    choice = choose_steps(trace, attribution, options)
    left_out = left_out_warnings(choice)
    if not choice.asked and choice.count < least:
        choice = replace(choice, shown=np.ones_like(choice.shown))
        left_out = as_issues(
            "warm-up",
            (f"{reason}: warm-up, compared nevertheless, because there are few steps" for reason in choice.left_out),
            "note",
        )
    steps = attribution.ranges.steps[choice.shown]
    column = np.append(np.where(choice.shown, np.cumsum(choice.shown) - 1, NONE), NONE)
    of_op = column[attribution.step]
    layer, phase = op_owners(attribution)
    inside = np.flatnonzero(of_op >= 0)
    phases = len(phase.categories)
    code = classes.code.astype(np.int64)
    pair = (layer.codes.astype(np.int64) * phases + phase.codes.astype(np.int64)) * len(CLASSES) + code
    keys, step_row = np.unique(pair[inside], return_inverse=True)
    duration = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[inside]
    cells = exact_sums(step_row * len(steps) + of_op[inside], duration, len(keys) * len(steps))
    names = tuple(CLASSES)
    return StepSums(
        steps=steps,
        wall=_wall(trace, attribution, column, len(steps)),
        by_key={
            (
                str(layer.categories[key // len(CLASSES) // phases]),
                str(phase.categories[key // len(CLASSES) % phases]),
                names[key % len(CLASSES)],
            ): row
            for key, row in zip(keys.tolist(), cells.reshape(len(keys), len(steps)), strict=True)
        },
        kernels=_kernels(trace, classes, pair, inside, max(len(steps), 1)),
        left_out=left_out,
    )


def _wall(trace: Trace, attribution: Attribution, column: Int64Array, steps: int) -> npt.NDArray[np.float64]:
    """Length of each step, the mean over its stretches on the devices.

    Args:
        trace: The capture.
        attribution: Its steps.
        column: For each instance of a step its place among the compared ones, or `NONE`; with `NONE` appended.
        steps: How many steps are compared.
    """
    windows = step_windows(trace, attribution)
    index = column[windows.instance]
    rows_of_step = np.flatnonzero(index >= 0)
    count = np.bincount(index[rows_of_step], minlength=steps)
    total = exact_sums(index[rows_of_step], (windows.end - windows.start)[rows_of_step], steps)
    return total / np.maximum(count, 1)


def _kernels(
    trace: Trace, classes: KernelClasses, pair: npt.NDArray[np.int64], inside: npt.NDArray[np.int64], steps: int
) -> pd.DataFrame:
    """Kernels, or operators where there is no GPU, among the operations inside the steps, by name, per step."""
    import pandas as pd

    kinds = [OP_KINDS.index("kernel"), OP_KINDS.index("operator")]
    rows = inside[np.isin(trace.ops["kind"].to_numpy()[inside], kinds)]
    names = trace.ops["name"].cat
    frame = pd.DataFrame(
        {
            "name": names.codes.to_numpy()[rows],
            "code": classes.code[rows],
            "key": pair[rows],
            "count": begins(trace.ops)[rows].astype(np.int64),
            "gpu_ns": (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[rows],
        }
    )
    by_place = frame.groupby(["name", "code", "key"], sort=True)["count"].sum().reset_index()
    where = by_place.groupby("name")["count"].apply(
        lambda counts: (len(counts), int(counts.sum()), tuple(sorted(counts / steps)))
    )
    table = frame.groupby(["name", "code"], sort=False)[["count", "gpu_ns"]].sum().reset_index()
    made: pd.DataFrame = pd.DataFrame(
        {
            "name": [str(names.categories[code]) for code in table["name"]],
            "kernel_class": [tuple(CLASSES)[code] for code in table["code"]],
            "count": table["count"] / steps,
            "gpu_ns": table["gpu_ns"] / steps,
            "where": where.reindex(table["name"]).tolist() if len(table) else [],
        }
    )
    return made
