"""CSV of ncu's raw and details pages, 2020 to 2025, including other output around them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from nvprof_kit._toml import read_toml
from nvprof_kit._trace.ncu.cells import base_unit, parse_metrics, parse_nvtx
from nvprof_kit._trace.ncu.schema import KERNELS, NcuReport
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues

_NVTX, _NVTX_SPANS = "thread Domain:Push/Pop_Range", "Id:Domain:Start/Stop_Range"
"""Beginnings of the names of the columns with NVTX ranges; the fields of a range follow."""
_ID = ["ID", "Process ID"]
_IDENTITY = [*_ID, "Kernel Name", "Block Size", "Grid Size", "Device", "CC", _NVTX]
_NOT_READ = ["Process Name", "Host Name", "Kernel Time", "Context", "Stream", _NVTX_SPANS]
_METRIC = ["Section Name", "Metric Name", "Metric Unit", "Metric Value"]
"""Columns of a details page, which has a row per metric."""

_LONE_QUOTE = re.compile(r'(?<=[^",])"(?=[^",])')
_SIZE = re.compile(r"\(\s*\d+,\s*\d+,\s*\d+\s*\)")
_ROW = re.compile(r'"?\d+"?,"?\d+"?,|"?"?,"?"?,')  # result ID and process ID; both are empty in the units row
_MESSAGE = re.compile(r"==(ERROR|WARNING|PROF)==\s*(.*)")
_LAUNCHES = re.compile(r"^==nvprof_kit== launches: (\d+(?:\|\d+)*)\s*$", re.MULTILINE)
"""Line that the script of `nvprof-kit ncu plan` writes above the page: the measured launches of each configuration."""


def read_csv(text: str, domain: str, named: str) -> NcuReport:
    """Read a raw or details page.

    Args:
        text: The file.
        domain: NVTX domain to take the ranges from; '' is the default domain.
        named: The path to name in messages.

    Raises:
        CaptureError: The text has no page, another page, or one without results.
    """
    lines = re.split(r"\r\n|\r|\n", text)  # a range can have any other letter that ends a line in its name
    messages = [match.groups() for line in lines if (match := _MESSAGE.match(line))]
    table, units_row, unread_lines = _read_page(lines, messages, named)
    warnings = [f"ncu failed: {message}" for kind, message in messages if kind == "ERROR"]
    if unread_lines:
        numbers = ", ".join(map(str, unread_lines[:5])) + (" and more" if len(unread_lines) > 5 else "")
        warnings.append(Issue.of("ncu-rows", count=len(unread_lines), lines=numbers))
    if "Metric Name" in table:
        table, cells, factors, units = _details(table)
    else:
        if units_row is None:
            warnings.append(Issue.of("ncu-units"))
        bases = {name: base_unit(unit) for name, unit in (units_row or dict.fromkeys(map(str, table), "")).items()}
        cells = table[[name for name in table if name not in _IDENTITY and name not in _NOT_READ]]
        units = {name: bases[name][0] for name in map(str, cells)}
        factors = pd.DataFrame([{name: bases[name][1] for name in units}])
    metrics, texts, faults = parse_metrics(cells, factors)
    kernels = _kernels(table, domain)
    if _NVTX not in table:
        warnings.append(Issue.of("ncu-ranges", column=_NVTX))
    else:
        is_unknown = kernels["tid"].to_numpy() < 0
        if is_unknown.all() or (is_unknown & (table[_NVTX].str.strip().to_numpy() != "")).any():
            warnings.append(Issue.of("ncu-ranges:unknown", column=_NVTX, count=is_unknown.sum(), total=len(kernels)))
    launches = _LAUNCHES.search(text)
    return NcuReport(
        path=named,
        kernels=kernels,
        metrics=pd.DataFrame(metrics),
        texts=pd.DataFrame(texts, index=range(len(table))),
        units={name: units[name] for name in metrics},
        warnings=as_issues("ncu-report", (*warnings, *faults)),
        invocations=tuple(int(number[:9]) for number in launches[1].split("|")) if launches else (),
    )


def _read_page(
    lines: Sequence[str], messages: Sequence[tuple[str, ...]], named: str
) -> tuple[pd.DataFrame, dict[str, str] | None, list[int]]:
    """The rows of a page as text, the unit of each column of a raw page, and the numbers of unreadable lines."""
    top = next((number for number, line in enumerate(lines) if line.startswith(('"ID",', "ID,"))), None)
    if top is None:
        need = "needed what `ncu --import FILE.ncu-rep --page raw --csv` prints"
        raise _no_result(named, messages, f"no page of ncu in it (no header that begins with ID); {need}")
    titles = next(csv.reader([lines[top]]))
    header = [next((name for name in (_NVTX, _NVTX_SPANS) if title.startswith(name)), title) for title in titles]
    is_details = "Metric Name" in header
    if missing := [name for name in _METRIC if is_details and name not in header]:
        need = "needed the raw page: ncu --import FILE --page raw --csv"
        raise CaptureError(f"{named}: a summary page of ncu (no {', '.join(missing)}); {need}")
    numbered = [(number, line) for number, line in enumerate(lines[top + 1 :], top + 2) if _ROW.match(line)]
    # other lines are output of the program or ncu, or the continuation of a rule's text
    fields = [(number, _fields(line, header, may_be_short=is_details)) for number, line in numbered]
    rows = [row for _, row in fields if row is not None]
    results = [row for row in rows if row[0]]
    if not results:
        reason = "no row with numbers in ID and Process ID); the file was cut off, or ncu measured no kernel"
        raise _no_result(named, messages, f"a page of ncu without a result ({reason}")
    if repeats := sorted({name for name in header if header.count(name) > 1}):
        raise CaptureError.of("repeated-column", path=named, column=repeats[0])
    units = next((dict(zip(header, row, strict=True)) for row in reversed(rows) if not row[0]), None)
    unread_lines = [number for number, row in fields if row is None]
    return pd.DataFrame(results, columns=header, dtype=object), units, unread_lines


def _no_result(named: str, messages: Sequence[tuple[str, ...]], reason: str) -> CaptureError:
    """The error for a file without a result, by what ncu says in it."""
    errors = [text for kind, text in messages if kind == "ERROR"]
    if any("ERR_NVGPUCTRPERM" in text for text in errors):
        return CaptureError.of("no-ncu-permission", path=named)
    if errors:
        reason = f"ncu failed: {errors[0]}"
    elif any("No kernels were profiled" in text for _, text in messages):
        reason = "ncu measured no kernel; check the names and ranges it was given (an NVTX filter needs --nvtx)"
    return CaptureError(f"{named}: {reason}")


def _fields(line: str, header: Sequence[str], *, may_be_short: bool) -> list[str] | None:
    """The fields of a line, one for each column of the header; None if they do not fit.

    ncu does not escape quotes inside the NVTX cell, so the CSV parser can end a field too early there. Because ncu
    quotes all fields, the line is split at ``","``, and surplus parts belong to the NVTX cell.
    """
    width, plain = len(header), next(csv.reader([line]))
    fits = len(plain) == width or (may_be_short and len(plain) < width)
    if fits and (_NVTX not in header or not _LONE_QUOTE.search(line)):
        return plain + [""] * (width - len(plain))
    if _NVTX not in header or not line.startswith('"'):
        return plain if len(plain) == width else None
    nvtx = header.index(_NVTX)
    quoted = line.rstrip(",").removeprefix('"').removesuffix('"').split('","')
    surplus = len(quoted) - width
    # the block size is the first field after the NVTX cells that is a size and is followed by another, the grid size
    for position in range(nvtx, len(quoted) - 1) if "Block Size" in header else ():
        if _SIZE.fullmatch(quoted[position]) and _SIZE.fullmatch(quoted[position + 1]):
            surplus = position - header.index("Block Size")
            break
    lacking = width + surplus - len(quoted)
    if surplus < 0 or lacking < 0 or (lacking and not may_be_short):
        return None
    last = nvtx + surplus
    cells = [*quoted[:nvtx], '","'.join(quoted[nvtx : last + 1]), *quoted[last + 1 :]]
    return [cell.replace('""', '"') for cell in cells] + [""] * lacking


def _details(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, dict[str, str]]:
    """The results of a page with one row per metric; the cell of each metric, the factor to its base unit, and that."""
    key = [name for name in _ID if name in table]
    results = table.drop_duplicates(key)
    rows = table[table["Metric Name"] != ""]  # rows of rules have no metric
    bases = [base_unit(unit) for unit in rows["Metric Unit"]]
    metrics = read_toml("nvprof_kit._trace.ncu", "details.toml")
    labels = zip(rows["Metric Name"], bases, strict=True)
    names = [metrics.get(label, {}).get(unit, label) for label, (unit, _) in labels]
    rows = rows.assign(name=names, unit=[unit for unit, _ in bases], factor=[factor for _, factor in bases])
    units: Any = rows.drop_duplicates("name").set_index("name")["unit"].to_dict()
    filled = rows[rows["Metric Value"] != ""].drop_duplicates([*key, "name"])  # a metric can be in several sections
    index = pd.MultiIndex.from_frame(results[key]) if len(key) > 1 else pd.Index(results[key[0]])
    cells, factors = (
        filled.set_index([*key, "name"])[column].unstack("name").reindex(index, columns=[*units]).reset_index(drop=True)
        for column in ("Metric Value", "factor")
    )
    return results, cells.fillna(""), factors.fillna(1.0), units


def _kernels(results: pd.DataFrame, domain: str) -> pd.DataFrame:
    """The measured kernels; columns `KERNELS`."""
    cells = results.reindex(columns=_IDENTITY, fill_value="")
    states, kernels = [parse_nvtx(cell) for cell in cells[_NVTX]], cells["Kernel Name"].tolist()
    for index, (_, ranges) in enumerate(states):  # ``--print-nvtx-rename kernel`` puts a range before the kernel's name
        prefixes = (f"{name}/" for _, name in ranges if kernels[index].startswith(f"{name}/"))
        kernels[index] = kernels[index].removeprefix(next(prefixes, ""))
    integers = {
        name: np.array([int(re.sub(r"\D", "", cell)[:18] or -1) for cell in cells[title]], dtype=np.int64)
        for name, title in (("id", "ID"), ("pid", "Process ID"), ("device", "Device"))
    }
    sizes = {
        name: [f"({', '.join(re.findall('[0-9]+', cell))})" if cell else "" for cell in cells[title]]  # any separators
        for name, title in (("grid", "Grid Size"), ("block", "Block Size"))
    }
    columns: dict[str, Any] = {
        **integers,
        **sizes,
        "tid": np.array([thread for thread, _ in states], dtype=np.int64),
        "kernel": kernels,
        "cc": cells["CC"].tolist(),
        "stack": [tuple(name for range_domain, name in ranges if range_domain == domain) for _, ranges in states],
    }
    return pd.DataFrame({name: columns[name] for name in KERNELS})
