"""GPU time per step by layer, phase and kernel class: the samples that two captures are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.attribution.attribution import Attribution
from nvprof_kit.analysis.attribution.intervals import exact_sums
from nvprof_kit.analysis.attribution.operations import Operations, op_owners
from nvprof_kit.analysis.attribution.windows import step_windows
from nvprof_kit.analysis.kernels.classes import CLASSES, KernelClasses, Rule
from nvprof_kit.trace.schema import OP_KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str, str]
"""Layer, phase and kernel class."""

_WARM_UP_OF = 3


@dataclass(frozen=True)
class StepSums:
    """The samples of one capture.

    Attributes:
        steps: Numbers of the steps, ascending.
        wall: Length of each step in ns, the mean over devices, shape ``(len(steps),)``.
        by_key: GPU time in ns by key, a value per step, shape ``(len(steps),)`` each.
        kernels: A row per kernel name: name, kernel_class, count and gpu_ns per step, where (owners and counts, a
            hashable thing that is equal for kernels doing the same work).
        skipped: How many first steps were left out.
    """

    steps: npt.NDArray[np.int64]
    wall: npt.NDArray[np.float64]
    by_key: dict[Key, npt.NDArray[np.int64]]
    kernels: pd.DataFrame
    skipped: int = 0


def step_sums(
    trace: Trace, own_rules: Sequence[Rule] = (), skip: int | None = None, known: Operations | None = None
) -> StepSums:
    """Sum a capture's operations by step and by layer, phase and class; what lies outside these steps is left out.

    Args:
        trace: The capture, with the column ``name``.
        own_rules: Rules for kernel classes, asked before the package's.
        skip: First steps left out; None leaves out one of three or more, in which the profiler's start, compilation
            and autotuning are waited for.
        known: The same operations, where owners and classes are known already.
    """
    operations = Operations(trace, own_rules, known)
    attribution, classes = operations.attribution, operations.classes
    skipped = int(len(attribution.ranges.steps) >= _WARM_UP_OF) if skip is None else skip
    steps = attribution.ranges.steps[skipped:]
    layer, phase = op_owners(attribution)
    inside = np.flatnonzero(attribution.step >= skipped)
    phases = len(phase.categories)
    code = classes.code.astype(np.int64)
    pair = (layer.codes.astype(np.int64) * phases + phase.codes.astype(np.int64)) * len(CLASSES) + code
    keys, which = np.unique(pair[inside], return_inverse=True)
    duration = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[inside]
    cells = exact_sums(which * len(steps) + attribution.step[inside] - skipped, duration, len(keys) * len(steps))
    names = tuple(CLASSES)
    return StepSums(
        steps=steps,
        wall=_wall(trace, attribution, steps),
        by_key={
            (
                str(layer.categories[key // len(CLASSES) // phases]),
                str(phase.categories[key // len(CLASSES) % phases]),
                names[key % len(CLASSES)],
            ): row
            for key, row in zip(keys.tolist(), cells.reshape(len(keys), len(steps)), strict=True)
        },
        kernels=_kernels(trace, classes, pair, inside, max(len(steps), 1)),
        skipped=skipped,
    )


def _wall(trace: Trace, attribution: Attribution, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Length of each step, the mean over its stretches on the devices."""
    windows = step_windows(trace, attribution)
    mine = np.flatnonzero(windows.in_step & np.isin(windows.step, steps))
    place = np.searchsorted(steps, windows.step[mine])
    count = np.bincount(place, minlength=len(steps))
    total = exact_sums(place, (windows.end - windows.start)[mine], len(steps))
    return total / np.maximum(count, 1)


def _kernels(
    trace: Trace, classes: KernelClasses, pair: npt.NDArray[np.int64], inside: npt.NDArray[np.int64], steps: int
) -> pd.DataFrame:
    """Kernels among the operations inside the steps, by name, per step."""
    import pandas as pd

    rows = inside[trace.ops["kind"].to_numpy()[inside] == OP_KINDS.index("kernel")]
    names = trace.ops["name"].cat
    frame = pd.DataFrame(
        {
            "name": names.codes.to_numpy()[rows],
            "code": classes.code[rows],
            "key": pair[rows],
            "count": 1,
            "gpu_ns": (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()[rows],
        }
    )
    by_place = frame.groupby(["name", "code", "key"], sort=True)["count"].sum().reset_index()
    where = by_place.groupby("name").apply(
        lambda group: (len(group), int(group["count"].sum()), tuple(sorted(group["count"] / steps))),
        include_groups=False,
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
