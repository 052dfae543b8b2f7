"""Compare two captures, or several of each program: what became slower or faster beyond the noise of steps and runs,
what stayed the same and with what certainty, what cannot be decided, and which kernels are new or gone.

The model is in `nvprof_kit._analysis.diff.effects`. Its p is corrected for the number of rows tested
(Benjamini-Hochberg); without that, five of a hundred unchanged layers would be called changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.diff.effects import HOST_NOISE, Effects, Noise, effects, within
from nvprof_kit._analysis.diff.gates import LEVEL, NOISE, Gate, GateOutcome, corrected, judge
from nvprof_kit._analysis.diff.samples import (
    KERNEL_COLUMNS,
    KEY,
    MIN_STEPS,
    Samples,
    block_samples,
    compared_kernels,
    in_other,
    phases_of_one_side,
    step_samples,
)
from nvprof_kit._analysis.flops.work import Key as LayerPhase
from nvprof_kit._analysis.layers.fold import mark_ranked
from nvprof_kit._result.column import read_columns
from nvprof_kit._result.result import Result, renderers, table_named
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues, plural
from nvprof_kit.names import NO_PHASE

COLUMNS = read_columns("nvprof_kit._analysis.diff", "diff")
"""The columns of `Diff.rows`."""

_NOTES: Mapping[str, str] = read_toml("nvprof_kit._analysis.diff", "notes.toml")

LEVELS = {"step": [], "phase": ["phase"], "class": ["kernel_class"], "layer": ["layer", "phase"], "layer class": KEY}
"""The levels of the comparison, from the whole step to its parts, and what their rows are of."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

TOLERANCE = 0.1
"""The relative change within which a row is the same. If its interval reaches further, it is undecided."""

ALIKE = ("base_ns", "new_ns")
"""What equal blocks have in common; `change_ns` is their cost."""


@dataclass(frozen=True, repr=False, eq=False)
class Diff(Result):
    """Two captures compared, or several of each.

    Attributes:
        rows: The comparison, sorted by level, then by difference in descending order; columns `COLUMNS`.
        kernels: Kernels that are new, gone, renamed or launched a different number of times, the costliest first;
            columns `nvprof_kit._analysis.diff.samples.KERNEL_COLUMNS`.
        gates: The outcome of each gate.
        base_steps, new_steps: Number of compared steps, over all runs.
        warnings: What may be wrong with the comparison.
        base, new: Recording tool, GPUs and processes of each capture of a side.
        launches: Kernels per step in BASE and in NEW.
        noise: How much runs of one program are taken to differ.
        notes: How the captures were compared.
        unit: What the samples are, and `base_steps` and `new_steps` count: ``step``, or ``block`` of captures without
            steps.
    """

    rows: pd.DataFrame
    kernels: pd.DataFrame
    gates: tuple[GateOutcome, ...]
    base_steps: int
    new_steps: int
    warnings: tuple[Issue, ...]
    base: tuple[CaptureInfo, ...]
    new: tuple[CaptureInfo, ...]
    launches: tuple[float, float]
    noise: Noise
    notes: tuple[str, ...]
    unit: str
    view: str = "rows"

    columns: ClassVar = {"diff": COLUMNS, "diff-kernels": KERNEL_COLUMNS}
    bars: ClassVar = {"diff": (("change_ns",), ("level", "layer", "kernel_class", "phase"))}

    @property
    def held(self) -> bool:
        """Whether all gates hold; True without gates."""
        return all(outcome.held for outcome in self.gates)

    @property
    def schema(self) -> str:
        """Name of the JSON schema."""
        return "diff-kernels" if self.view == "kernels" else "diff"

    def table(self, view: str | None = None) -> pd.DataFrame:
        """The comparison (``rows``), or the kernels that are new, gone, renamed or launched a different number of times
        (``kernels``).

        Raises:
            UsageError: There is no such table.
        """
        return table_named({"rows": self.rows, "kernels": self.kernels}, view or self.view)

    def to_frame(self, view: str | None = None) -> pd.DataFrame:
        """The rows of the selected layers; where equal blocks are folded, with ``folded_into`` and ``unlike``."""
        rows = self.table(view)
        if rows is self.kernels:
            return self.select.sorted(rows)
        rows = self.among(rows)
        return self.select.sorted(mark_ranked(rows, COLUMNS, "change_ns", ALIKE) if self.select.fold else rows)

    def among(self, rows: pd.DataFrame) -> pd.DataFrame:
        """These rows of the comparison without those of layers that are not selected.

        Raises:
            UsageError: No layer matches.
        """
        self.select.among(rows[rows["layer"] != ""])
        return rows[[not layer or self.select.matches(layer) for layer in rows["layer"].astype(str)]]

    def encode(self, data_format: str) -> bytes:
        """As in `Result`; ``md`` is the full report, for a pull request comment."""
        if data_format == "md":
            report: str = renderers().shown(self, "markdown")
            return report.encode("utf-8", "replace")
        return super().encode(data_format)


def diff(
    base: Sequence[Operations],
    new: Sequence[Operations],
    gates: Sequence[Gate] = (),
    *,
    steps: StepOptions = ALL_STEPS,
    run_noise: float | None = None,
    allow_undecided: bool = False,
    anyway: bool = False,
) -> Diff:
    """Compare two captures, or several runs of each program.

    Args:
        base: The operations of the capture before, or of several runs.
        new: Those of the capture after, or of several runs.
        gates: What must not become slower.
        steps: Which steps of each capture to compare, by default all but warm-up.
        run_noise: Standard deviation of GPU time from run to run of one program, relative: the least where it is
            measured, what is assumed where a side has one run. None for `RUN_NOISE` and `ASSUMED_NOISE`.
        allow_undecided: Whether a gate that the captures cannot decide counts as held.
        anyway: Compare captures that should not be compared, with the reason as a warning.

    Raises:
        CaptureError: They cannot be compared: another GPU, another tool, another part of the loop, too few steps.
        UsageError: A gate limits nothing that is there.
    """
    infos = [run.trace.info for run in (*base, *new)]
    runs = [step_samples(run, steps) for run in (*base, *new)]
    if not any(len(run.steps) for run in runs):
        runs = [block_samples(run) for run in (*base, *new)]
    sides = runs[: len(base)], runs[len(base) :]
    reasons = _reasons_against(infos, runs)
    errors = (f"{info.path}: {issue}" for info in infos for issue in info.warnings if issue.severity == "error")
    wrong = list(dict.fromkeys(errors))
    if reasons and not (anyway and all(len(run.steps) for run in runs)):
        why = "; ".join([*reasons, *wrong])
        raise CaptureError(f"{infos[0].path} and {infos[len(base)].path} cannot be compared: {why}")
    unnamed = phases_of_one_side(sides) - {gate.target for gate in gates}
    if unnamed:
        runs = [in_other(run, unnamed) for run in runs]
        sides = runs[: len(base)], runs[len(base) :]
    wall_ns = sum(float(run.wall.sum()) for run in runs)
    idle = max(1 - sum(run.times.to_numpy().sum() for run in runs) / wall_ns, 0.0) if wall_ns else 0.0
    noise = Noise.between(min(len(base), len(new)), idle, all(info.on_gpu for info in infos), run_noise)
    compared = {level: _compare(level, sides, noise) for level in LEVELS}
    rows = pd.concat([table for table, _ in compared.values()], ignore_index=True)
    changes = {level: change for level, (_, change) in compared.items() if change is not None}
    kernels, launches = compared_kernels(*sides)
    against = (f"compared in spite of this: {reason}" for reason in reasons)
    return Diff(
        rows=rows,
        kernels=kernels,
        gates=tuple(judge(gate, rows, noise if noise.assumed else None, allow_undecided) for gate in gates),
        base_steps=sum(len(run.steps) for run in sides[0]),
        new_steps=sum(len(run.steps) for run in sides[1]),
        warnings=(*as_issues("compared-anyway", against), *as_issues("wrong-times", wrong, "error")),
        base=tuple(infos[: len(base)]),
        new=tuple(infos[len(base) :]),
        launches=launches,
        noise=noise,
        unit="block" if runs[0].blocks else "step",
        notes=tuple(_notes(infos, sides, changes, noise, unnamed)),
    )


def with_work(result: Diff, works: tuple[Mapping[LayerPhase, dict[str, float]], ...]) -> Diff:
    """Tell the change of work from the change of efficiency, in columns and a note.

    Args:
        result: The comparison of steps.
        works: What a step of BASE and of NEW computes, by `nvprof_kit._analysis.flops.work.work_per_step`.
    """
    rows = result.rows
    is_layer = rows["level"] == "layer"
    layers = pd.MultiIndex.from_frame(rows.loc[is_layer, ["layer", "phase"]])
    base, new = (
        pd.DataFrame.from_dict({**work}, orient="index").reindex(layers, fill_value=0.0).set_axis(rows.index[is_layer])
        for work in works
    )
    base_ns, change_ns = rows.loc[is_layer, "base_ns"], rows.loc[is_layer, "change_ns"]
    work_ns = base_ns * (new["limit_ns"] / base["limit_ns"] - 1)  # NaN where neither side has work
    is_new = (base_ns == 0) & (new["limit_ns"] > 0)
    is_gone = (base["limit_ns"] > 0) & (base_ns == -change_ns)
    work_ns = work_ns.where(np.isfinite(work_ns)).mask(is_new | is_gone, change_ns.astype(float))
    amounts = pd.DataFrame(
        {f"{side}_{name}": work[name] for side, work in (("base", base), ("new", new)) for name in ("flops", "bytes")}
    ).assign(work_ns=work_ns)
    by_phase = amounts.groupby(rows["phase"]).sum(min_count=1).reindex(rows.loc[rows["level"] == "phase", "phase"])
    of_phases = by_phase.set_axis(rows.index[rows["level"] == "phase"])
    step = amounts.sum(min_count=1)
    of_step = step.to_frame(int(rows.index[rows["level"] == "step"][0])).T
    table = rows.join(pd.concat([of_step, of_phases, amounts]))
    share = table["work_ns"] / table["change_ns"].where(table["change_ns"] != 0)
    is_changed = ~table["verdict"].isin(("same", "undecided")) & (table["level"] != "step") & np.isfinite(share)
    table["cause"] = np.select([~is_changed, share >= 0.75, share <= 0.25], ["", "work", "efficiency"], "both")

    parts = [
        f"{step[f'base_{key}'] / unit:.4g} → {step[f'new_{key}'] / unit:.4g} {name}"
        + (f" ({100 * (step[f'new_{key}'] / step[f'base_{key}'] - 1):+.1f} %)" if step[f"base_{key}"] else "")
        for key, unit, name in (("flops", 1e12, "TFLOP"), ("bytes", 1e9, "GB of operators' inputs and outputs"))
    ]
    total_ms, work_ms = change_ns[work_ns.notna()].sum() / 1e6, work_ns.sum() / 1e6
    times = {"total": total_ms, "work": work_ms, "efficiency": total_ms - work_ms}
    note = _NOTES["work" if work_ns.notna().any() else "work_alone"].format(parts=", ".join(parts), **times)
    return replace(result, rows=table, notes=(note, *result.notes))


def _reasons_against(infos: Sequence[CaptureInfo], runs: Sequence[Samples]) -> list[str]:
    """Why captures cannot be compared with the first of them: they measure different things, or too few steps."""
    gpus, tools = [info.gpus for info in infos], [info.tool for info in infos]
    phases = [sorted({*run.times.index.get_level_values("phase")} & {"forward", "backward"}) for run in runs]
    reasons = []
    for gpu, tool, phase in zip(gpus, tools, phases, strict=True):
        if gpu != gpus[0]:
            reasons.append(f"other GPUs ({', '.join(gpus[0]) or 'none'}; {', '.join(gpu) or 'none'})")
        if tool.split()[0] != tools[0].split()[0]:
            reasons.append(f"other tools ({tools[0]}; {tool})")
        if phase != phases[0]:
            reasons.append(f"other windows (phases {', '.join(phases[0]) or 'none'}; {', '.join(phase) or 'none'})")
    reasons += [
        f"{info.path} has {plural(len(run.steps), 'step')} to compare, needed {MIN_STEPS}: capture more, or mark "
        "them with nvprof_kit.step(...)"
        for info, run in zip(infos, runs, strict=True)
        if len(run.steps) < MIN_STEPS
    ]
    return list(dict.fromkeys(reasons))


def _compare(
    level: str, sides: tuple[list[Samples], list[Samples]], noise: Noise
) -> tuple[pd.DataFrame, Effects | None]:
    """The rows of a level, and their changes, None if there are no rows. A p from noise that is only assumed decides,
    but is not told.
    """
    runs = []
    for run in (*sides[0], *sides[1]):
        times = run.times if level != "step" else pd.DataFrame([run.wall])
        if level not in ("step", "class"):
            times = times[times.index.get_level_values("kernel_class") != "comm"]
        values_of, names = times.index.get_level_values, LEVELS[level]
        of_rows = [values_of(name).astype(str) if name in names else [""] * len(times) for name in KEY]
        runs.append((times.groupby(of_rows).sum() if len(times) else times).rename_axis(KEY))
    keys = pd.concat(runs).index.unique()
    table = keys.to_frame(index=False)
    if not len(keys):
        return table, None
    arrays = [run.reindex(keys, fill_value=0).to_numpy(dtype=np.float64) for run in runs]
    # layers whose paths differ only in their numbers are equal
    equals = table.assign(layer=table["layer"].str.replace(_NUMBER, "*", regex=True)).groupby(KEY).ngroup()
    run_noise = noise.step if level == "step" else noise.operations
    base, new = arrays[: len(sides[0])], arrays[len(sides[0]) :]
    changes = effects(base, new, np.asarray(equals, np.int64), run_noise, widen=level in ("layer", "layer class"))
    table = table.join(changes.rows.rename(columns={"base": "base_ns", "new": "new_ns", "p": "p_alone"}))
    table = table.assign(level=level, p=corrected(changes.rows["p"].to_numpy()))
    table["within"] = table[["low", "high"]].abs().max(axis=1, skipna=False)
    is_significant = (table["p"] < LEVEL) & ~(table["change"].abs() < NOISE)
    in_base, in_new = table["base_ns"] > 0, table["new_ns"] > 0
    table["verdict"] = np.select(
        [
            ~in_base & in_new,
            in_base & ~in_new,
            is_significant & (table["change"] > 0),
            is_significant & (table["change"] < 0),
            (table["within"] <= TOLERANCE) | ~(in_base | in_new),
        ],
        ["new", "gone", "slower", "faster", "same"],
        "undecided",
    )
    table[["base_ns", "new_ns"]] = table[["base_ns", "new_ns"]].round().astype(np.int64)
    table["change_ns"] = table["new_ns"] - table["base_ns"]
    if noise.assumed:
        table[["p", "p_alone"]] = np.nan
    table = table.sort_values("change_ns", ascending=False, key=abs, kind="stable")
    return table[[name for name in COLUMNS if name in table]], changes


def _notes(
    infos: Sequence[CaptureInfo],
    sides: tuple[list[Samples], list[Samples]],
    changes: Mapping[str, Effects],
    noise: Noise,
    unnamed: set[str],
) -> list[str]:
    """What a reader could otherwise misunderstand about how the captures were compared: blocks instead of steps, steps
    that are left out, as warm-up or of rows that stalled in them, communication, and the noise.
    """
    notes, runs = [], [*sides[0], *sides[1]]
    if runs[0].blocks:
        base_ns, new_ns = (float(np.median(np.concatenate([run.wall for run in side]))) for side in sides)
        change = f" ({new_ns / base_ns - 1:+.0%})" if base_ns else ""
        idle = " → ".join(
            f"{sum(run.idle_ns for run in side) / 1e6:.1f} of {sum(run.window_ns for run in side) / 1e6:.1f}"
            for side in sides
        )
        notes.append(_NOTES["blocks"].format(blocks=runs[0].blocks))
        notes.append(_NOTES["block_times"].format(change=change, idle=idle, base=base_ns / 1e6, new=new_ns / 1e6))
    notes += [f"{info.path}: {text}" for info, run in zip(infos, runs, strict=True) for text in run.left_out]
    for index, (info, run) in enumerate(zip(infos, runs, strict=True)):
        wall = changes["step"].stalled[index]
        layers = changes["layer"].stalled[index] if "layer" in changes else wall[:0]
        stalls = []
        for step in np.unique(np.concatenate((wall, layers))):
            in_layers = int((layers == step).sum())
            where = ["the step time"] * bool((wall == step).any())
            where += [f"{in_layers} of {len(layers)} rows of layers"] * bool(in_layers)
            stalls += [f"step {run.steps[step]} for {' and '.join(where)}"] * bool(step >= 0)
        if stalls:
            notes.append(_NOTES["stalls"].format(path=info.path, stalls=", ".join(stalls)))
    if unnamed:
        notes.append(_NOTES["phases"].format(phases=", ".join(sorted(unnamed)), other=NO_PHASE))
    if any("comm" in run.times.index.get_level_values("kernel_class") for run in runs):
        notes.append(_NOTES["communication"])
    if noise.assumed:
        assumed = f"CPU time {within(HOST_NOISE)}"
        if all(info.on_gpu for info in infos):
            limits = {"operations": noise.operations, "host": HOST_NOISE, "step": noise.step}
            assumed = _NOTES["noise"].format(**{name: within(limit) for name, limit in limits.items()})
        notes.append(_NOTES["one_run"].format(assumed=assumed))
    widening = changes["layer"].widening if "layer" in changes else 1.0
    if widening > 1:
        notes.append(_NOTES["widening"].format(times=widening))
    return notes
