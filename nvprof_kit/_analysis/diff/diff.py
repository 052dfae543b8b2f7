"""Compare two captures, or several of each program: what became slower or faster beyond the noise of steps and runs,
what stayed the same and with what certainty, what cannot be decided, and which kernels are new or gone.

The model is in `nvprof_kit._analysis.diff.effects`. Its p is corrected for the number of rows tested
(Benjamini-Hochberg); without that, five of a hundred unchanged layers would be called changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

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
    step_samples,
)
from nvprof_kit._analysis.flops.work import Key as LayerPhase
from nvprof_kit._analysis.layers.fold import mark_ranked
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._result.result import Result, renderers, table_named
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue, as_issues

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL = ("name", "loads")
"""What `nvprof_kit._trace.open.open_capture` must read."""

COLUMNS: Columns = {
    "level": Column(
        "`step` (wall time), `phase` and `class` (over all layers), `layer` (over all classes), `layer class`",
        kind="str",
    ),
    "layer": Column("module path or `(none)`; '' for all layers", kind="str"),
    "phase": Column("phase of the layer or of the loop; '' for all phases", kind="str"),
    "kernel_class": Column("kernel class; '' for all classes", kind="str"),
    "base_ns": Column(
        "time per step in BASE: the geometric mean over the compared steps (not the median of `breakdown`), "
        "or the arithmetic mean if a step lacks the row",
        "ns",
    ),
    "new_ns": Column("the same in NEW", "ns"),
    "change_ns": Column("the difference", "ns"),
    "change": Column("the difference divided by `base_ns`; missing if that is 0", "share", kind="float"),
    "low": Column(
        "lower end of the 95 % confidence interval of `change`; missing with too few steps",
        "share",
        kind="float",
        fold="min",
    ),
    "high": Column("upper end of the interval", "share", kind="float", fold="max"),
    "p": Column(
        "p-value of no change (t test), corrected for the number of rows of the same level; missing if a side has one "
        "run, because the noise between runs is then assumed",
        kind="float",
        fold="max",
    ),
    "p_alone": Column("the p-value before the correction; missing as `p` is", kind="float", fold="max"),
    "verdict": Column("`slower`, `faster`, `same`, `undecided`, `new`, `gone`", kind="str"),
    "within": Column("the change is within ± this value with 95 % confidence", "share", kind="float", fold="max"),
    "at_most": Column(
        "the change is below this value with 95 % confidence; gates compare it with their limit",
        "share",
        kind="float",
        fold="max",
    ),
    "error": Column(
        "standard error of `change`, from steps and runs; missing if `change` is", "share", kind="float", fold="max"
    ),
    "df": Column(
        "degrees of freedom of `error`; 1e6 if it is only the lower bound of the noise between runs",
        kind="float",
        fold="min",
    ),
    "base_flops": Column(
        "floating point operations counted per step of BASE, if counts lie beside both captures (as are the next)",
        "flop",
        kind="float",
    ),
    "new_flops": Column("the same in NEW", "flop", kind="float"),
    "base_bytes": Column("bytes of inputs and outputs of the operators counted in BASE", "bytes", kind="float"),
    "new_bytes": Column("the same in NEW", "bytes", kind="float"),
    "work_ns": Column(
        "the part of `change_ns` that the change of work explains: `base_ns` times the change of the least time for "
        "it (`limit_ns` of `flops`), summed over layers; the rest is a change of efficiency",
        "ns",
        kind="float",
    ),
    "cause": Column(
        "of a changed layer or phase: `work` if `work_ns` is at least three quarters of `change_ns`, `efficiency` if "
        "at most one quarter, or else `both`",
        kind="str",
        fold="first",
    ),
}
"""The columns of `Diff.rows`."""

LEVELS = {
    "step": [],
    "phase": ["phase"],
    "class": ["kernel_class"],
    "layer": ["layer", "phase"],
    "layer class": KEY,
}
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
            return rows
        rows = self.among(rows)
        if not self.select.fold:
            return rows
        return mark_ranked(rows, COLUMNS, "change_ns", ALIKE)

    def among(self, rows: pd.DataFrame) -> pd.DataFrame:
        if not self.select.where:
            return rows
        matches: pd.DataFrame = rows[[not layer or self.select.matches(layer) for layer in rows["layer"].astype(str)]]
        return matches

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
    with_communication: bool = False,
    allow_undecided: bool = False,
    anyway: bool = False,
) -> Diff:
    """Compare two captures, opened with `OPTIONAL`, or several runs of each program.

    Args:
        base: The operations of the capture before, or of several runs.
        new: Those of the capture after, or of several runs.
        gates: What must not become slower.
        steps: Which steps of each capture to compare, by default all but warm-up.
        run_noise: Standard deviation of GPU time from run to run of one program, relative: the least where it is
            measured, what is assumed where a side has one run. None for `RUN_NOISE` and `ASSUMED_NOISE`.
        with_communication: Whether layers and phases count communication, which is mostly waiting for other ranks.
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
    before, after = runs[: len(base)], runs[len(base) :]
    reasons = [
        reason
        for info, run in zip(infos[1:], runs[1:], strict=True)
        for reason in _unlike(infos[0], info, runs[0], run)
    ]
    reasons += [
        f"{info.path} has {len(run.steps)} steps to compare, needed {MIN_STEPS}: capture more, or mark "
        "them with nvprof_kit.step(...)"
        for info, run in zip(infos, runs, strict=True)
        if len(run.steps) < MIN_STEPS
    ]
    reasons = list(dict.fromkeys(reasons))
    if reasons and not (anyway and all(len(run.steps) for run in runs)):
        raise CaptureError(f"{infos[0].path} and {infos[len(base)].path} cannot be compared: {'; '.join(reasons)}")
    on_gpu = all(info.on_gpu for info in infos)
    wall_ns = sum(float(run.wall.sum()) for run in runs)
    idle = max(1 - sum(run.times.to_numpy().sum() for run in runs) / wall_ns, 0.0) if wall_ns else 0.0
    noise = Noise.between(min(len(before), len(after)), idle, on_gpu, run_noise)
    rows, changes = _rows(before, after, noise, with_communication)
    kernels, launches = compared_kernels(before, after)
    assumed = noise if noise.assumed else None
    return Diff(
        rows=rows,
        kernels=kernels,
        gates=tuple(judge(gate, rows, assumed, allow_undecided) for gate in gates),
        base_steps=sum(len(run.steps) for run in before),
        new_steps=sum(len(run.steps) for run in after),
        warnings=as_issues("compared-anyway", (f"compared in spite of this: {reason}" for reason in reasons)),
        base=tuple(infos[: len(base)]),
        new=tuple(infos[len(base) :]),
        launches=launches,
        noise=noise,
        unit="block" if runs[0].blocks else "step",
        notes=(
            *_block_notes(before, after),
            *(f"{info.path}: {excluded}" for info, run in zip(infos, runs, strict=True) for excluded in run.left_out),
            *_stall_notes(infos, runs, changes),
            *_notes(rows, noise, on_gpu, changes, with_communication),
        ),
    )


def with_work(result: Diff, works: tuple[Mapping[LayerPhase, dict[str, float]], ...]) -> Diff:
    """Tell the change of work from the change of efficiency, in columns and a note.

    Args:
        result: The comparison of steps.
        works: What a step of BASE and of NEW computes, by `nvprof_kit._analysis.flops.work.work_per_step`.
    """
    table = result.rows.copy()
    is_layer = table["level"] == "layer"
    keys = [*zip(table["layer"], table["phase"], strict=True)]
    amounts = {
        f"{side}_{amount}": np.array([work.get(key, {}).get(amount, 0.0) for key in keys])
        for side, work in zip(("base", "new"), works, strict=True)
        for amount in ("flops", "bytes", "limit_ns")
    }
    base_ns, change_ns = (table[name].to_numpy(dtype=np.float64) for name in ("base_ns", "change_ns"))
    limits = [amounts.pop(f"{side}_limit_ns") for side in ("base", "new")]
    with np.errstate(divide="ignore", invalid="ignore"):
        amounts["work_ns"] = base_ns * (limits[1] / limits[0] - 1)  # NaN where neither side has work
    amounts["work_ns"][np.isinf(amounts["work_ns"])] = np.nan
    replaced = ((base_ns == 0) & (limits[1] > 0)) | ((limits[0] > 0) & (base_ns == -change_ns))
    amounts["work_ns"][replaced] = change_ns[replaced]
    table = table.assign(**{name: np.where(is_layer, values, np.nan) for name, values in amounts.items()})
    layers = table[is_layer]
    for index, level, phase in zip(table.index, table["level"], table["phase"], strict=True):
        if level in ("phase", "step"):
            parts = layers if level == "step" else layers[layers["phase"] == phase]
            table.loc[index, [*amounts]] = parts[[*amounts]].sum(min_count=1)
    share = (table["work_ns"] / table["change_ns"].where(table["change_ns"] != 0)).to_numpy(dtype=np.float64)
    is_changed = ~table["verdict"].isin(("same", "undecided")).to_numpy() & (table["level"] != "step").to_numpy()
    is_changed &= np.isfinite(share)
    cause = np.select([~is_changed, share >= 0.75, share <= 0.25], ["", "work", "efficiency"], "both")
    return replace(result, rows=table.assign(cause=cause), notes=(_work_note(table), *result.notes))


def _work_note(table: pd.DataFrame) -> str:
    """How the work of a step changed, and what part of the change of its layers that explains."""
    step = table[table["level"] == "step"].iloc[0]
    units = (("flops", 1e12, "TFLOP"), ("bytes", 1e9, "GB of operators' inputs and outputs"))
    amounts = [
        f"{base / unit:.4g} → {new / unit:.4g} {name}" + (f" ({100 * (new / base - 1):+.1f} %)" if base else "")
        for base, new, unit, name in (
            (step[f"base_{key}"], step[f"new_{key}"], unit, name) for key, unit, name in units
        )
    ]
    text = f"Work counted per step: {', '.join(amounts)}"
    explained = table[(table["level"] == "layer") & table["work_ns"].notna()]
    if not len(explained):
        return f"{text}; how much time that explains is unknown without the GPU's peaks."
    change, work = (float(explained[name].sum()) / 1e6 for name in ("change_ns", "work_ns"))
    return (
        f"{text}. Of {change:+.3f} ms in layers with counted work, {work:+.3f} ms is the change of work and "
        f"{change - work:+.3f} ms the change of efficiency."
    )


def _block_notes(before: Sequence[Samples], after: Sequence[Samples]) -> list[str]:
    """That blocks are compared instead of steps, the median block, and how long the GPU was idle."""
    if not before[0].blocks:
        return []
    base_ns, new_ns = (float(np.median(np.concatenate([run.wall for run in side]))) for side in (before, after))
    change = f" ({new_ns / base_ns - 1:+.0%})" if base_ns else ""
    idle = [
        f"{sum(run.idle_ns for run in side) / 1e6:.1f} of {sum(run.window_ns for run in side) / 1e6:.1f}"
        for side in (before, after)
    ]
    return [
        f"The captures have no steps: runs of a block of {before[0].blocks} are compared, without those at the "
        "window's edge.",
        f"The median block takes {base_ns / 1e6:.2f} → {new_ns / 1e6:.2f} ms{change}; the GPU is idle for "
        f"{' → '.join(idle)} ms of the window.",
    ]


def _unlike(base: CaptureInfo, new: CaptureInfo, before: Samples, after: Samples) -> list[str]:
    """Reasons why two captures measure different things."""
    reasons = []
    if base.gpus != new.gpus:
        reasons.append(f"other GPUs ({', '.join(base.gpus) or 'none'}; {', '.join(new.gpus) or 'none'})")
    if base.tool.split()[0] != new.tool.split()[0]:
        reasons.append(f"other tools ({base.tool}; {new.tool})")
    phases = [{*run.times.index.get_level_values("phase")} & {"forward", "backward"} for run in (before, after)]
    if phases[0] != phases[1]:
        reasons.append(f"other windows (phases {', '.join(sorted(phases[0]))}; {', '.join(sorted(phases[1]))})")
    return reasons


def _notes(
    rows: pd.DataFrame, noise: Noise, on_gpu: bool, changes: Mapping[str, Effects], with_communication: bool
) -> list[str]:
    """What a reader could otherwise misunderstand about how the captures were compared."""
    notes = []
    comm = rows[(rows["level"] == "class") & (rows["kernel_class"] == "comm")]
    if len(comm) and not with_communication:
        notes.append(
            "Layers and phases are compared without communication, which may be waiting for other ranks; "
            "--with-communication counts it."
        )
    if noise.assumed:
        notes.append(
            f"One run a side: the noise between runs is unknown. Assumed: GPU time {within(noise.operations)} "
            f"(--run-noise), time of the host {within(HOST_NOISE)}, this step {within(noise.step)}. "
            "Several runs a side measure it: diff BASE1 BASE2 BASE3 --vs NEW1 NEW2 NEW3."
            if on_gpu
            else f"One run a side: the noise between runs is unknown. Assumed: CPU time {within(HOST_NOISE)}. "
            "Several runs a side measure it: diff BASE1 BASE2 BASE3 --vs NEW1 NEW2 NEW3."
        )
    widening = changes["layer"].widening if "layer" in changes else 1.0
    if widening > 1:
        notes.append(
            f"Equal layers differ {widening:.1f} times more between the captures than their steps predict; the "
            "intervals of layers are that much wider."
        )
    return notes


def _stall_notes(infos: Sequence[CaptureInfo], runs: Sequence[Samples], changes: Mapping[str, Effects]) -> list[str]:
    """A sentence for each run of which rows leave a step out because they stalled in it."""
    notes = []
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
            notes.append(
                f"{info.path}: left out because it took much longer than the other steps: {', '.join(stalls)}."
            )
    return notes


def _rows(
    before: Sequence[Samples], after: Sequence[Samples], noise: Noise, with_communication: bool
) -> tuple[pd.DataFrame, dict[str, Effects]]:
    """The rows of all levels, and the changes of each level that has rows."""
    import pandas as pd

    parts, changes = [], {}
    for level, names in LEVELS.items():
        runs = []
        for run in (*before, *after):
            table = run.times if level != "step" else pd.DataFrame([run.wall])
            if level not in ("step", "class") and not with_communication:
                table = table[table.index.get_level_values("kernel_class") != "comm"]
            keys_of_rows = [
                table.index.get_level_values(name).astype(str) if name in names else [""] * len(table) for name in KEY
            ]
            runs.append(table.groupby(keys_of_rows).sum() if len(table) else table)
        keys = pd.concat(runs).index.unique()
        if len(keys):
            times = [run.reindex(keys, fill_value=0).to_numpy(dtype=np.float64) for run in runs]
            # layers whose paths differ only in their numbers are equal
            equals, _ = pd.factorize(pd.Series([(_NUMBER.sub("*", key[0]), *key[1:]) for key in keys]))
            run_noise = noise.step if level == "step" else noise.operations
            widen = level in ("layer", "layer class")
            changes[level] = effects(times[: len(before)], times[len(before) :], equals, run_noise, widen)
            parts.append(_level(level, keys, changes[level], noise))
    return pd.concat(parts, ignore_index=True), changes


def _level(level: str, keys: pd.MultiIndex, changes: Effects, noise: Noise) -> pd.DataFrame:
    """The rows of one level. A p from noise that is only assumed decides, but is not told."""
    import pandas as pd

    p = corrected(changes.p)
    significant = (p < LEVEL) & ~(np.abs(changes.change) < NOISE)
    bound = np.maximum(np.abs(changes.low), np.abs(changes.high))
    verdict = np.select(
        [
            (changes.base == 0) & (changes.new > 0),
            (changes.new == 0) & (changes.base > 0),
            significant & (changes.change > 0),
            significant & (changes.change < 0),
            (bound <= TOLERANCE) | ((changes.base == 0) & (changes.new == 0)),
        ],
        ["new", "gone", "slower", "faster", "same"],
        "undecided",
    )
    base_ns, new_ns = (np.rint(side).astype(np.int64) for side in (changes.base, changes.new))
    columns: dict[str, Any] = {"level": level, **{name: keys.get_level_values(row) for row, name in enumerate(KEY)}}
    columns |= {"base_ns": base_ns, "new_ns": new_ns, "change_ns": new_ns - base_ns, "change": changes.change}
    columns |= {"low": changes.low, "high": changes.high, "p": p, "p_alone": changes.p, "verdict": verdict}
    columns |= {"within": bound, "at_most": changes.at_most, "error": changes.error, "df": changes.df}
    table = pd.DataFrame(columns)
    if noise.assumed:
        table[["p", "p_alone"]] = np.nan
    ordered: pd.DataFrame = table.iloc[np.argsort(-table["change_ns"].abs().to_numpy(), kind="stable")]
    return ordered
