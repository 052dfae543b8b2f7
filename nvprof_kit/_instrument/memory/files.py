"""Output files of `MemoryProfiler`: the log and tables during the run, the pages at the end."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvprof_kit._instrument.memory.allocator import Boundary, Counts
from nvprof_kit._instrument.memory.tensors import ACTIVATION, GRADS, KINDS, NONE, OS_PARAMS, OS_STATE, PARAMS, Row
from nvprof_kit._instrument.ranks import claim
from nvprof_kit.errors import UsageError

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


@dataclass(frozen=True)
class TimePoint:
    """The memory at one moment.

    Attributes:
        number: Counted from 0.
        name: ``step 0 forward``, or the name passed to `MemoryProfiler.point`.
        seconds: Time since the profiler started.
        device: The device on which the model computes; rows on other devices are offloaded.
        rows: The bytes by kind and module; with CUDA also ``rounding``, and ``unexplained`` last.
        allocator: Counters of the CUDA caching allocator; None without CUDA.
    """

    number: int
    name: str
    seconds: float
    device: str
    rows: tuple[Row, ...] = field(repr=False)
    allocator: Counts | None = None

    def sum_of(self, *kinds: str) -> int:
        """Bytes of the kinds on the device."""
        return sum(row.bytes for row in self.rows if row.kind in kinds and row.device == self.device)

    @property
    def offloaded(self) -> int:
        """Bytes of the five kinds on other devices."""
        return sum(row.bytes for row in self.rows if row.kind in KINDS and row.device != self.device)

    @property
    def total(self) -> int:
        """Bytes of the five kinds on the device."""
        return self.sum_of(*KINDS)


def start_files(folder: Path) -> Path:
    """Create the rank's folder, claim it, and begin the log and the table there; files of an earlier run are replaced.

    Returns:
        The folder in use; a different one if another process has claimed the rank's folder.

    Raises:
        UsageError: The folder cannot be created or written to.
    """
    try:
        folder = claim(folder)
        _write(folder / "memory.log", "", "w")
        _write(folder / "memory.csv", _csv([COLUMNS]), "w")
    except OSError as error:
        raise UsageError(f"{folder}: cannot write there: {error.strerror}") from None
    return folder


def write_point(folder: Path, point: TimePoint) -> None:
    """Append a time point to the log and the table, so that a killed rank leaves them."""
    _write(folder / "memory.log", log_text(point))
    columns = (point.number, point.name, f"{point.seconds:.6f}")
    _write(folder / "memory.csv", _csv((*columns, row.kind, row.path, row.bytes, row.device) for row in point.rows))


def write_calls(folder: Path, boundaries: Sequence[Boundary]) -> None:
    """Write the table of layer calls."""
    rows: list[tuple[Any, ...]] = [BOUNDARY_COLUMNS]
    for b in boundaries:
        sizes = (b.start, b.end, b.retained, b.transient, b.peak, b.reserved, b.largest)
        rows.append((b.step, b.layer, b.phase, f"{b.seconds:.6f}", *sizes))
    _write(folder / "layers.csv", _csv(rows), "w")


def write_pages(folder: Path, points: Sequence[TimePoint], boundaries: Sequence[Boundary]) -> None:
    """Write the sunburst pages and the line chart."""
    from nvprof_kit._report.page.sunburst import write_sunbursts
    from nvprof_kit._report.plots.memory import write_curve

    write_sunbursts(folder, [(point.name, point.device, point.rows) for point in points])
    if boundaries:
        write_curve(folder / "memory_usage_line_chart.png", boundaries)


def _write(path: Path, text: str, mode: str = "a") -> None:
    with path.open(mode, encoding="utf-8", errors="xmlcharrefreplace", newline="") as file:
        file.write(text)


def _csv(rows: Iterable[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def log_text(point: TimePoint) -> str:
    """A time point in the format of InternLM's memory profiler, in MiB, followed by a line for the allocator."""
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
        ", ".join(f"{kind}_memory: {_mb(point.sum_of(kind))}" for kind in KINDS),
        ", ".join([f"point: {point.name}", *(f"{name}_memory: {_mb(size)}" for name, size in sizes.items() if size)]),
        "---Layout---",
    ]
    for kind, (title, root) in LAYOUTS.items():
        lines += [f"{title}:", *_layout(root, [row for row in point.rows if row.kind == kind])]
    return "\n".join(lines) + "\n\n"


def _mb(size: int) -> str:
    return f"{size / (1 << 20):.2f} MB"


def _layout(root: str, rows: Sequence[Row]) -> list[str]:
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
