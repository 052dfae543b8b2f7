"""The results of `Capture.ncu_plan` and `NcuReports`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nvprof_kit._analysis.ncu.layers import COLUMNS, KERNEL_COLUMNS, NcuLayersResult
from nvprof_kit._analysis.ncu.plan import COLUMNS as PLAN_COLUMNS
from nvprof_kit._analysis.ncu.plan import Plan
from nvprof_kit._report.by_layer import ByLayer
from nvprof_kit._result.result import Result
from nvprof_kit._result.writer import write_file
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from nvprof_kit._trace.ncu.schema import NcuReport


@dataclass(frozen=True, repr=False, eq=False)
class NcuPlan(Result, Plan):
    """The fewest kernel launches that represent most of the GPU time.

    Attributes:
        section_set: Section set of ncu (``ncu --set``).
        rank: The rank to measure; None for a single-process program.
        memory_gb: GPU memory of the program in GB, to predict the run time.
    """

    section_set: str = field(default="basic", kw_only=True)
    rank: int | None = field(default=None, kw_only=True)
    memory_gb: float = field(default=1.0, kw_only=True)

    columns: ClassVar = {"ncu-plan": PLAN_COLUMNS}
    bars: ClassVar = {"ncu-plan": (("gpu_ns",), ("kernel", "grid"))}

    def __post_init__(self) -> None:
        """Check the section set here: ncu would reject an unknown one only when the script runs."""
        from nvprof_kit._capture.ncu_script import SETS

        if self.section_set not in SETS:
            raise UsageError(f"{self.section_set!r}: no such set of sections; available: {', '.join(SETS)}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be missing or distorted in the capture; each sentence says what to do about it."""
        return self.info.warnings

    def to_frame(self) -> pd.DataFrame:
        """One row per kernel and launch configuration to measure, the costliest first."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """The printed plan: its coverage, its rows, and the next command."""
        from nvprof_kit._report.text.ncu import plan_report

        return plan_report(replace(self, rows=self.frame()), self.section_set, self.memory_gb, self.select)

    def script(self, report: str = "plan") -> str:
        """A shell script that measures only these kernels; run it with ``bash FILE -- python train.py``.

        Args:
            report: Name of the report that ncu writes, without suffix.
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
        """Write `script` to an executable file. It appears complete or not at all.

        Raises:
            UsageError: The file is an input or cannot be written.
        """
        return write_file(path, self.script(Path(path).stem), inputs=self.sources, executable=True)


@dataclass(frozen=True, repr=False, eq=False)
class NcuLayers(Result, NcuLayersResult):
    """Hardware utilization of each layer: compute, memory and Tensor Core throughput, and what limits it.

    Attributes:
        report: The measurements, for the roofline.
        depth: How many levels of the model to print; None for all.
    """

    report: NcuReport = field(kw_only=True)
    depth: int | None = field(default=None, kw_only=True)

    columns: ClassVar = {"ncu-layers": COLUMNS}

    def to_frame(self) -> pd.DataFrame:
        """One row per layer and phase, in model order, ``(none)`` last."""
        return self.rows

    def frame(self) -> pd.DataFrame:
        """The selected rows; if equal blocks are folded, with the columns ``folded_into`` and ``unlike``."""
        return ByLayer(self.rows, self.blocks, self.select).written()

    def parts(self) -> list[RenderableType]:
        """What was measured, and the printed table."""
        from nvprof_kit._report.text.ncu import ncu_layers_report

        rows = ByLayer(self.rows, self.blocks, self.select).read(self.depth, "gpu_ns", self._joined)
        return ncu_layers_report(replace(self, rows=rows), self.select)

    def _joined(self, path: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
        together = self.folded(dict.fromkeys(rows["layer"], path))
        row: dict[str, Any] = together[(together["layer"] == path) & (together["phase"] == phase)].iloc[0].to_dict()
        return row

    def figure(self) -> Figure:
        """Draw the roofline: FLOP/s over arithmetic intensity of each measured kernel."""
        from nvprof_kit._analysis.ncu.roofline import roofline
        from nvprof_kit._report.plots.roofline import roofline_figure

        return roofline_figure(roofline(self.report, self))


@dataclass(frozen=True, repr=False, eq=False)
class NcuKernels(Result):
    """All metrics of all measured kernels, with layer and phase, in base units: ns, byte, hz, %.

    Attributes:
        rows: The table, one row per kernel.
        warnings: What may be missing or misread.
    """

    rows: pd.DataFrame
    warnings: tuple[str, ...] = ()

    columns: ClassVar = {"ncu-kernels": KERNEL_COLUMNS}

    def to_frame(self) -> pd.DataFrame:
        """One row per measured kernel, one column per metric, named as in ncu."""
        return self.rows

    def parts(self) -> list[RenderableType]:
        """The size of the table; it has hundreds of columns, too many for a terminal."""
        rows, columns = self.rows.shape
        return [f"{rows:,} measured kernels with {columns:,} columns each; .to_frame() gives them, .save() writes them"]
