"""Two captures compared, as a person reads it: for the terminal, and as markdown for a pull request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit.analysis.diff.diff import LEVELS
from nvprof_kit.analysis.diff.gates import named
from nvprof_kit.report.text.terminal import capture_line, table, warning_lines
from nvprof_kit.report.text.units import Milliseconds

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit.analysis.diff.diff import DiffResult

_MS = Milliseconds(1, 3)
_MARKUP = re.compile(r"[\\|*`\[\]]")
_HEAD = ("", "base", "new", "change", "95 % interval", "verdict")


def diff_report(result: DiffResult, top: int) -> list[RenderableType]:
    """The report for the terminal: the verdict first, then what changed, kernels that came and went, gates."""
    rows = _shown(result, top)
    made = table([(name, "left" if place in (0, 5) else "right") for place, name in enumerate(_HEAD)])
    for cells in rows:
        made.add_row(*cells)
    parts: list[RenderableType] = [
        Text("base ").append_text(capture_line(result.base, result.base_steps)),
        Text("new  ").append_text(capture_line(result.new, result.new_steps)),
        "",
        Text(_headline(result), "bold"),
        "",
        made,
        *([Text(_unshown(result, len(rows)), "dim")] if _unshown(result, len(rows)) else []),
    ]
    if len(result.kernels):
        parts += ["", Text("Kernels", "bold"), *(Text(line) for line in _kernel_lines(result, top))]
    if result.gates:
        parts += ["", *(Text(line, "" if held else "bold red") for held, line in _gate_lines(result))]
    return [
        *parts,
        "",
        Text("Median milliseconds per step; GPU time but for the step.", "dim"),
        *warning_lines(result.warnings),
    ]


def diff_markdown(result: DiffResult, top: int) -> str:
    """The report for a pull request."""
    rows = _shown(result, top)
    lines = [f"**{_headline(result)}**", ""]
    lines += [f"- {'✅' if held else '❌'} {_escaped(line)}" for held, line in _gate_lines(result)]
    lines += [""] if result.gates else []
    lines += [f"| {' | '.join(_HEAD)} |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(map(_escaped, cells))} |" for cells in rows]
    if len(result.kernels):
        lines += ["", "<details><summary>Kernels that came, went or were renamed</summary>", ""]
        lines += [f"- {_escaped(line)}" for line in _kernel_lines(result, top)]
        lines += ["", "</details>"]
    lines += [f"\n> {_escaped(warning)}" for warning in result.warnings]
    base, new = (f"`{info.path}` ({info.tool}, {', '.join(info.gpus)})" for info in (result.base, result.new))
    lines += ["", f"{base}, {result.base_steps} steps; {new}, {result.new_steps} steps. Median milliseconds per step."]
    return "\n".join(lines) + "\n"


def _headline(result: DiffResult) -> str:
    """One sentence: what became of the step."""
    step = result.rows.iloc[0]
    times = f"{_MS(int(step['base_ns']))} → {_MS(int(step['new_ns']))} ms"
    if step["verdict"] == "same":
        return f"No change of the step beyond its own variation: {times} ({100 * step['change']:+.1f} %)"
    return f"The step is {step['verdict']} by {abs(100 * step['change']):.1f} %: {times} (p = {step['p']:.2g})"


def _changed(result: DiffResult) -> pd.DataFrame:
    rows = result.rows[result.rows["level"] != "layer class"]
    changed: pd.DataFrame = rows[(rows["level"] == "step") | (rows["verdict"] != "same")]
    return changed


def _shown(result: DiffResult, top: int) -> list[tuple[str, ...]]:
    """The step, and of phases, classes and layers what changed, the most first."""
    rows = _changed(result)
    parts = [rows[rows["level"] == level].head(top).to_dict("records") for level in LEVELS[:-1]]
    return [_cells(row) for part in parts for row in part]


def _unshown(result: DiffResult, shown: int) -> str:
    more, same = len(_changed(result)) - shown, int((result.rows["verdict"] == "same").sum())
    return "; ".join(
        part
        for part in (f"{more} more changed" if more else "", f"{same} rows without a change" if same else "")
        if part
    )


def _cells(row: Any) -> tuple[str, ...]:
    known = row["change"] == row["change"]
    interval = f"{100 * row['low']:+.1f} … {100 * row['high']:+.1f} %" if row["low"] == row["low"] else ""
    change = f"{100 * row['change']:+.1f} %" if known else ""
    return (named(row), _MS(int(row["base_ns"])), _MS(int(row["new_ns"])), change, interval, row["verdict"])


def _kernel_lines(result: DiffResult, top: int) -> list[str]:
    lines = []
    for row in result.kernels.head(top).to_dict("records"):
        name = row["name"][:90] + (f" → {row['now'][:90]}" if row["now"] else "")
        spent = " → ".join(_MS(int(row[side])) or "0" for side in ("base_ns", "new_ns"))
        lines.append(f"{row['what']}: {name} ({row['kernel_class']}, {row['count']:g} per step, {spent} ms)")
    return lines + ([f"… and {len(result.kernels) - top} more"] if len(result.kernels) > top else [])


def _gate_lines(result: DiffResult) -> list[tuple[bool, str]]:
    return [(one.held, f"{'holds' if one.held else 'FAILS'}: {one.gate.text}: {one.reason}") for one in result.gates]


def _escaped(text: str) -> str:
    """A text in which markdown finds neither markup nor a link."""
    plain = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    return _MARKUP.sub(r"\\\g<0>", plain)
