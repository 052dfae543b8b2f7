"""Limits the number of rows in an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.selection import Selection

if TYPE_CHECKING:
    import pandas as pd

_COSTS = (
    "gpu_self_ns", "gpu_busy_ns", "gpu_ns", "busy_ns", "gpu_total_ns", "wall_ns", "idle_ns", "saves_ns", "wait_ns",
    "saved_ns", "ns", "new_ns", "excess_ns", "bytes", "peak_bytes", "cuda_total_ns", "cpu_total_ns",
)  # fmt: skip
"""Columns that rank rows by cost; the first one in the table is used."""


@dataclass(frozen=True)
class Bounded:
    """Rows after a limit.

    Attributes:
        rows: The kept rows.
        all_rows: Number of rows before the limit.
        bound: ``max_rows`` or ``budget``.
        kept: Positions of the kept rows.
    """

    rows: pd.DataFrame
    all_rows: int
    bound: str = "max_rows"
    kept: str = "all"

    @property
    def left_out(self) -> int:
        """Number of omitted rows."""
        return self.all_rows - len(self.rows)

    @property
    def truncated(self) -> dict[str, Any] | None:
        """What was omitted; None if nothing."""
        if not self.left_out:
            return None
        return {"rows_left_out": self.left_out, "rows": self.all_rows, "bound": self.bound, "kept": self.kept}

    @property
    def sentence(self) -> str:
        """The same as a sentence."""
        option = self.bound.replace("_", "-")
        return f"{self.left_out:,} of {self.all_rows:,} rows are left out (--{option}); here are {self.kept}"


def bounded(table: pd.DataFrame, select: Selection, rows: int | None = None, bound: str = "max_rows") -> Bounded:
    """Apply a limit: keep the costliest rows in their order, or the first rows if they are sorted.

    Args:
        table: All rows.
        select: The limit, and whether the rows are sorted.
        rows: Number of rows to keep, instead of `Selection.max_rows`.
        bound: Name of the limit.
    """
    most = select.max_rows if rows is None else rows
    if most is None or len(table) <= most:
        return Bounded(table, len(table))
    cost = next((name for name in _COSTS if name in table), None)
    if select.sort or cost is None:
        return Bounded(table.head(most), len(table), bound, "the first rows")
    order = table[cost].astype(float).fillna(0).reset_index(drop=True).sort_values(ascending=False, kind="stable")
    kept = table.iloc[sorted(order.index[:most].tolist())]
    return Bounded(kept, len(table), bound, f"the rows with the largest {cost}")
