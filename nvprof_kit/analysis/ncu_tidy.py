"""Every metric of every measured kernel in one table, with the layer and phase it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvprof_kit.analysis.ncu_owners import own_layers
from nvprof_kit.trace.ncu_schema import NcuReport

if TYPE_CHECKING:
    import pandas as pd


def tidy(report: NcuReport) -> pd.DataFrame:
    """A row per measured kernel: id, pid, device, kernel, grid, block, layer, phase, and every metric by its full name,
    in base units.
    """
    import pandas as pd

    owners = own_layers(report.kernels).owners
    who = report.kernels[["id", "pid", "device", "kernel", "grid", "block"]]
    who = who.assign(layer=[layer for layer, _ in owners], phase=[phase for _, phase in owners])
    table: pd.DataFrame = pd.concat([who, report.metrics, report.texts], axis=1)
    return table
