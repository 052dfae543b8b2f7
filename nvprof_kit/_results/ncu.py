"""Which kernels to measure with Nsight Compute, and what was measured, as answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._analysis.ncu.layers import NcuLayersResult
from nvprof_kit._analysis.ncu.plan import Plan
from nvprof_kit._report.export.writer import write_file
from nvprof_kit._results.base import Result
from nvprof_kit._results.by_layer import ByLayer
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from nvprof_kit._trace.ncu.schema import NcuReport


@dataclass(frozen=True, repr=False, eq=False)
class NcuPlan(Result, Plan):
    """The fewest kernels that stand for most of the GPU time.

    Attributes:
        section_set: ncu's set of sections.
        rank: Of a program of several ranks the one that is measured; None for a program of one.
        memory_gb: GPU memory of the program, for the prediction of time.
    """

    section_set: str = field(default="basic", kw_only=True)
    rank: int | None = field(default=None, kw_only=True)
    memory_gb: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        """Ncu refuses a set that it does not know only where it is started, which is late."""
        from nvprof_kit._capture.ncu_script import SETS

        if self.section_set not in SETS:
            raise UsageError(f"{self.section_set!r}: no such set of sections; there are {', '.join(SETS)}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the capture says may be missing or distorted."""
        return self.info.warnings

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "ncu-plan"

    def to_frame(self) -> pd.DataFrame:
        """A row per kernel and launch configuration to measure, the costliest first."""
        return self.rows

    def _bars(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("gpu_ns",), ("kernel", "grid")

    def parts(self) -> list[RenderableType]:
        """What the plan covers, its rows, and what to do next."""
        from nvprof_kit._report.text.ncu import plan_report

        return plan_report(replace(self, rows=self.frame()), self.section_set, self.memory_gb, self.select.top)

    def script(self, report: str = "plan") -> str:
        """The shell script that measures just these kernels: ``bash FILE -- python train.py``.

        Args:
            report: What the file that ncu leaves is to be called, without its suffix.
        """
        from nvprof_kit._capture.ncu_script import NcuScript, ncu_script
        from nvprof_kit._report.text.ncu import plan_lines

        about = ["Written by nvprof-kit ncu plan.", *plan_lines(self, self.section_set, self.memory_gb)]
        return ncu_script(
            NcuScript(
                names=self.names,
                invocations=self.invocations,
                about=about,
                section_set=self.section_set,
                rank=self.rank,
                own_window=self.info.own_window,
                report=report,
            )
        )

    def save_script(self, path: str | Path) -> Path:
        """Write `script` to a file that can be run, whole or not at all.

        Raises:
            UsageError: The file is the capture's, or cannot be written.
        """
        return write_file(path, self.script(Path(path).stem), inputs=self.sources, executable=True)


@dataclass(frozen=True, repr=False, eq=False)
class NcuLayers(Result, NcuLayersResult):
    """What each layer did to the GPU: how busy it kept compute, memory and tensor cores, and what bound it.

    Attributes:
        report: What was measured, for the roofline.
        depth: Levels of the model that are printed; None for all.
    """

    report: NcuReport = field(kw_only=True)
    depth: int | None = field(default=None, kw_only=True)

    has_plot: ClassVar[bool] = True

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "ncu-layers"

    def to_frame(self) -> pd.DataFrame:
        """A row per layer and phase, in the model's order, ``(none)`` last."""
        return self.rows

    def frame(self) -> pd.DataFrame:
        """The rows that are wanted; where equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        return ByLayer(self.rows, self.blocks, self.select).written()

    def parts(self) -> list[RenderableType]:
        """What was measured, and the table."""
        from nvprof_kit._report.text.ncu import ncu_layers_report

        rows = ByLayer(self.rows, self.blocks, self.select).read(self.depth, "gpu_ns", self._joined)
        return ncu_layers_report(replace(self, rows=rows), self.select.top)

    def _joined(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        together = self.folded(dict.fromkeys(rows["layer"], path))
        row: dict[str, Any] = together[(together["layer"] == path) & (together["phase"] == phase)].iloc[0].to_dict()
        return row

    def figure(self) -> Figure:
        """The roofline."""
        from nvprof_kit._analysis.ncu.roofline import roofline
        from nvprof_kit._report.plots.roofline import roofline_figure

        return roofline_figure(roofline(self.report, self))


@dataclass(frozen=True, repr=False, eq=False)
class NcuKernels(Result):
    """Every metric of every measured kernel, a row each, with its layer and phase; in base units: ns, byte, hz, %.

    Attributes:
        rows: The table.
        warnings: Sentences on what may be missing or misread.
    """

    rows: pd.DataFrame
    warnings: tuple[str, ...] = ()

    @property
    def schema(self) -> str:
        """Name of the schema of the json answer."""
        return "ncu-kernels"

    def to_frame(self) -> pd.DataFrame:
        """A row per measured kernel, a column per metric by its full name."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """How much there is: a row has hundreds of columns, which no terminal shows."""
        rows, columns = self.rows.shape
        return [f"{rows:,} measured kernels with {columns:,} columns each; .to_frame() gives them, .save() writes them"]
