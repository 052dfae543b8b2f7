"""GPU time by module, phase and kernel, for flame graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.operations import Operations, op_owners
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL = ("name",)
"""Optional columns of the operations that stacks need."""


def stacks(operations: Operations, chosen: npt.NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """Sum the operations of each kernel in each layer and phase.

    Args:
        operations: The operations and their attribution, with the columns of `OPTIONAL`.
        chosen: The step instances to include, None for the whole capture.

    Returns:
        Columns layer, phase, kernel, kernel_class, gpu_ops, gpu_self_ns, sorted by layer name, the most expensive
        kernel of a layer first. The rows add up to the durations of all operations.
    """
    import pandas as pd

    ops, attribution = operations.trace.ops, operations.attribution
    layer, phase = op_owners(attribution)
    kernel, kernel_class = ops["name"].cat, operations.classes.code.astype(np.int64)
    spans = (len(layer.categories), len(phase.categories), len(kernel.categories), len(CLASSES))
    rows = slice(None) if chosen is None else np.append(chosen, False)[attribution.step]
    codes = (layer.codes, phase.codes, kernel.codes.to_numpy(), kernel_class)
    key = np.ravel_multi_index(tuple(one[rows].astype(np.int64) for one in codes), tuple(max(one, 1) for one in spans))
    distinct, which = np.unique(key, return_inverse=True)
    place = np.unravel_index(distinct, tuple(max(one, 1) for one in spans))
    duration = (ops["end_ns"] - ops["start_ns"]).to_numpy()[rows]
    names = (layer.categories, phase.categories, kernel.categories, list(CLASSES))
    columns = {
        name: np.asarray(texts, dtype=object)[one]
        for name, texts, one in zip(("layer", "phase", "kernel", "kernel_class"), names, place, strict=True)
    }
    table = pd.DataFrame(
        {
            **columns,
            "gpu_ops": np.bincount(which, minlength=len(distinct)),
            "gpu_self_ns": exact_sums(which, duration, len(distinct)),
        }
    )
    table = table.sort_values("gpu_self_ns", ascending=False, kind="stable")
    order = sorted(range(len(table)), key=list(map(_order, table["layer"], table["phase"])).__getitem__)
    ordered: pd.DataFrame = table.iloc[order].reset_index(drop=True)
    return ordered


def _order(layer: str, phase: str) -> tuple[object, ...]:
    """A sort key that puts block 2 before block 10, and operations outside layers last."""
    parts = tuple((part.isdecimal(), int(part) if part.isdecimal() else part) for part in layer.split("."))
    return layer == NO_LAYER, parts, phase


def frames(layer: str, phase: str, kernel: str) -> tuple[str, ...]:
    """The stack of a row, from its root: the parts of the module path, the phase, the kernel.

    A block number includes the name of its list (``layers``, ``layers.0``), to keep block 0 of two lists apart.
    """
    parts = [layer] if layer == NO_LAYER else layer.split(".")
    named = [f"{parts[place - 1]}.{part}" if part.isdecimal() and place else part for place, part in enumerate(parts)]
    return (*named, phase, kernel)
