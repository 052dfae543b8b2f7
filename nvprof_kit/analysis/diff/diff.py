"""Two captures compared: what became slower or faster beyond step-to-step variation, and which kernels came and went.

The samples are the steps. Whether a difference is one is told by a rank test (Mann-Whitney), corrected for the number
of questions asked (Benjamini-Hochberg), and never by a percentage alone; a bootstrap gives the range the change lies
in. Differences below `DiffOptions.noise` are none, whatever the test says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.attribution.operations import Operations
from nvprof_kit.analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit.analysis.diff.gates import Gate, GateOutcome, corrected, judge
from nvprof_kit.analysis.diff.samples import StepSums, step_sums
from nvprof_kit.analysis.kernels.classes import Rule
from nvprof_kit.errors import CaptureError
from nvprof_kit.trace.schema import CaptureInfo, Trace

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL = ("name", "loads")
"""What `nvprof_kit.trace.open.open_capture` must read."""

COLUMNS = {
    "level": "`step` (wall time), `phase` and `class` (over all layers), `layer` (over all classes), `layer class`",
    "layer": "module path or `(none)`, '' over all",
    "phase": "phase of the layer or of the loop, '' over all",
    "kernel_class": "class of the kernels, '' over all",
    "base_ns": "median time per step in BASE",
    "new_ns": "the same in NEW",
    "change_ns": "the difference",
    "change": "the difference over `base_ns`, missing where that is 0",
    "low": "lower end of the 95 % bootstrap interval of `change`; missing for `layer class`",
    "high": "its upper end",
    "p": "Mann-Whitney's p over the steps, corrected for the number of rows of its level",
    "p_alone": "the same before the correction",
    "verdict": "`slower`, `faster`, `same`, `new`, `gone`",
}
"""The columns of `DiffResult.rows`."""

KERNEL_COLUMNS = {
    "what": "`new`, `gone` or `renamed`",
    "name": "the kernel, in BASE where it is gone or renamed",
    "now": "its name in NEW where it is renamed",
    "kernel_class": "its class",
    "count": "runs per step",
    "base_ns": "time per step in BASE",
    "new_ns": "time per step in NEW",
}
"""The columns of `DiffResult.kernels`."""

LEVELS = ("step", "phase", "class", "layer", "layer class")
"""What is compared, from the whole to its parts."""

_RESAMPLES = 999


@dataclass(frozen=True)
class DiffOptions:
    """What counts as a change.

    Attributes:
        steps: Which steps of each capture to compare, by default all but warm-up.
        min_steps: Fewest steps of each that can be compared; below four no rank test can tell anything at 5 %.
        level: Probability of calling a difference one that is none.
        noise: Relative change below which nothing is a change.
        anyway: Compare what should not be compared, with the reason as a warning.
        own_rules: Rules for kernel classes, asked before the package's.
    """

    steps: StepOptions = ALL_STEPS
    min_steps: int = 4
    level: float = 0.05
    noise: float = 0.01
    anyway: bool = False
    own_rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class DiffResult:
    """Two captures compared.

    Attributes:
        rows: The columns of `COLUMNS`, by level, within one the largest difference first.
        kernels: Kernels that are new, gone or renamed, the costliest first, with `KERNEL_COLUMNS`.
        gates: What became of each gate.
        base_steps, new_steps: Number of steps compared.
        warnings: Sentences on what may be wrong with the comparison.
        base, new: What the captures say of themselves.
    """

    rows: pd.DataFrame
    kernels: pd.DataFrame
    gates: tuple[GateOutcome, ...]
    base_steps: int
    new_steps: int
    warnings: tuple[str, ...]
    base: CaptureInfo
    new: CaptureInfo


def diff(
    base: Trace,
    new: Trace,
    gates: Sequence[Gate] = (),
    options: DiffOptions | None = None,
    known: tuple[Operations | None, Operations | None] = (None, None),
) -> DiffResult:
    """Compare two captures, opened with `OPTIONAL`.

    Args:
        base: The capture before.
        new: The capture after.
        gates: What must not become slower.
        options: What counts as a change.
        known: The operations of each, where owners and classes are known already.

    Raises:
        CaptureError: They cannot be compared: another GPU, another tool, another part of the loop, too few steps.
        UsageError: A gate limits nothing that is there.
    """
    options = options or DiffOptions()
    before, after = (
        step_sums(one, options.own_rules, options.steps, options.min_steps, known=operations)
        for one, operations in zip((base, new), known, strict=True)
    )
    reasons = [*_unlike(base.info, new.info, before, after), *_too_few(base.info, new.info, before, after, options)]
    none = not (len(before.steps) and len(after.steps))
    if reasons and (none or not options.anyway):
        raise CaptureError(f"{base.info.path} and {new.info.path} cannot be compared: {'; '.join(reasons)}")
    rows = _rows(before, after, options)
    return DiffResult(
        rows=rows,
        kernels=_kernels(before.kernels, after.kernels),
        gates=tuple(judge(gate, rows, options.level, options.noise) for gate in gates),
        base_steps=len(before.steps),
        new_steps=len(after.steps),
        warnings=(
            *(f"compared in spite of this: {reason}" for reason in reasons),
            *(
                f"{info.path}: {said}"
                for info, sums in ((base.info, before), (new.info, after))
                for said in sums.left_out
            ),
            *_blind(before, after, rows, options),
        ),
        base=base.info,
        new=new.info,
    )


def _unlike(base: CaptureInfo, new: CaptureInfo, before: StepSums, after: StepSums) -> list[str]:
    """Why the captures measure different things."""
    reasons = []
    if base.gpus != new.gpus:
        reasons.append(f"other GPUs ({', '.join(base.gpus) or 'none'}; {', '.join(new.gpus) or 'none'})")
    if base.tool.split()[0] != new.tool.split()[0]:
        reasons.append(f"other tools ({base.tool}; {new.tool})")
    phases = [{phase for layer, phase, _ in sums.by_key} & {"forward", "backward"} for sums in (before, after)]
    if phases[0] != phases[1]:
        reasons.append(f"other windows (phases {', '.join(sorted(phases[0]))}; {', '.join(sorted(phases[1]))})")
    return reasons


def _too_few(base: CaptureInfo, new: CaptureInfo, before: StepSums, after: StepSums, options: DiffOptions) -> list[str]:
    return [
        f"{info.path} has {len(sums.steps)} steps to compare, needed {options.min_steps}: capture more, or mark "
        "them with nvprof_kit.step(...)"
        for info, sums in ((base, before), (new, after))
        if len(sums.steps) < options.min_steps
    ]


def _blind(before: StepSums, after: StepSums, rows: pd.DataFrame, options: DiffOptions) -> list[str]:
    """That the steps are too few to tell a change of one layer among so many, whatever its size."""
    left, right = len(before.steps), len(after.steps)
    layers = int((rows["level"] == "layer").sum())
    if not layers or 2 * layers / math.comb(left + right, left) < options.level:
        return []
    needed = next(n for n in range(2, 1000) if 2 * layers / math.comb(2 * n, n) < options.level)
    return [
        f"{left} and {right} steps are too few to tell a change of one layer among {layers} rows of layers, however "
        f"large: capture {needed} or more of each, or name the layer in --fail-on"
    ]


Samples = dict[tuple[str, str, str, str], npt.NDArray[np.float64]]


def _samples(sums: StepSums) -> Samples:
    """Level, layer, phase and class of everything that is compared, and its values over the steps."""
    made: Samples = {("step", "", "", ""): sums.wall.astype(float)}
    for (layer, phase, kernel_class), row in sums.by_key.items():
        for key in (
            ("phase", "", phase, ""),
            ("class", "", "", kernel_class),
            ("layer", layer, phase, ""),
            ("layer class", layer, phase, kernel_class),
        ):
            made[key] = made[key] + row if key in made else row.astype(float)
    return made


def _rows(before: StepSums, after: StepSums, options: DiffOptions) -> pd.DataFrame:
    import pandas as pd

    left, right = _samples(before), _samples(after)
    parts = []
    for level in LEVELS:
        keys = [key for key in dict.fromkeys((*left, *right)) if key[0] == level]
        if keys:
            parts.append(_level(keys, left, right, options))
    rows: pd.DataFrame = pd.concat(parts, ignore_index=True)
    return rows


def _level(keys: list[tuple[str, str, str, str]], left: Samples, right: Samples, options: DiffOptions) -> pd.DataFrame:
    """The rows of one level."""
    import pandas as pd

    sides = [_matrix(keys, samples) for samples in (left, right)]
    medians = [np.median(side, axis=1) if side.shape[1] else np.zeros(len(keys)) for side in sides]
    change = np.divide(medians[1] - medians[0], medians[0], out=np.full(len(keys), np.nan), where=medians[0] > 0)
    alone = _p_values(*sides)
    p = corrected(alone)
    low, high = _intervals(*sides) if keys[0][0] != "layer class" else (np.full(len(keys), np.nan),) * 2
    told = (p < options.level) & ~(np.abs(change) < options.noise)
    verdict = np.select(
        [
            [key not in left for key in keys],
            [key not in right for key in keys],
            told & (medians[1] > medians[0]),
            told & (medians[1] < medians[0]),
        ],
        ["new", "gone", "slower", "faster"],
        "same",
    )
    columns: dict[str, Any] = dict(
        zip(("level", "layer", "phase", "kernel_class"), zip(*keys, strict=True), strict=True)
    )
    columns |= {"base_ns": medians[0], "new_ns": medians[1], "change_ns": medians[1] - medians[0]}
    columns |= {"change": change, "low": low, "high": high, "p": p, "p_alone": alone, "verdict": verdict}
    table = pd.DataFrame(columns).astype({name: "int64" for name in ("base_ns", "new_ns", "change_ns")})
    ordered: pd.DataFrame = table.iloc[np.argsort(-table["change_ns"].abs().to_numpy(), kind="stable")]
    return ordered


def _matrix(keys: list[tuple[str, str, str, str]], samples: Samples) -> npt.NDArray[np.float64]:
    width = next(len(row) for key, row in samples.items() if key[0] == keys[0][0]) if samples else 0
    return np.array([samples.get(key, np.zeros(width)) for key in keys])


def _p_values(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mann-Whitney's p of each row."""
    from scipy import stats

    if min(left.shape[1], right.shape[1]) < 2:
        return np.ones(len(left))
    constant = (left == left[:, :1]).all(axis=1) & (right == left[:, :1]).all(axis=1)
    p = np.ones(len(left))
    tied = np.array(
        [
            len(np.unique(np.concatenate(pair))) < left.shape[1] + right.shape[1]
            for pair in zip(left, right, strict=True)
        ]
    )
    for rows, method in ((~constant & ~tied, "exact"), (~constant & tied, "asymptotic")):
        if rows.any():
            p[rows] = stats.mannwhitneyu(left[rows], right[rows], axis=1, method=method).pvalue
    return p


def _intervals(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """The 95 % bootstrap interval of each row's relative change of medians."""
    from scipy import stats

    low, high = np.full(len(left), np.nan), np.full(len(left), np.nan)
    rows = (left > 0).all(axis=1)
    if rows.any() and min(left.shape[1], right.shape[1]) >= 2:

        def change(a: Any, b: Any, axis: int) -> Any:
            middle = np.median(a, axis=axis)
            return (np.median(b, axis=axis) - middle) / middle

        found = stats.bootstrap(
            (left[rows], right[rows]),
            change,
            axis=1,
            method="percentile",
            n_resamples=_RESAMPLES,
            batch=100,
            random_state=0,
        ).confidence_interval
        low[rows], high[rows] = found.low, found.high
    return low, high


def _kernels(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Kernels that only one capture has; two that do the same work are one that was renamed."""
    import pandas as pd

    gone, fresh = (
        one[~one["name"].isin(other["name"])].sort_values("gpu_ns", ascending=False, kind="stable")
        for one, other in ((before, after), (after, before))
    )
    left = fresh.to_dict("records")
    rows = []
    for old in gone.to_dict("records"):
        same = next((one for one in left if _same_work(old, one)), None)
        if same is not None:
            left.remove(same)
        now, ns = (same["name"], same["gpu_ns"]) if same else ("", 0.0)
        rows.append(
            ("renamed" if same else "gone", old["name"], now, old["kernel_class"], old["count"], old["gpu_ns"], ns)
        )
    rows += [("new", one["name"], "", one["kernel_class"], one["count"], 0.0, one["gpu_ns"]) for one in left]
    table = pd.DataFrame(rows, columns=list(KERNEL_COLUMNS)).astype({"base_ns": "int64", "new_ns": "int64"})
    order = np.argsort(-table[["base_ns", "new_ns"]].max(axis=1).to_numpy(), kind="stable")
    made: pd.DataFrame = table.iloc[order].reset_index(drop=True)
    return made


def _same_work(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two kernels are of one class and run as often per step in as many places."""
    places = [(row["kernel_class"], row["where"][0], row["where"][2]) for row in (one, other)]
    return places[0] == places[1]
