"""What `LayerProfiler` leaves of a window in the rank's folder, named after the files of ProfilerTools."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit.names import Category, step_number

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.layers.profile import LayerProfile
    from nvprof_kit._instrument.memory.boundaries import Boundary
    from nvprof_kit._trace.schema import Trace


class WindowFiles:
    """The files of one window.

    Args:
        folder: The rank's folder, which exists.
        name: What their names begin with.
        rank: The rank.
    """

    def __init__(self, folder: Path, name: str, rank: int) -> None:
        self.folder, self.name, self._rank = folder, name, rank

    def path(self, what: str) -> Path:
        """A file of the window."""
        return self.folder / f"{self.name}_{what}"

    @property
    def trace(self) -> Path:
        """The trace."""
        return self.path("trace.json.gz")

    def read(
        self, kinds: Mapping[str, str], boundaries: Sequence[Boundary], *, last_step: int | None, draw: bool
    ) -> LayerProfile:
        """Read the trace, and write the tables, the memory's text and the curves.

        Args:
            kinds: The kind of each block, by path.
            boundaries: The allocator at each end of a layer's call; none without CUDA.
            last_step: The window's last step, where the outermost ranges of steps are the profiler's own; else None.
            draw: Draw the curves.
        """
        from nvprof_kit._analysis.layers.profile import layer_profile
        from nvprof_kit._report.export.tables import FORMATS
        from nvprof_kit._report.export.writer import write_file
        from nvprof_kit._report.text.layer_profile import memory_lines
        from nvprof_kit._trace.open import open_capture

        trace = open_capture(self.trace, optional=("name",))
        if last_step is not None:
            trace = own_steps(trace, last_step)
        profile = layer_profile(trace, kinds, _memory_table(boundaries))
        for what, table in (("layers", profile.rows), ("kinds", profile.kinds)):
            write_file(self.path(f"{what}.csv"), FORMATS["csv"](table), inputs=[self.trace])
        if boundaries:
            text = "\n".join(memory_lines(profile.rows))
            write_file(self.path("memory_usage.txt"), f"{text}\n", inputs=[self.trace])
        if draw:
            self._draw(profile, boundaries)
        return profile

    def _draw(self, profile: LayerProfile, boundaries: Sequence[Boundary]) -> None:
        """The curves; a figure that cannot be drawn is no reason to lose the log."""
        try:
            from nvprof_kit._report.export.writer import write_file
            from nvprof_kit._report.plots.memory_curve import curve_figure
            from nvprof_kit._report.plots.plots import encode
            from nvprof_kit._report.text.layer_profile import time_figure

            write_file(self.path("cuda_time_plot.png"), encode(time_figure(profile), "png"))
            if boundaries:
                write_file(self.path("memory_usage_line_chart.png"), encode(curve_figure(boundaries), "png"))
        except Exception as error:
            warnings.warn(f"curves of {self.name} are not drawn: {type(error).__name__}: {error}", stacklevel=2)

    def write_log(self, profile: LayerProfile, facts: list[str], *, echo: bool) -> None:
        """Write the summary log, and print its head where it is rank 0's."""
        from nvprof_kit._report.export.writer import write_file
        from nvprof_kit._report.text.layer_profile import profile_head, profile_report
        from nvprof_kit._report.text.table.terminal import print_to, text_of

        write_file(self.path(f"rank_{self._rank}.log"), text_of(profile_report(profile, facts), kept=True))
        if echo and self._rank == 0:
            print_to(sys.stdout, [*profile_head(profile, facts), f"Files: {self.path('*')}"])


def own_steps(trace: Trace, last_step: int) -> Trace:
    """The trace with the outermost ranges of steps alone, up to a last one.

    A step inside one is the loop's own and may count otherwise; one behind the last was begun when the loop had ended.
    """
    ranges = trace.ranges.reset_index(drop=True)
    steps = ranges[ranges["category"] == Category.STEP.value].sort_values(["tid", "start_ns"])
    reach = steps.groupby("tid")["end_ns"].cummax().groupby(steps["tid"]).shift()
    number = steps["text"].astype(object).map(step_number)
    others = steps.index[(steps["end_ns"] <= reach) | (number > last_step)]
    return replace(trace, ranges=ranges.drop(index=others).reset_index(drop=True))


def _memory_table(boundaries: Sequence[Boundary]) -> pd.DataFrame | None:
    import pandas as pd

    if not boundaries:
        return None
    sizes = {
        "allocated_bytes": [one.end for one in boundaries],
        "retained_bytes": [one.retained for one in boundaries],
        "transient_bytes": [one.transient for one in boundaries],
        "peak_bytes": [one.peak for one in boundaries],
        "reserved_bytes": [one.reserved for one in boundaries],
    }
    keys = {name: [getattr(one, name) for one in boundaries] for name in ("step", "layer", "phase")}
    table: pd.DataFrame = pd.DataFrame({**keys, **sizes})
    return table
