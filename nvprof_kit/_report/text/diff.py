"""Text report of a comparison: for the terminal, and as Markdown for a pull request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.diff.diff import ALIKE, COLUMNS, LEVELS, Diff
from nvprof_kit._analysis.diff.effects import within
from nvprof_kit._analysis.diff.gates import named
from nvprof_kit._analysis.layers.fold import fold_ranked
from nvprof_kit._report.text.table import Column, Grid, below, capture_line
from nvprof_kit._report.text.texts import MS, TEXTS, is_missing
from nvprof_kit._result.formats import title
from nvprof_kit.issues import plural, shortened

if TYPE_CHECKING:
    from nvprof_kit._trace.schema import CaptureInfo

_CAUSES = {"": "", "work": ", by work", "efficiency": ", by efficiency", "both": ", by work and efficiency"}
_MARKUP = re.compile(r"[\\|*`\[\]]")
_UNIT = "Milliseconds per {0}: geometric means, not the median {0}"
_RANKS = {"base_ns": 2, "new_ns": 0, "change": 0, "low": 3}
_COLUMNS = {
    "row": Column("", "path"),
    **{name: Column.of(COLUMNS, name, rank=rank) for name, rank in _RANKS.items()},
    "verdict": Column.of(COLUMNS, "verdict", "words"),
}


def _changes(result: Diff) -> tuple[list[dict[Any, Any]], str, list[str]]:
    """What changed, a sentence about the other rows, and notes.

    First the step, then the changed phases, classes and layers, the largest change first, equal blocks in one row.
    """
    top = result.select.top or 15
    rows = result.among(result.rows) if result.view == "rows" else result.rows
    changed = rows[(rows["level"] == "step") | ~rows["verdict"].isin(("same", "undecided"))]
    layers = changed[changed["level"] == "layer"]
    folded = fold_ranked(layers, COLUMNS, "change_ns", result.select.fold, ALIKE)
    if folded is not layers:
        folded["change"] = (folded["change_ns"] / folded["base_ns"].where(folded["base_ns"] > 0)).astype("float64")
    levels = [folded if level == "layer" else changed[changed["level"] == level] for level in [*LEVELS][:-1]]
    levels = [*map(result.select.sorted, levels)] if result.view == "rows" else levels
    more = sum(len(level_rows.iloc[top:]) for level_rows in levels)
    omitted = [f"{more} more changed"] if more else []
    rows = rows[rows["level"].isin(("phase", "class", "layer"))]
    same, undecided = (rows[rows["verdict"] == verdict] for verdict in ("same", "undecided"))
    if len(same):
        omitted.append(f"{plural(len(same), 'row')} the same, each within ±{100 * same['within'].max():.1f} % or less")
    if len(undecided):
        costliest = undecided.sort_values("new_ns", ascending=False, kind="stable").iloc[0]
        omitted.append(f"{plural(len(undecided), 'row')} undecided, the costliest {named(costliest)}")
    printed = [row for level_rows in levels for row in level_rows.head(top).to_dict("records")]
    notes = [] if folded is layers else [TEXTS["notes"]["folded_changes"]]
    return printed, "; ".join(omitted), [*notes, *result.notes]


def _kernels(result: Diff) -> list[str]:
    """A title, and the first new, removed and changed kernels, one line each; empty if there are none."""
    top, (base, new) = result.select.top or 15, result.launches
    kernels = result.to_frame("kernels") if result.view == "kernels" else result.kernels
    lines = [f"New, removed and changed kernels; {base:.6g} → {new:.6g} launches per {result.unit}"]
    for row in kernels.head(top).to_dict("records"):
        name = shortened(row["name"], 90) + (f" → {shortened(row['now'], 90)}" if row["now"] else "")
        times = " → ".join(MS(int(row[side])) or "0" for side in ("base_ns", "new_ns"))
        counts = " → ".join(dict.fromkeys(f"{row[side]:.4g}" for side in ("base_count", "new_count")))
        lines.append(f"{row['what']}: {name} ({row['kernel_class']}, {counts} per {result.unit}, {times} ms)")
    if len(kernels) > top:
        lines.append(f"… and {len(kernels) - top:,} more; --top N shows them")
    return lines if len(kernels) else []


def _gates(result: Diff) -> list[tuple[bool, str]]:
    outcomes = {(True, False): "holds", (True, True): "passes, undecided"}
    return [
        (gate.held, f"{outcomes.get((gate.held, gate.undecided), 'FAILS')}: {gate.gate.text}: {gate.reason}")
        for gate in result.gates
    ]


def diff_report(result: Diff) -> list[RenderableType]:
    """The report for the terminal: verdict, changes, new and removed kernels, gates."""
    (rows, omitted, notes), unit = _changes(result), result.unit
    grid = Grid(_COLUMNS)
    for row in rows:
        grid.add(dict(zip(_COLUMNS, _cells(row, unit), strict=True)))
    parts: list[RenderableType] = [*_captures("base", result.base, result.base_steps, unit)]
    parts += [*_captures("new ", result.new, result.new_steps, unit), "", Text(_headline(result), "bold"), "", grid]
    parts += [Text(omitted, "dim")] if omitted else []
    if kernels := _kernels(result):
        parts += ["", Text(kernels[0], "bold"), *map(Text, kernels[1:])]
    if gates := _gates(result):
        parts += ["", *(Text(line, "" if holds else "bold red") for holds, line in gates)]
    times = "GPU time" if result.base[0].on_gpu else "no GPU: CPU time of operators"
    about = f"{_UNIT.format(unit)}; {times}, and wall time for the {unit}."
    return [*parts, "", *below((about, *notes), result.warnings)]


def diff_markdown(result: Diff) -> str:
    """The report for a pull request."""
    (rows, _, notes), unit = _changes(result), result.unit
    lines = [f"**{_headline(result)}**", ""]
    lines += [f"- {'✅' if holds else '❌'} {_escaped(line)}" for holds, line in _gates(result)]
    lines += [""] if result.gates else []
    lines += [f"| {' | '.join(column.name for column in _COLUMNS.values())} |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(map(_escaped, _cells(row, unit)))} |" for row in rows]
    if kernels := _kernels(result):
        items = [f"- {_escaped(line)}" for line in kernels[1:]]
        lines += ["", f"<details><summary>{kernels[0]}</summary>", "", *items, "", "</details>"]
    lines += [f"\n> {_escaped(warning)}" for warning in result.warnings]
    base, new = (
        ", ".join(f"`{title(info.path)}`" for info in runs) + f" ({runs[0].tool}, {', '.join(runs[0].gpus)})"
        for runs in (result.base, result.new)
    )
    about = f"{base}, {result.base_steps} {unit}s; {new}, {result.new_steps} {unit}s. {_UNIT.format(unit)}."
    return "\n".join([*lines, "", about, *map(_escaped, notes)]) + "\n"


def _captures(side: str, runs: tuple[CaptureInfo, ...], count: int, unit: str) -> list[Text]:
    """A line for one run; for several, a line each and the total number of steps or blocks."""
    blocks, steps = ("", count) if unit == "step" else (f" · {count} {unit}s", 0)
    if len(runs) == 1:
        return [Text(f"{side} ").append_text(capture_line(runs[0], steps, steps)).append(blocks)]
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
        if noise.assumed:
            return f"{changed}, beyond the noise assumed for one run a side ({within(noise.step)})"
        return f"{changed} (p = {step['p']:.2g})"
    if noise.assumed:
        return (
            f"The {result.unit} takes {times} ({change}); one run a side, so the noise between runs is unknown: "
            f"no verdict {within(noise.step)}"
        )
    return f"The {result.unit} is {_verdict(step)}: {times} ({change})"


def _verdict(row: Any) -> str:
    """The verdict; for ``same``, with the margin."""
    same = row["verdict"] == "same" and row["within"] == row["within"]
    return f"the same within ±{max(100 * row['within'], 0.1):.1f} %" if same else str(row["verdict"])


def _cells(row: Any, unit: str) -> tuple[str, ...]:
    """A row of the table of changes, in the order of `_COLUMNS`."""
    change = f"{100 * row['change']:+.1f} %" if not is_missing(row["change"]) else ""
    interval = f"{100 * row['low']:+.1f} … {100 * row['high']:+.1f} %" if not is_missing(row["low"]) else ""
    verdict = _verdict(row)
    if isinstance(difference := row.get("unlike"), str) and difference:
        verdict += f"; {difference} of its equals' change"
    verdict += _CAUSES[row.get("cause") or ""]
    name = unit if row["level"] == "step" else named(row)
    return (name, MS(int(row["base_ns"])), MS(int(row["new_ns"])), change, interval, verdict)


def _escaped(text: str) -> str:
    """Escape Markdown markup and links."""
    plain = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    return _MARKUP.sub(r"\\\g<0>", plain)
