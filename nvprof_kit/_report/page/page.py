"""One page with everything about a capture, or about several: a single file that loads nothing from any network.

Every text of a capture goes through the template's escaping or through JSON, and the page's scripts put texts into
the page as text only. The page's own rules forbid every script but the one whose hash they name.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from nvprof_kit._report.page.data import (
    PHASES,
    Change,
    Sheet,
    changes,
    class_bars,
    headlines,
    phase_split,
    row_names,
    short_text,
    total_change,
)
from nvprof_kit._report.page.drawing import drawn, measures
from nvprof_kit._report.text.layers import MEMORY_COLUMNS, LayersView, apart, layers_lines, time_name, total_line
from nvprof_kit._report.text.terminal import capture_facts
from nvprof_kit._report.text.units import Milliseconds, mib, percent

if TYPE_CHECKING:
    import jinja2

MARKED_CHANGE = 0.02
"""From this share on a change is in colour."""

_PARTS = ("core.js", "table.js", "icicle.js", "timeline.js", "steps.js", "main.js")


def report_page(sheets: Sequence[Sheet]) -> bytes:
    """The page, in UTF-8.

    Args:
        sheets: A capture each; with more than one the page compares them with the first.
    """
    script = "\n".join(_file(name) for name in _PARTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _template().render(
        title=f"{', '.join(sheet.layers.info.path for sheet in sheets)} · nvprof-kit",
        sheets=[_shown(sheet) for sheet in sheets],
        changes=[_change(change) for change in changes(sheets)] if len(sheets) > 1 else [],
        change_total=_change_cells(total_change(sheets)),
        data=[drawn(sheet) for sheet in sheets],
        style=_safe(_file("page.css")),
        script=_safe(script),
        script_hash=f"sha256-{digest}",
    )
    return text.encode("utf-8", "replace")


def _file(name: str) -> str:
    return files("nvprof_kit._report.page").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    return environment.from_string(_file("page.html"))


def _safe(text: str) -> Any:
    """A text of our own, to go into the page as it is."""
    from markupsafe import Markup

    return Markup(text)


def _shown(sheet: Sheet) -> dict[str, Any]:
    """What the template shows of a capture."""
    result = sheet.layers
    steps = result.summary.steps
    columns, rows, total = _table(sheet)
    return {
        "path": result.info.path,
        "short_path": _short_path(result.info.path),
        "facts": capture_facts(result.info, result.summary.all_steps),
        "headlines": headlines(sheet),
        "split": list(_split(sheet)),
        "warnings": (*apart(result), *result.warnings),
        "findings": sheet.findings,
        "unit": "Milliseconds per step" if steps > 1 else "Milliseconds",
        "time_name": time_name(result),
        "measures": measures(sheet),
        "columns": columns,
        "rows": rows,
        "total": total,
        "levels": int(result.tree["depth"].max()) + 1 if len(result.tree) else 1,
        "timelines": [title for title, _ in sheet.timelines],
        "timeline_title": "One step in time" if steps else "The capture in time",
        "has_steps": steps > 0,
        "classes": class_bars(sheet.classes, sheet.layers.summary.steps),
        "unmatched": [] if sheet.classes is None else sheet.classes.warnings,
    }


def _short_path(path: str) -> str:
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return name if len(name) <= 24 else f"{name[:10]}…{name[-12:]}"


def _split(sheet: Sheet) -> Iterable[dict[str, Any]]:
    summary = sheet.layers.summary
    ms = Milliseconds.for_total(summary.shown_ns, max(summary.steps, 1))
    for phase, ns in phase_split(sheet.layers):
        yield {
            "phase": short_text(phase),
            "colour": phase if phase in PHASES else "other",
            "ns": ns,
            "time": ms(ns),
            "percent": percent(ns / max(summary.shown_ns, 1)),
        }


def _table(sheet: Sheet) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Heads, rows and last line of the per-layer table."""
    result = sheet.layers
    tree, whole = result.tree, max(result.summary.shown_ns, 1)
    last = total_line(result)
    phases = [phase for phase in PHASES if phase != "recompute" or last.times[phase]]
    names = row_names(tree)
    more = _memory_cells(sheet) | _flops_cells(sheet)
    rows = []
    for number, (row, name, line) in enumerate(
        zip(tree.to_dict("records"), names, layers_lines(result, LayersView()), strict=True)
    ):
        times = [_cell(line.times[phase], _in_phase(row, phase)) for phase in phases]
        share = _cell(line.percent, row["total_ns"], row["total_ns"] / whole)
        cells = [_cell(line.calls, row["calls"]), *times, _cell(line.total, row["total_ns"]), share]
        cells += [_cell(line.cpu, row["cpu_ns"]), *(column[number] for column in more.values())]
        rows.append({**_named(name, str(row["parent"]), row["depth"]), "cells": cells, "outside": line.outside})
    total = ["", *(last.times[phase] for phase in phases), last.total, last.percent, "", *("" for _ in more)]
    return ["layer", "calls", *phases, "total", "share", "CPU", *more], rows, total


def _memory_cells(sheet: Sheet) -> dict[str, list[dict[str, Any]]]:
    """The columns of memory by their heads, those that hold anything."""
    if sheet.memory is None:
        return {}
    told = {head: sheet.memory[name].fillna(0).tolist() for name, head in MEMORY_COLUMNS.items()}
    return {
        head: [_cell(mib(count) if count else "", count) for count in counts]
        for head, counts in told.items()
        if any(counts)
    }


def _flops_cells(sheet: Sheet) -> dict[str, list[dict[str, Any]]]:
    """The columns of MFU by their heads, where operations were counted and the GPU's peak is known."""
    if sheet.flops is None or sheet.flops.peaks is None:
        return {}
    found = sheet.flops.rows
    told = dict(zip(zip(found["layer"], found["phase"], strict=True), found["mfu"].fillna(0).tolist(), strict=True))
    columns = {}
    for phase in ("forward", "backward"):
        values = [told.get((layer, phase), 0.0) for layer in sheet.layers.tree["layer"]]
        columns[f"MFU {phase}"] = [_cell(mfu_text(value), value or None) for value in values]
    return columns


def mfu_text(mfu: float) -> str:
    """A utilisation, '' for none, with a word where it cannot be; `nvprof-kit flops` gives the reasons."""
    return (percent(mfu) + (" (above the peak)" if mfu > 1 else "")) if mfu else ""


def _in_phase(row: dict[Any, Any], phase: str) -> int:
    return int(row["other_ns"] if row["phase"] == phase else row[f"{phase}_ns"])


def _named(name: str, parent: str, depth: int) -> dict[str, Any]:
    """A row by its path, as the part that is its parent's and its own."""
    prefix = f"{parent}." if parent and name.startswith(f"{parent}.") else ""
    own = name.removeprefix(prefix)
    return {"path": short_text(name), "prefix": short_text(prefix), "name": short_text(own), "depth": depth}


def _cell(text: str, value: float | None, bar: float | None = None, mark: str = "") -> dict[str, Any]:
    """A cell: what it says, what it is sorted by, how long its bar is (0 to 1), and its class."""
    shown = None if bar is None else f"{bar:.4f}"
    return {"text": text, "value": "" if value is None else value, "bar": shown, "mark": mark}


def _change(change: Change) -> dict[str, Any]:
    """A row of the comparison."""
    named = _named(change.layer, change.parent, change.depth)
    return {**named, "layer": named["path"], "cells": _change_cells(change)}


def _change_cells(change: Change) -> list[dict[str, Any]]:
    """The times, then what changed, in ms and in per cent."""
    difference, first = change.change, change.times[0]
    cells = [_cell("" if ns is None else f"{ns / 1e6:,.3f}", ns) for ns in change.times]
    if difference is None:
        return [*cells, _cell("new" if first is None else "gone", None), _cell("", None)]
    part = difference / first if first else None
    mark = "" if part is None or abs(part) < MARKED_CHANGE else "worse" if part > 0 else "better"
    cells.append(_cell(f"{difference / 1e6:+,.3f}", difference, mark=mark))
    return [*cells, _cell("" if part is None else f"{100 * part:+.1f} %", part, mark=mark)]
