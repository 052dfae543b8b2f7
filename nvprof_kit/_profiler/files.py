"""Files that `LayerProfiler` writes for a window to the rank's folder, named as in ProfilerTools."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit.names import Category, step_number

if TYPE_CHECKING:
    from nvprof_kit._analysis.layers.profile import LayerProfile
    from nvprof_kit._instrument.memory.allocator import Boundary
    from nvprof_kit._trace.schema import Trace


class WindowFiles:
    """The files of one window.

    Args:
        folder: The existing folder of the rank.
        name: Prefix of the file names.
        rank: The rank.
    """

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        self.folder, self.name, self._rank = folder, name, rank

    def path(self, table: str) -> Path:
        """The path of one of the window's files."""
        return self.folder / f"{self.name}_{table}"

    @property
    def trace(self) -> Path:
        """The path of the trace."""
        return self.path("trace.json.gz")

    def read(
        self, kinds: Mapping[str, str], boundaries: Sequence[Boundary], *, last_step: int | None, draw: bool
    ) -> LayerProfile:
        """Read the trace, and write the tables, the memory text and the plots.

        Args:
            kinds: The kind of each block, by path.
            boundaries: Allocator counters at the begin and end of each layer call; empty without CUDA.
            last_step: The window's last step, if the outermost step ranges are the profiler's; else None.
            draw: Whether to write the plots.
        """
        import pandas as pd

        from nvprof_kit._analysis.layers.profile import layer_profile
        from nvprof_kit._report.text.layer_profile import memory_lines
        from nvprof_kit._result.formats import encode
        from nvprof_kit._result.writer import write_file
        from nvprof_kit._trace.open import open_capture

        trace = open_capture(self.trace, optional=("name",))
        if last_step is not None:
            trace = own_steps(trace, last_step)
        columns = {
            name: [getattr(boundary, attribute) for boundary in boundaries] for name, attribute in MEMORY.items()
        }
        memory = pd.DataFrame(columns)
        profile = layer_profile(trace, kinds, memory if boundaries else None)
        for name, table in (("layers", profile.rows), ("kinds", profile.kinds)):
            write_file(self.path(f"{name}.csv"), encode(table, "csv"), inputs=[self.trace])
        if boundaries:
            text = "\n".join(memory_lines(profile.rows))
            write_file(self.path("memory_usage.txt"), f"{text}\n", inputs=[self.trace])
        if draw:
            self._draw(profile, boundaries)
        return profile

    def _draw(self, profile: LayerProfile, boundaries: Sequence[Boundary]) -> None:
        """Write the plots; a failed plot must not prevent the log."""
        try:
            from nvprof_kit._report.plots.memory import curve_figure
            from nvprof_kit._report.plots.plots import encode
            from nvprof_kit._report.text.layer_profile import time_figure
            from nvprof_kit._result.writer import write_file

            write_file(self.path("cuda_time_plot.png"), encode(time_figure(profile), "png"))
            if boundaries:
                write_file(self.path("memory_usage_line_chart.png"), encode(curve_figure(boundaries), "png"))
        except Exception as error:
            warnings.warn(f"curves of {self.name} are not drawn: {type(error).__name__}: {error}", stacklevel=2)

    def write_log(self, profile: LayerProfile, facts: list[str], *, echo: bool) -> None:
        """Write the summary log, and print its head on rank 0."""
        from nvprof_kit._report.text.layer_profile import profile_head, profile_report
        from nvprof_kit._report.text.table import print_to, text_of
        from nvprof_kit._result.writer import write_file

        write_file(self.path(f"rank_{self._rank}.log"), text_of(profile_report(profile, facts), to_file=True))
        if echo and self._rank == 0:
            print_to(sys.stdout, [*profile_head(profile, facts), f"Files: {self.path('*')}"])


def own_steps(trace: Trace, last_step: int) -> Trace:
    """The trace with only the outermost step ranges, up to a last step.

    A nested step range is the loop's own and may be numbered differently; a step after the last began after the loop's
    end.
    """
    ranges = trace.ranges.reset_index(drop=True)
    steps = ranges[ranges["category"] == Category.STEP.value].sort_values(["tid", "start_ns"])
    latest_end = steps.groupby("tid")["end_ns"].cummax().groupby(steps["tid"]).shift()
    number = steps["text"].astype(object).map(step_number)
    nested = steps.index[(steps["end_ns"] <= latest_end) | (number > last_step)]
    return replace(trace, ranges=ranges.drop(index=nested).reset_index(drop=True))


MEMORY = {
    "step": "step",
    "layer": "layer",
    "phase": "phase",
    "allocated_bytes": "end",
    "retained_bytes": "retained",
    "transient_bytes": "transient",
    "peak_bytes": "peak",
    "reserved_bytes": "reserved",
}
"""The columns of the table of memory, and the attributes of `Boundary` in them."""
