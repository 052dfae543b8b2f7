"""Text report of a comparison: for the terminal, and as Markdown for a pull request."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.diff.diff import ALIKE, COLUMNS, LEVELS
from nvprof_kit._analysis.diff.effects import within
from nvprof_kit._analysis.diff.gates import named
from nvprof_kit._analysis.layers.fold import fold_ranked
from nvprof_kit._report.text.table import capture_line, table, warning_lines
from nvprof_kit._report.text.texts import MS
from nvprof_kit._result.formats import title
from nvprof_kit.issues import plural

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.diff.diff import Diff
    from nvprof_kit._trace.schema import CaptureInfo

_CAUSES = {"": "", "work": ", by work", "efficiency": ", by efficiency", "both": ", by work and efficiency"}
_MARKUP = re.compile(r"[\\|*`\[\]]")
_UNIT = "Milliseconds per {0}: geometric means, not the median {0}"
_HEAD = ("", "base", "new", "change", "95 % interval", "verdict")


def diff_report(result: Diff) -> list[RenderableType]:
    """The report for the terminal: verdict, changes, new and removed kernels, gates."""
    result, top, fold = _selected(result)
    changed = _changed(result, fold)
    rows = _shown(changed, top)
    times = "GPU time" if result.base.on_gpu else "no GPU: CPU time of operators"
    kinds = {0: "path", 5: "words"}
    ranks = {"new": 0, "change": 0, "verdict": 1, "base": 2, "95 % interval": 3}
    grid = table([(name, kinds.get(column, "right")) for column, name in enumerate(_HEAD)], ranks)
    for row in rows:
        grid.add_row(*_cells(row, result.unit), cost=None if row["level"] == "step" else abs(row["change_ns"]))
    grid.way = "--top N or -o FILE.csv shows them"
    parts: list[RenderableType] = [
        *_captures("base", result.base_runs or (result.base,), result.base_steps, result.unit),
        *_captures("new ", result.new_runs or (result.new,), result.new_steps, result.unit),
        "",
        Text(_headline(result), "bold"),
        "",
        grid,
        *([Text(unshown, "dim")] if (unshown := _unshown(result, len(changed) - len(rows))) else []),
    ]
    if len(result.kernels):
        lines, more = _kernel_lines(result, top)
        parts += ["", Text(_kernel_head(result), "bold"), *map(Text, lines)]
        parts += [Text(f"… and {more:,} more; --top N shows them", "dim")] if more else []
    if result.gates:
        parts += ["", *(Text(line, "" if holds else "bold red") for holds, line in _gate_lines(result))]
    return [
        *parts,
        "",
        Text(f"{_UNIT.format(result.unit)}; {times}, and wall time for the {result.unit}.", "dim"),
        *(Text(note, "dim") for note in _fold_notes(changed)),
        *(Text(note, "dim") for note in result.notes),
        *warning_lines(result.warnings),
    ]


def _selected(result: Diff) -> tuple[Diff, int, bool | None]:
    """The comparison of the selected layers, the maximum number of rows per level, and whether to fold equal blocks."""
    rows = result.among(result.rows) if result.view == "rows" else result.rows
    return replace(result, rows=rows), result.select.top or 15, result.select.fold


def diff_markdown(result: Diff) -> str:
    """The report for a pull request."""
    result, top, fold = _selected(result)
    changed = _changed(result, fold)
    rows = _shown(changed, top)
    lines, unit = [f"**{_headline(result)}**", ""], result.unit
    lines += [f"- {'✅' if holds else '❌'} {_escaped(line)}" for holds, line in _gate_lines(result)]
    lines += [""] if result.gates else []
    lines += [f"| {' | '.join(_HEAD)} |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(map(_escaped, _cells(row, result.unit)))} |" for row in rows]
    if len(result.kernels):
        lines += ["", f"<details><summary>{_kernel_head(result)}</summary>", ""]
        kernels, more = _kernel_lines(result, top)
        lines += [f"- {_escaped(line)}" for line in (*kernels, *([f"… and {more} more"] if more else []))]
        lines += ["", "</details>"]
    lines += [f"\n> {_escaped(warning)}" for warning in result.warnings]
    base, new = (
        ", ".join(f"`{title(info.path)}`" for info in runs) + f" ({side.tool}, {', '.join(side.gpus)})"
        for side, runs in ((result.base, result.base_runs), (result.new, result.new_runs))
    )
    lines += [
        "",
        f"{base}, {result.base_steps} {unit}s; {new}, {result.new_steps} {unit}s. {_UNIT.format(unit)}.",
        *map(_escaped, (*_fold_notes(changed), *result.notes)),
    ]
    return "\n".join(lines) + "\n"


def _captures(side: str, runs: tuple[CaptureInfo, ...], count: int, unit: str) -> list[Text]:
    """A line for one run; for several, a line each and the total number of steps or blocks."""
    blocks = f" · {count} {unit}s" if unit != "step" else ""
    if len(runs) == 1:
        return [Text(f"{side} ").append_text(capture_line(runs[0], 0 if blocks else count)).append(blocks)]
    return [
        *(Text(f"{side} {title(info.path)}") for info in runs),
        Text(f"     {count} {unit}s of {len(runs)} runs", "dim"),
    ]


def _headline(result: Diff) -> str:
    """One sentence about the change of the step time."""
    step = result.rows.iloc[0]
    times = f"{MS(int(step['base_ns']))} → {MS(int(step['new_ns']))} ms"
    change = f"{100 * step['change']:+.1f} %"
    noise = result.noise
    if step["verdict"] in ("slower", "faster"):
        changed = f"The {result.unit} is {step['verdict']} by {abs(100 * step['change']):.1f} %: {times}"
        if noise and noise.assumed:
            return f"{changed}, beyond the noise assumed for one run a side ({within(noise.step)})"
        return f"{changed} (p = {step['p']:.2g})"
    if noise and noise.assumed:
        return (
            f"The {result.unit} takes {times} ({change}); one run a side, so the noise between runs is unknown: "
            f"no verdict {within(noise.step)}"
        )
    return f"The {result.unit} is {_verdict(step)}: {times} ({change})"


def _verdict(row: Any) -> str:
    """The verdict; for ``same``, with the margin."""
    same = row["verdict"] == "same" and row["within"] == row["within"]
    return f"the same within ±{max(100 * row['within'], 0.1):.1f} %" if same else str(row["verdict"])


def _changed(result: Diff, fold: bool | None) -> pd.DataFrame:
    """The step, and what changed; equal blocks in one row with their sums, and the widest ends of their intervals."""
    import pandas as pd

    rows = result.rows[result.rows["level"] != "layer class"]
    same = rows["verdict"].isin(("same", "undecided"))
    changed: pd.DataFrame = rows[(rows["level"] == "step") | ~same]
    layers = changed[changed["level"] == "layer"]
    folded = fold_ranked(layers, COLUMNS, "change_ns", fold, ALIKE)
    if folded is layers:
        return changed
    folded["change"] = (folded["change_ns"] / folded["base_ns"].where(folded["base_ns"] > 0)).astype("float64")
    with_folded: pd.DataFrame = pd.concat([changed[changed["level"] != "layer"], folded], ignore_index=True)
    return with_folded


def _fold_notes(changed: pd.DataFrame) -> list[str]:
    if "unlike" not in changed:
        return []
    note = "xN: equal blocks in one line: their sums, and the widest ends of their intervals"
    return [f"{note}. --no-fold prints one line per block."]


def _shown(rows: pd.DataFrame, top: int) -> list[dict[Any, Any]]:
    """The step, then the changed phases, classes and layers, the largest change first."""
    parts = [rows[rows["level"] == level].head(top).to_dict("records") for level in LEVELS[:-1]]
    return [row for level_rows in parts for row in level_rows]


def _unshown(result: Diff, more: int) -> str:
    rows = result.rows[result.rows["level"].isin(("phase", "class", "layer"))]
    same, undecided = (rows[rows["verdict"] == verdict] for verdict in ("same", "undecided"))
    parts = [f"{more} more changed"] if more else []
    if len(same):
        parts.append(f"{plural(len(same), 'row')} the same, each within ±{100 * same['within'].max():.1f} % or less")
    if len(undecided):
        costliest = undecided.sort_values("new_ns", ascending=False, kind="stable").iloc[0]
        parts.append(f"{plural(len(undecided), 'row')} undecided, the costliest {named(costliest)}")
    return "; ".join(parts)


def _cells(row: Any, unit: str) -> tuple[str, ...]:
    change = f"{100 * row['change']:+.1f} %" if row["change"] == row["change"] else ""
    interval = f"{100 * row['low']:+.1f} … {100 * row['high']:+.1f} %" if row["low"] == row["low"] else ""
    difference = row.get("unlike")
    verdict = _verdict(row) + (
        f"; {difference} of its equals' change" if isinstance(difference, str) and difference else ""
    )
    verdict += _CAUSES[row.get("cause") or ""]
    name = unit if row["level"] == "step" else named(row)
    return (name, MS(int(row["base_ns"])), MS(int(row["new_ns"])), change, interval, verdict)


def _kernel_head(result: Diff) -> str:
    base, new = result.launches
    return f"New, removed and changed kernels; {base:.6g} → {new:.6g} launches per {result.unit}"


def _kernel_lines(result: Diff, top: int) -> tuple[list[str], int]:
    """The kernels, and how many are left out."""
    lines = []
    for row in result.kernels.head(top).to_dict("records"):
        name = row["name"][:90] + (f" → {row['now'][:90]}" if row["now"] else "")
        times = " → ".join(MS(int(row[side])) or "0" for side in ("base_ns", "new_ns"))
        counts = dict.fromkeys(f"{row[side]:.4g}" for side in ("base_count", "new_count"))
        lines.append(
            f"{row['what']}: {name} ({row['kernel_class']}, {' → '.join(counts)} per {result.unit}, {times} ms)"
        )
    return lines, max(len(result.kernels) - top, 0)


def _gate_lines(result: Diff) -> list[tuple[bool, str]]:
    return [
        (outcome.held, f"{'holds' if outcome.held else 'FAILS'}: {outcome.gate.text}: {outcome.reason}")
        for outcome in result.gates
    ]


def _escaped(text: str) -> str:
    """Escape Markdown markup and links."""
    plain = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    return _MARKUP.sub(r"\\\g<0>", plain)
