"""The result of `Capture.diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from nvprof_kit._analysis.diff.diff import COLUMNS, DiffResult
from nvprof_kit._analysis.diff.kernels import KERNEL_COLUMNS
from nvprof_kit._result.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False, eq=False)
class Diff(Result, DiffResult):
    """What became slower or faster between two captures.

    Attributes:
        view: The table that `to_frame` returns: ``rows`` or ``kernels``.
    """

    view: str = field(default="rows", kw_only=True)

    columns: ClassVar = {"diff": COLUMNS, "diff-kernels": KERNEL_COLUMNS}
    bars: ClassVar = {"diff": (("change_ns",), ("level", "layer", "kernel_class", "phase"))}

    @property
    def held(self) -> bool:
        """Whether all gates hold; True without gates."""
        return all(outcome.held for outcome in self.gates)

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return "diff-kernels" if self.view == "kernels" else "diff"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """The comparison (``rows``), or the kernels that are new, gone, renamed or launched a different number of times
        (``kernels``).
        """
        return self.kernels if (view or self.view) == "kernels" else self.rows

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The rows of the selected layers; where equal blocks are folded, with ``folded_into`` and ``unlike``."""
        if (view or self.view) == "kernels":
            return self.kernels
        rows = self._among(self.rows)
        if not self.select.fold:
            return rows
        from nvprof_kit._analysis.layers.fold_ranked import mark_ranked
        from nvprof_kit._report.text.diff import ALIKE

        return mark_ranked(rows, "change_ns", ALIKE)

    def _among(self, rows: pd.DataFrame) -> pd.DataFrame:
        if not self.select.where:
            return rows
        kept: pd.DataFrame = rows[[not layer or self.select.matches(layer) for layer in rows["layer"].astype(str)]]
        return kept

    def parts(self) -> list[RenderableType]:
        """The printed report: largest changes, changed kernels, and gates."""
        from nvprof_kit._report.text.diff import diff_report

        rows = self._among(self.rows) if self.view == "rows" else self.rows
        return diff_report(replace(self, rows=rows), self.select.top or 15, self.select.fold)

    def warnings_beside(self, form: str) -> Sequence[str]:
        """As in `Result`; none for ``md``, where the report contains the warnings."""
        return () if form == "md" else super().warnings_beside(form)

    def encode(self, form: str) -> bytes:
        """As in `Result`; ``md`` is the full report, for a pull request comment."""
        if form == "md":
            from nvprof_kit._report.text.diff import diff_markdown

            return diff_markdown(self, self.select.top or 15, self.select.fold).encode("utf-8", "replace")
        return super().encode(form)
