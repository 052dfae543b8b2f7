"""Output files of `MemoryProfiler`: the log and tables during the run, the pages at the end."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nvprof_kit._instrument.memory.tensors import ACTIVATION, GRADS, KINDS, NONE, OS_PARAMS, OS_STATE, PARAMS, Held
from nvprof_kit._instrument.ranks import claim
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._instrument.memory.allocator import Boundary
    from nvprof_kit._instrument.memory.tensors import TimePoint

_MB = 1 << 20

LAYOUTS = {
    PARAMS: ("params_layout", "param_mem"),
    GRADS: ("grads_layout", "grad_mem"),
    OS_PARAMS: ("os_params_layout", "os_params_mem"),
    OS_STATE: ("os_state_layout", "os_state_mem"),
    ACTIVATION: ("activation_base_layout", "activation_base"),
}
"""The heading of each kind in the log, and the root of its layers."""

_OTHERS = ("buffers", "inputs", "outputs", "autocast", "workspace", "rounding", "unexplained")

COLUMNS = ("point", "name", "seconds", "kind", "path", "bytes", "device")
BOUNDARY_COLUMNS = (
    "step", "layer", "phase", "seconds", "begin_bytes", "end_bytes", "retained_bytes", "transient_bytes",
    "peak_bytes", "reserved_bytes", "largest_bytes",
)  # fmt: skip


class MemoryFiles:
    """The files of one rank.

    Args:
        folder: The rank's folder; created and claimed here. Files of an earlier run are replaced.
        layouts: Write the bytes of each module at each time point, not only the sums.
        pages: Write the sunburst pages and the line chart.

    Attributes:
        folder: The folder in use; a different one if another process has claimed the rank's folder.

    Raises:
        UsageError: The folder cannot be created or written to.
    """

    def __init__(self, folder: Path, *, layouts: bool, pages: bool) -> None:
        self._layouts, self._pages = layouts, pages
        try:
            self.folder = folder = claim(folder)
            self._log = (folder / "memory.log").open("w", encoding="utf-8", errors="xmlcharrefreplace")
            self._table = (folder / "memory.csv").open("w", encoding="utf-8", errors="xmlcharrefreplace", newline="")
        except OSError as error:
            raise UsageError(f"{folder}: cannot write there: {error.strerror}") from None
        self._rows = csv.writer(self._table, lineterminator="\n")
        self._rows.writerow(COLUMNS)

    def write(self, point: TimePoint) -> None:
        """Write a time point and flush, so that a killed rank leaves its log."""
        self._log.write(log_text(point, layouts=self._layouts))
        self._log.flush()
        time_point = (point.number, point.name, f"{point.seconds:.6f}")
        self._rows.writerows((*time_point, row.kind, row.path, row.bytes, row.device) for row in point.rows)
        self._table.flush()

    def finish(self, points: Sequence[TimePoint], boundaries: Sequence[Boundary]) -> None:
        """Close the files, and write the pages from all time points."""
        self._log.close()
        self._table.close()
        if boundaries:
            path = self.folder / "layers.csv"
            with path.open("w", encoding="utf-8", errors="xmlcharrefreplace", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(BOUNDARY_COLUMNS)
                for b in boundaries:
                    sizes = (b.start, b.end, b.retained, b.transient, b.peak, b.reserved, b.largest)
                    rows.writerow((b.step, b.layer, b.phase, f"{b.seconds:.6f}", *sizes))
        if self._pages and points:
            from nvprof_kit._report.page.sunburst import write_sunbursts
            from nvprof_kit._report.plots.memory import write_curve

            write_sunbursts(self.folder, [(point.name, point.device, point.rows) for point in points])
            if boundaries:
                write_curve(self.folder / "memory_usage_line_chart.png", boundaries)

    def abandon(self) -> None:
        """Close the files after a failed write; unflushed data is lost."""
        for file in (self._log, self._table):
            with suppress(OSError):
                file.close()


def log_text(point: TimePoint, *, layouts: bool) -> str:
    """A time point in the format of InternLM's memory profiler, in MiB, followed by a line for the allocator."""
    names = {OS_PARAMS: "os_params_memory", OS_STATE: "os_state_memory"}
    sizes: dict[str, int] = {}
    if point.allocator is not None:
        counters = point.allocator
        sizes = {"allocated": counters.allocated, "reserved": counters.reserved, "peak": counters.peak}
    sizes |= {kind: point.sum_of(kind) for kind in _OTHERS} | {"offloaded": point.offloaded}
    lines = [
        "Memory State:",
        f"time: {point.seconds}",
        "---summary---",
        f"total_memory: {_mb(point.total)}",
        ", ".join(f"{names.get(kind, f'{kind}_memory')}: {_mb(point.sum_of(kind))}" for kind in KINDS),
        ", ".join([f"point: {point.name}", *(f"{name}_memory: {_mb(size)}" for name, size in sizes.items() if size)]),
    ]
    if layouts:
        lines.append("---Layout---")
        for kind, (title, root) in LAYOUTS.items():
            lines += [f"{title}:", *_layout(root, [row for row in point.rows if row.kind == kind])]
    return "\n".join(lines) + "\n\n"


def _mb(count: int) -> str:
    return f"{count / _MB:.2f} MB"


def _layout(root: str, rows: Sequence[Held]) -> list[str]:
    """One line per module, parents first: its own bytes, and the bytes including its submodules."""
    module_bytes: Counter[tuple[str, ...]] = Counter()
    nested_bytes: Counter[tuple[str, ...]] = Counter({(): 0})
    for row in rows:
        path = tuple((row.path or NONE).split("."))
        module_bytes[path] += row.bytes
        for length in range(len(path) + 1):
            nested_bytes[path[:length]] += row.bytes
    number = {path: index for index, path in enumerate(nested_bytes)}  # modules in the order of their first rows
    ordered = sorted(nested_bytes, key=lambda path: [number[path[: length + 1]] for length in range(len(path))])
    return [
        f"layer: {'.'.join((root, *path))}, layer_mem: {_mb(module_bytes[path])}, total_mem: {_mb(nested_bytes[path])}"
        for path in ordered
    ]
