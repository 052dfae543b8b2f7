"""Text report of a comparison: for the terminal, and as Markdown for a pull request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._analysis.diff.diff import ALIKE, COLUMNS, LEVELS
from nvprof_kit._analysis.diff.effects import within
from nvprof_kit._analysis.diff.gates import named
from nvprof_kit._analysis.layers.fold import fold_ranked
from nvprof_kit._report.text.table import Column, Grid, capture_line, warning_lines
from nvprof_kit._report.text.texts import MS
from nvprof_kit._result.formats import title
from nvprof_kit.issues import plural

if TYPE_CHECKING:
    from nvprof_kit._analysis.diff.diff import Diff
    from nvprof_kit._trace.schema import CaptureInfo

_CAUSES = {"": "", "work": ", by work", "efficiency": ", by efficiency", "both": ", by work and efficiency"}
_MARKUP = re.compile(r"[\\|*`\[\]]")
_UNIT = "Milliseconds per {0}: geometric means, not the median {0}"
_FOLDED = (
    "xN: equal blocks in one line: their sums, and the widest ends of their intervals. "
    "--no-fold prints one line per block."
)
_COLUMNS = {
    "row": Column("", "path"),
    "base": Column("base", rank=2),
    "new": Column("new", rank=0),
    "change": Column("change", rank=0),
    "interval": Column("95 % interval", rank=3),
    "verdict": Column("verdict", "words"),
}


@dataclass(frozen=True)
class _Content:
    """What is printed of a comparison: the rows that changed, the kernels, and sentences about all others."""

    rows: list[dict[Any, Any]]
    unshown: str
    kernels: list[str]
    kernels_title: str
    gates: list[tuple[bool, str]]
    notes: list[str]


def _content(result: Diff) -> _Content:
    """The step, then the changed phases, classes and layers, the largest change first, equal blocks in one row; and the
    first kernels.
    """
    top, unit = result.select.top or 15, result.unit
    rows = result.among(result.rows) if result.view == "rows" else result.rows
    changed = rows[(rows["level"] == "step") | ~rows["verdict"].isin(("same", "undecided"))]
    layers = changed[changed["level"] == "layer"]
    folded = fold_ranked(layers, COLUMNS, "change_ns", result.select.fold, ALIKE)
    if folded is not layers:
        folded["change"] = (folded["change_ns"] / folded["base_ns"].where(folded["base_ns"] > 0)).astype("float64")
    by_level = {level: folded if level == "layer" else changed[changed["level"] == level] for level in [*LEVELS][:-1]}
    more = sum(len(level_rows.iloc[top:]) for level_rows in by_level.values())
    unshown = [f"{more} more changed"] if more else []
    rows = rows[rows["level"].isin(("phase", "class", "layer"))]
    same, undecided = (rows[rows["verdict"] == verdict] for verdict in ("same", "undecided"))
    if len(same):
        unshown.append(f"{plural(len(same), 'row')} the same, each within ±{100 * same['within'].max():.1f} % or less")
    if len(undecided):
        costliest = undecided.sort_values("new_ns", ascending=False, kind="stable").iloc[0]
        unshown.append(f"{plural(len(undecided), 'row')} undecided, the costliest {named(costliest)}")
    kernels = []
    for row in result.kernels.head(top).to_dict("records"):
        name = row["name"][:90] + (f" → {row['now'][:90]}" if row["now"] else "")
        times = " → ".join(MS(int(row[side])) or "0" for side in ("base_ns", "new_ns"))
        counts = " → ".join(dict.fromkeys(f"{row[side]:.4g}" for side in ("base_count", "new_count")))
        kernels.append(f"{row['what']}: {name} ({row['kernel_class']}, {counts} per {unit}, {times} ms)")
    if len(result.kernels) > top:
        kernels.append(f"… and {len(result.kernels) - top:,} more; --top N shows them")
    base, new = result.launches
    return _Content(
        [row for level_rows in by_level.values() for row in level_rows.head(top).to_dict("records")],
        "; ".join(unshown),
        kernels,
        f"New, removed and changed kernels; {base:.6g} → {new:.6g} launches per {unit}",
        [
            (outcome.held, f"{'holds' if outcome.held else 'FAILS'}: {outcome.gate.text}: {outcome.reason}")
            for outcome in result.gates
        ],
        [*([] if folded is layers else [_FOLDED]), *result.notes],
    )


def diff_report(result: Diff) -> list[RenderableType]:
    """The report for the terminal: verdict, changes, new and removed kernels, gates."""
    content, unit = _content(result), result.unit
    grid = Grid(_COLUMNS)
    for row in content.rows:
        grid.add(dict(zip(_COLUMNS, _cells(row, unit), strict=True)))
    parts: list[RenderableType] = [
        *_captures("base", result.base, result.base_steps, unit),
        *_captures("new ", result.new, result.new_steps, unit),
        "",
        Text(_headline(result), "bold"),
        "",
        grid,
        *([Text(content.unshown, "dim")] if content.unshown else []),
    ]
    if content.kernels:
        parts += ["", Text(content.kernels_title, "bold"), *map(Text, content.kernels)]
    if content.gates:
        parts += ["", *(Text(line, "" if holds else "bold red") for holds, line in content.gates)]
    times = "GPU time" if result.base[0].on_gpu else "no GPU: CPU time of operators"
    about = f"{_UNIT.format(unit)}; {times}, and wall time for the {unit}."
    return [*parts, "", *(Text(note, "dim") for note in (about, *content.notes)), *warning_lines(result.warnings)]


def diff_markdown(result: Diff) -> str:
    """The report for a pull request."""
    content, unit = _content(result), result.unit
    lines = [f"**{_headline(result)}**", ""]
    lines += [f"- {'✅' if holds else '❌'} {_escaped(line)}" for holds, line in content.gates]
    lines += [""] if content.gates else []
    lines += [f"| {' | '.join(column.name for column in _COLUMNS.values())} |", "|---|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(map(_escaped, _cells(row, unit)))} |" for row in content.rows]
    if content.kernels:
        kernels = [f"- {_escaped(line)}" for line in content.kernels]
        lines += ["", f"<details><summary>{content.kernels_title}</summary>", "", *kernels, "", "</details>"]
    lines += [f"\n> {_escaped(warning)}" for warning in result.warnings]
    base, new = (
        ", ".join(f"`{title(info.path)}`" for info in runs) + f" ({runs[0].tool}, {', '.join(runs[0].gpus)})"
        for runs in (result.base, result.new)
    )
    about = f"{base}, {result.base_steps} {unit}s; {new}, {result.new_steps} {unit}s. {_UNIT.format(unit)}."
    return "\n".join([*lines, "", about, *map(_escaped, content.notes)]) + "\n"


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
    change = f"{100 * row['change']:+.1f} %" if row["change"] == row["change"] else ""
    interval = f"{100 * row['low']:+.1f} … {100 * row['high']:+.1f} %" if row["low"] == row["low"] else ""
    difference = row.get("unlike")
    verdict = _verdict(row) + (
        f"; {difference} of its equals' change" if isinstance(difference, str) and difference else ""
    )
    verdict += _CAUSES[row.get("cause") or ""]
    name = unit if row["level"] == "step" else named(row)
    return (name, MS(int(row["base_ns"])), MS(int(row["new_ns"])), change, interval, verdict)


def _escaped(text: str) -> str:
    """Escape Markdown markup and links."""
    plain = str(text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    return _MARKUP.sub(r"\\\g<0>", plain)
