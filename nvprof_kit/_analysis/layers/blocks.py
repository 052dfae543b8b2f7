"""The layers of a capture for folding, compared by compute time: communication includes waiting for other ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.operations import Operations, op_owners
from nvprof_kit._analysis.layers.fold import Blocks
from nvprof_kit._analysis.layers.order import layer_parents


def computing_blocks(operations: Operations, wanted: npt.NDArray[np.bool_]) -> Blocks:
    """The layers with their compute times, as `nvprof_kit._analysis.layers.fold.fold` compares them.

    Args:
        operations: The operations; communication is excluded if their names were read.
        wanted: The operations to include, shape ``(n,)``.
    """
    import pandas as pd

    trace = operations.trace
    computing = wanted & ~operations.classes.is_a("comm") if "name" in trace.ops else wanted
    layer, phase = op_owners(operations.attribution)
    frame = pd.DataFrame({"layer": layer, "phase": phase, "ns": trace.ops["end_ns"] - trace.ops["start_ns"]})
    own = frame[computing].groupby(["layer", "phase"], observed=True)["ns"].sum()
    parents = layer_parents(operations.attribution.ranges)
    return Blocks.of({(str(one), str(of)): float(ns) for (one, of), ns in own.items()}, parents, parents)
