"""Which rows a bound on an answer leaves."""

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
"""What tells the costliest rows of a table: the first of these columns that it has."""


@dataclass(frozen=True)
class Bounded:
    """Rows of which a bound may have left some out.

    Attributes:
        rows: The rows that are left.
        all_rows: How many there were.
        bound: ``max_rows`` or ``budget``.
        kept: Which rows are left.
    """

    rows: pd.DataFrame
    all_rows: int
    bound: str = "max_rows"
    kept: str = "all"

    @property
    def left_out(self) -> int:
        """Rows that are not there."""
        return self.all_rows - len(self.rows)

    @property
    def truncated(self) -> dict[str, Any] | None:
        """What was left out; None where nothing was."""
        if not self.left_out:
            return None
        return {"rows_left_out": self.left_out, "rows": self.all_rows, "bound": self.bound, "kept": self.kept}

    @property
    def sentence(self) -> str:
        """The same for a person."""
        option = self.bound.replace("_", "-")
        return f"{self.left_out:,} of {self.all_rows:,} rows are left out (--{option}); here are {self.kept}"


def bounded(table: pd.DataFrame, select: Selection, rows: int | None = None, bound: str = "max_rows") -> Bounded:
    """The rows that a bound leaves: the costliest, in their order; the first of rows that were sorted.

    Args:
        table: All rows.
        select: The bound, and whether the rows were sorted.
        rows: How many to leave, in place of `Selection.max_rows`.
        bound: What bounds them.
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
