"""CSV of ncu's raw and details pages, 2020 to 2025, including other output around them."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nvprof_kit._trace.ncu.cells import NumberStyle, base_unit, number_style, parse_cell, parse_number
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import as_issues

_PEAK = ".avg.pct_of_peak_sustained_elapsed"

_LABELS: dict[tuple[str, str], str] = {
    ("Duration", "ns"): "gpu__time_duration.sum",
    ("SM Frequency", "hz"): "sm__cycles_elapsed.avg.per_second",
    ("DRAM Frequency", "hz"): "dram__cycles_elapsed.avg.per_second",
    ("Elapsed Cycles", "cycle"): "sm__cycles_elapsed.max",
    ("SM Active Cycles", "cycle"): "sm__cycles_active.avg",
    ("Compute (SM) Throughput", "%"): f"sm__throughput{_PEAK}",
    ("Compute (SM) [%]", "%"): f"sm__throughput{_PEAK}",
    ("SOL SM", "%"): f"sm__throughput{_PEAK}",
    ("Memory Throughput", "%"): f"gpu__compute_memory_throughput{_PEAK}",
    ("Memory [%]", "%"): f"gpu__compute_memory_throughput{_PEAK}",
    ("SOL Memory", "%"): f"gpu__compute_memory_throughput{_PEAK}",
    ("DRAM Throughput", "%"): f"gpu__dram_throughput{_PEAK}",
    ("SOL DRAM", "%"): f"gpu__dram_throughput{_PEAK}",
    ("L2 Cache Throughput", "%"): f"lts__throughput{_PEAK}",
    ("SOL L2 Cache", "%"): f"lts__throughput{_PEAK}",
    ("L1/TEX Cache Throughput", "%"): "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ("SOL L1/TEX Cache", "%"): "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ("Memory Throughput", "byte/s"): "dram__bytes.sum.per_second",
    ("L1/TEX Hit Rate", "%"): "l1tex__t_sector_hit_rate.pct",
    ("L2 Hit Rate", "%"): "lts__t_sector_hit_rate.pct",
    ("Achieved Occupancy", "%"): "sm__warps_active.avg.pct_of_peak_sustained_active",
    ("Theoretical Occupancy", "%"): "sm__maximum_warps_per_active_cycle_pct",
    ("Registers Per Thread", "register/thread"): "launch__registers_per_thread",
    ("Static Shared Memory Per Block", "byte/block"): "launch__shared_mem_per_block_static",
    ("Dynamic Shared Memory Per Block", "byte/block"): "launch__shared_mem_per_block_dynamic",
    ("Waves Per SM", ""): "launch__waves_per_multiprocessor",
    ("Executed Ipc Active", "inst/cycle"): "sm__inst_executed.avg.per_cycle_active",
}
"""The full metric names by label on the details page and base unit."""


_PUSH_POP, _START_STOP = "thread Domain:Push/Pop_Range", "Id:Domain:Start/Stop_Range"
_IDENTITY = frozenset(
    {"ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream"}
    | {"Block Size", "Grid Size", "Device", "CC"}
)
_DETAILS = ("Section Name", "Metric Name", "Metric Unit", "Metric Value")
_LONE_QUOTE = re.compile(r'(?<=[^",])"(?=[^",])')
_SIZE = re.compile(r"\(\s*\d+,\s*\d+,\s*\d+\s*\)")
_ROW = re.compile(r'"?\d+"?,"?\d+"?,|"?"?,"?"?,')  # result ID and process ID; both are empty in the units row
_NOISE = re.compile(r"==(?P<kind>ERROR|WARNING|PROF)==\s*(?P<text>.*)")
_LAUNCHES = re.compile(r"==nvprof_kit== launches: (\d+(?:\|\d+)*)\s*")
"""Line that the script of `nvprof-kit ncu plan` writes above the page: the measured launches of each configuration."""

_NO_PERMISSION = "ERR_NVGPUCTRPERM"

Row = dict[str, str]


@dataclass
class _Page:
    """A page's rows as text.

    Attributes:
        header: The column names.
        rows: The rows, each as long as the header.
        units: The units row of a raw page; None if absent.
        unread_lines: Line numbers of unreadable lines.
        messages: ncu messages around the page, by ``ERROR`` and ``WARNING``.
        launches: The measured launches of each configuration, if written by a plan's script.
    """

    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    units: list[str] | None = None
    unread_lines: list[int] = field(default_factory=list)
    messages: dict[str, list[str]] = field(default_factory=dict)
    launches: tuple[int, ...] = ()

    def column(self, name: str) -> int | None:
        """Index of a column; an NVTX column is found by prefix. None if absent."""
        matches = (index for index, title in enumerate(self.header) if title == name or title.startswith(f"{name}:"))
        return next(matches, None)


def read_csv(text: str, domain: str, named: str) -> NcuReport:
    """Read a raw or details page.

    Args:
        text: The file.
        domain: NVTX domain to take the ranges from; '' is the default domain.
        named: The path to name in messages.

    Raises:
        CaptureError: The text has no page, another page, or one without results.
    """
    page = _read_page(text.splitlines(), named)
    details = page.column("Metric Name") is not None
    if details and any(page.column(name) is None for name in _DETAILS):
        missing = ", ".join(name for name in _DETAILS if page.column(name) is None)
        raise CaptureError(
            f"{named}: a summary page of ncu (no {missing}); needed the raw page: ncu --import FILE --page raw --csv"
        )
    if not page.rows:
        raise CaptureError(_nothing(page.messages, named, page=True))
    if repeats := sorted({name for name in page.header if page.header.count(name) > 1}):
        raise CaptureError(
            f"{named}: the column {repeats[0]} stands there twice, and either could be meant; print it again"
        )
    results, cells, units = _details(page) if details else _raw(page)
    style = number_style(cell for cell in {cell for row in cells.values() for cell in row})
    metrics, texts, unread = _values(cells, units, style)
    import pandas as pd

    return NcuReport(
        path=named,
        kernels=_kernels(page, results, domain),
        metrics=pd.DataFrame(metrics),
        texts=pd.DataFrame(texts, index=range(len(results))),
        units={name: unit for name, (unit, _) in units.items() if name in metrics},
        warnings=as_issues("ncu-report", (*_warnings(page, results, style, details), *unread)),
        invocations=page.launches,
    )


def _read_page(lines: Sequence[str], named: str) -> _Page:
    header_line = next((number for number, line in enumerate(lines) if line.startswith(('"ID",', "ID,"))), None)
    messages: dict[str, list[str]] = {}
    for line in lines:
        if noise := _NOISE.match(line):
            messages.setdefault(noise["kind"], []).append(noise["text"])
    if header_line is None:
        raise CaptureError(_nothing(messages, named))
    launch_line = next(filter(None, map(_LAUNCHES.fullmatch, lines[:header_line])), None)
    launches = tuple(int(number[:9]) for number in launch_line[1].split("|")) if launch_line else ()
    page = _Page(next(csv.reader([lines[header_line]])), messages=messages, launches=launches)
    push, block, is_details = (page.column(name) for name in (_PUSH_POP, "Block Size", "Section Name"))
    for number, line in enumerate(lines[header_line + 1 :], header_line + 2):
        if not _ROW.match(line):  # output of the program or ncu, or the continuation of a rule's text
            continue
        fields = _fields(line, len(page.header), push, block, short=is_details is not None)
        if fields is None:
            page.unread_lines.append(number)
        elif fields[0] == "":
            page.units = fields
        else:
            page.rows.append(fields)
    return page


def _nothing(messages: dict[str, list[str]], named: str, page: bool = False) -> str:
    """Why there is no result; `page`: whether a page was found."""
    errors = messages.get("ERROR", [])
    if any(_NO_PERMISSION in line for line in errors):
        return (
            f"{named}: ncu had no permission to read the counters (ERR_NVGPUCTRPERM); run it as root, or set the "
            "kernel module's option NVreg_RestrictProfilingToAdminUsers=0"
        )
    if errors:
        return f"{named}: ncu failed: {errors[0]}"
    if any("No kernels were profiled" in line for lines in messages.values() for line in lines):
        return f"{named}: ncu measured no kernel; check the names and ranges it was given (an NVTX filter needs --nvtx)"
    if page:
        return (
            f"{named}: a page of ncu without a result (no row with numbers in ID and Process ID); the file was cut "
            "off, or ncu measured no kernel"
        )
    return (
        f"{named}: no page of ncu in it (no header that begins with ID); needed what `ncu --import FILE.ncu-rep --page "
        "raw --csv` prints"
    )


def _fields(line: str, width: int, push: int | None, block: int | None, *, short: bool) -> list[str] | None:
    """The fields of a line, matched to a header of this width; None if they do not fit. On a details page lines may be
    short.

    ncu does not escape quotes inside the NVTX cell, so the CSV parser can end a field too early there. Because ncu
    quotes all fields, the line is split at ``","``, and surplus parts belong to the NVTX cell.
    """
    plain = next(csv.reader([line]))
    if (len(plain) == width or (short and width > len(plain))) and (push is None or not _LONE_QUOTE.search(line)):
        return plain + [""] * (width - len(plain))
    if push is None or not line.startswith('"'):
        return plain if len(plain) == width else None
    quoted = line.rstrip(",").removeprefix('"').removesuffix('"').split('","')
    # the first field after the NVTX cells that is a block size and is followed by a grid size
    is_size = [_SIZE.fullmatch(cell) is not None for cell in quoted]
    sizes = (index for index in range(push, len(quoted) - 1) if is_size[index] and is_size[index + 1])
    range_column = next(sizes, None)
    extra = range_column - block if range_column is not None and block is not None else len(quoted) - width
    if extra < 0 or len(quoted) - extra > width or (not short and len(quoted) - extra != width):
        return None
    last = push + extra
    joined = [*quoted[:push], '","'.join(quoted[push : last + 1]), *quoted[last + 1 :]]
    return [cell.replace('""', '"') for cell in joined] + [""] * (width - len(joined))


# ---------------------------------------------------------------- the two pages

Cells = dict[str, list[str]]
Units = dict[str, tuple[str, list[float]]]
"""Base unit of each metric and the factor of its cells: one for all, or one per cell."""


def _raw(page: _Page) -> tuple[list[list[str]], Cells, Units]:
    """The results, the cells of each metric, and the base unit of each metric with its factor."""
    units = page.units or [""] * len(page.header)
    cells: Cells = {}
    base: Units = {}
    for index, name in enumerate(page.header):
        if name in _IDENTITY or name.startswith((_PUSH_POP, _START_STOP)):
            continue
        cells[name] = [row[index] for row in page.rows]
        unit, factor = base_unit(units[index])
        base[name] = unit, [factor]
    return page.rows, cells, base


def _details(page: _Page) -> tuple[list[list[str]], Cells, Units]:
    """The same from a page with one row per metric, each with its own unit; rows of rules have no metric."""
    name_at, unit_at, value_at = (page.column(name) or 0 for name in _DETAILS[1:])
    process = page.column("Process ID")
    results: dict[tuple[str, str], list[str]] = {}
    values: dict[str, dict[tuple[str, str], tuple[str, float]]] = {}
    units: dict[str, str] = {}
    for row in page.rows:
        key = (row[0], row[process] if process is not None else "")
        results.setdefault(key, row)
        unit, factor = base_unit(row[unit_at])
        name = _LABELS.get((row[name_at], unit), row[name_at])
        if row[name_at] and values.setdefault(name, {}).get(key, ("", 1.0))[0] == "":  # it can be in several sections
            values[name][key] = row[value_at], factor
            units.setdefault(name, unit)
    columns = {name: [of.get(key, ("", 1.0)) for key in results] for name, of in values.items()}
    cells = {name: [cell for cell, _ in column] for name, column in columns.items()}
    base = {name: (units[name], [factor for _, factor in column]) for name, column in columns.items()}
    return list(results.values()), cells, base


def _values(cells: Cells, units: Units, style: NumberStyle) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Numeric metrics in base units, text metrics as text, and warnings about text in numeric metrics."""
    metrics: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    warnings: list[str] = []
    number_of_cell: dict[str, float | None] = {}
    for name, column in cells.items():
        for cell in set(column) - number_of_cell.keys():
            number_of_cell[cell] = parse_number(cell, style)
        unreadable = [cell for cell in column if number_of_cell[cell] is None]
        values = np.array([number_of_cell[cell] for cell in column], dtype=np.float64)
        if len(unreadable) > np.count_nonzero(~np.isnan(values)):
            texts[name] = column
            continue
        metrics[name] = values * np.array(units[name][1])
        if unreadable:
            warnings.append(
                f"{len(unreadable)} of {len(column)} values of {name} are no numbers, as {unreadable[0]!r}: left out"
            )
    return metrics, texts, tuple(warnings)


# ---------------------------------------------------------------- the results


def _kernels(page: _Page, results: Sequence[Sequence[str]], domain: str) -> Any:
    import pandas as pd

    def text(name: str) -> list[str]:
        index = page.column(name)
        return [row[index] if index is not None else "" for row in results]

    states, kernels = [parse_cell(cell) for cell in text(_PUSH_POP)], text("Kernel Name")
    for index, state in enumerate(states):  # ``--print-nvtx-rename kernel`` puts a range before the kernel's name
        prefixes = (f"{name}/" for _, name in state.ranges if kernels[index].startswith(f"{name}/"))
        kernels[index] = kernels[index].removeprefix(next(prefixes, ""))
    return pd.DataFrame(
        {
            "id": _whole_numbers(text("ID")),
            "pid": _whole_numbers(text("Process ID")),
            "tid": np.array([state.tid for state in states], dtype=np.int64),
            "kernel": kernels,
            "grid": [_size(cell) for cell in text("Grid Size")],
            "block": [_size(cell) for cell in text("Block Size")],
            "device": _whole_numbers(text("Device")),
            "cc": text("CC"),
            "stack": [state.of_domain(domain) for state in states],
        }
    )


def _whole_numbers(cells: Iterable[str]) -> Any:
    digits: Callable[[str], str] = lambda cell: re.sub(r"[^\d-]", "", cell)  # noqa: E731
    return np.array([int(digits(cell)[:18] or -1) for cell in cells], dtype=np.int64)


def _size(cell: str) -> str:
    """``(64, 64, 1)`` for any separators."""
    return f"({', '.join(re.findall(r'[0-9]+', cell))})" if cell else ""


def _warnings(page: _Page, results: Sequence[Sequence[str]], style: NumberStyle, details: bool) -> list[str]:
    warnings = [f"ncu failed: {line}" for line in page.messages.get("ERROR", ())]
    if page.unread_lines:
        lines = ", ".join(map(str, page.unread_lines[:5])) + (" and more" if len(page.unread_lines) > 5 else "")
        warnings.append(
            f"{len(page.unread_lines)} rows cannot be read (lines {lines}): their fields do not fit the header"
        )
    if not style.certain:
        warnings.append(
            f"numbers are read with {style.decimal!r} before the fraction, but the file does not tell for sure; "
            "print it with LC_ALL=C"
        )
    if page.units is None and not details:
        warnings.append("the row of units is missing: values are taken for base units (ns, byte, hz)")
    index = page.column(_PUSH_POP)
    if index is None:
        return [*warnings, f"no column {_PUSH_POP}: no kernel's ranges are known; measure with ncu --nvtx"]
    cells = [row[index].strip() for row in results]
    broken = sum(1 for cell in cells if cell and parse_cell(cell).tid < 0)
    if broken or not any(cells):
        state = f"holds no state in {broken}" if broken else f"is empty in {len(cells)}"
        warnings.append(f"the column {_PUSH_POP} {state} of {len(cells)} results: their ranges are not known")
    return warnings
