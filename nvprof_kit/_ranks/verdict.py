"""One-sentence verdict on a job: which rank the others wait for, in which layer, why, and the cost per step.

Costs are compared by their median over steps, so that a single bad step does not mark a rank as bad. The step in which
the profilers start is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nvprof_kit._findings import Finding
from nvprof_kit._ranks.waits import NO_FAULT, kinds_of
from nvprof_kit._toml import read_toml
from nvprof_kit.issues import listing, plural
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._trace.jobs.tables import JobTables

NOTABLE = 0.03
"""Minimum share of a step for a cost to be reported."""

CRITICAL = 0.20
"""Minimum share of a step for a critical cost."""

STANDS_OUT = 2.5
"""A layer is named if it costs at least this multiple of any other layer for the same kind of cause."""

BAD_STEP = 5
"""A step is bad if it costs this multiple of the notable cost."""

ECHO = 0.25
"""A cost below this share of the rank's in the step before is an echo of that step: ranks that it held up are late too.
"""

UNMATCHED = 0.25
"""If a larger share of the collectives has no match, waiting is only a part of what there was; then the work of the
ranks is compared too."""

SLOW_LINK = 1.5
"""Transfers are slow if they take this multiple of the median of their equals."""

_TEXTS = read_toml("nvprof_kit._ranks", "verdict.toml")
_SENTENCES, _WHY, _PHRASES = (_TEXTS[table] for table in ("sentences", "why", "phrases"))
"""The verdicts without a straggler, why a rank is late, by the verdict's cause, and how it spent its time, by kind of
cause.
"""

_PLACES = ("data_loading", "garbage_collection", "warm_up", "allocation")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which rank the others wait for, if any.

    Attributes:
        rank: The late rank; None if there is none.
        layer: The layer in which it loses the time; None if it is not a single layer.
        phase: The phase of that layer; without a layer, the phase outside layers in which it loses the time, if one
            stands out (``optimizer``).
        cause: ``slow_gpu``, ``slow_layer``, ``more_work``, ``slow_host``, ``data_loading``, ``slow_link``, ``copy``,
            ``rotating``, ``one_bad_step``, ``collective``, ``garbage_collection``, ``warm_up``, ``uneven_stages``,
            ``start_up``, ``none``, …
        severity: ``none``, ``warning`` or ``critical``.
        cost_ns_per_step: Waiting time that it costs each other rank, the median over steps, in ns.
        sentence: The verdict as a sentence.
    """

    rank: int | None = None
    layer: str | None = None
    phase: str | None = None
    cause: str = "none"
    severity: str = "none"
    cost_ns_per_step: int = 0
    sentence: str

    def finding(self) -> Finding | None:
        """The finding that the other ranks wait for one; None if they do not."""
        if self.rank is None:
            return None
        return Finding(
            "slowest-rank",
            f"The other ranks wait for rank {self.rank}",
            self.sentence,
            self.layer or "",
            self.phase or "",
            saves_ns=self.cost_ns_per_step,
            fix=f"start with rank {self.rank} (cause: {self.cause.replace('_', ' ')}); nvprof-kit ranks has details",
            confidence="high" if self.severity == "critical" else "medium",
            refuted_by="the other ranks still wait as long when this rank does the same work as they do",
        )


class Judged(Protocol):
    """A result with a verdict: a job."""

    @property
    def verdict(self) -> Verdict:
        """Which rank the others wait for, if any."""


def judge(tables: JobTables, charges: pd.DataFrame, layers: pd.DataFrame, floor_ns: int) -> Verdict:
    """Find the verdict.

    Args:
        tables: The job's maps, with matched collectives.
        charges: See `nvprof_kit._ranks.waits.Waits.charges`.
        layers: See `nvprof_kit._ranks.stages.layer_table`.
        floor_ns: Shorter waits are less than the uncertainty of the clocks.
    """
    ranks, all_charges, all_steps = len(tables.ranks), charges, tables.frame("step_lengths")
    if ranks < 2:
        return Verdict(sentence=_SENTENCES["single"])
    charges, steps = _counted_steps(all_charges, all_steps)
    lengths = steps["median_ns"] if len(steps) else layers.groupby("rank")["median_ns"].sum()
    if not len(charges) or not (length := float(np.median(lengths))):
        return start_up(all_charges, all_steps) or Verdict(sentence=_SENTENCES["unmatched"])
    faults = charges[~charges["cause"].isin(NO_FAULT)]
    faults = faults.assign(kind=kinds_of(faults["cause"]))
    numbers = steps["step"].tolist() if len(steps) else sorted(charges["step"].unique().tolist())
    costs = _costs(faults, tables, numbers)
    link, rank = slow_link(tables, length), _late_rank(costs, length)
    if rank is not None and (link is None or link.cost_ns_per_step < costs[rank].median() / 2):
        of_rank = faults[faults["rank"] == rank], layers[layers["rank"] == rank]
        return late_rank(rank, *of_rank, costs[rank].dropna(), length, has_steps=len(all_steps) > 0)
    longest = float(costs.median().max()) if len(faults) else 0.0
    nobody = "several_runs" if floor_ns >= NOTABLE * length else "none"
    facts = {"ranks": plural(ranks, "rank"), "longest": _ms(longest), "floor": _ms(floor_ns), "step": _ms(length)}
    return (
        link
        or spread_out(faults, costs.fillna(0.0), length)
        or uneven_stages(charges, numbers, length)
        or start_up(all_charges, all_steps)
        or (more_work(tables, layers, costs, length) if len(all_steps) else None)
        or Verdict(sentence=_SENTENCES[nobody].format(**facts))
    )


def _counted_steps(charges: pd.DataFrame, steps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The charges and the steps that count: without warm-up and the step in which the profilers start, unless no others
    are left.
    """
    if len(steps):
        # a step that few of the profiled ranks have does not show which rank is late
        largest = int(steps["ranks"].max())
        steps = steps[steps["ranks"] >= max(min(largest, 2), largest / 2)]
        steps = steps[~steps["warm_up"]] if not steps["warm_up"].all() else steps
        charges = charges[charges["step"].isin(steps["step"])]
    is_cold = charges["step"].isin(charges["step"][charges["cause"] == "start_up"])
    if not is_cold.all():
        steps = steps[~steps["step"].isin(charges["step"][is_cold])]
        charges = charges[~is_cold]
    return charges, steps


def _costs(faults: pd.DataFrame, tables: JobTables, steps: list[int]) -> pd.DataFrame:
    """The cost of each rank in each step; missing in steps that it does not have, or in which none of its collectives
    is matched.
    """
    costs = _by_step(faults, "rank", steps)
    costs = costs.where(costs >= ECHO * costs.shift(1, fill_value=0.0), 0.0)
    matched = tables.matched_steps()
    matched = matched[matched["matched"]]
    has_step = matched.pivot_table(index="step", columns="rank", values="matched", aggfunc="any", fill_value=False)
    has_step = has_step.reindex(index=costs.index, columns=costs.columns, fill_value=False)
    # a rank that has less than a quarter or two of the steps is judged by all
    return costs.where(has_step | (has_step.sum() < max(2, len(costs) / 4)))


def _by_step(faults: pd.DataFrame, keys: str | list[str], steps: list[int]) -> pd.DataFrame:
    """The cost of each key in each step."""
    sums = faults.pivot_table(index="step", columns=keys, values="cost_ns", aggfunc="sum", fill_value=0.0)
    return sums.reindex(steps, fill_value=0.0)


def _late_rank(costs: pd.DataFrame, length: float) -> int | None:
    """The rank that costs the others a notable part of the steps; None if none does, or a different one each time."""
    if not costs.shape[1]:
        return None
    medians = costs.median()
    worst, cost = int(str(medians.idxmax())), float(medians.max())
    # of two steps, the median is the mean: a rank is late in two of its steps or more, if it has as many
    of_worst = costs[worst].dropna()
    if cost < NOTABLE * length or int((of_worst >= NOTABLE * length).sum()) < min(2, len(of_worst)):
        return None
    if cost < costs.max(axis=1).median() / 2:
        return None
    # of two ranks that take turns, one is late in more than half of an odd number of steps: the others are late in
    # a quarter of the steps, and as late as the worst rank is in its own
    largest = costs.drop(columns=worst).max(axis=1)
    theirs = (largest >= 2 * costs[worst]) & (largest >= max(cost / 2, NOTABLE * length))
    return worst if int(theirs.sum()) < 2 or float(theirs.mean()) < 0.25 else None


def late_rank(
    rank: int, faults: pd.DataFrame, layers: pd.DataFrame, costs: pd.Series[float], length: float, *, has_steps: bool
) -> Verdict:
    """The verdict on a rank: the layer that stands out, otherwise the cause of most of its cost.

    Args:
        rank: The rank.
        faults: Its charges, with their kind.
        layers: Its rows of the table of layers.
        costs: Its cost by step.
        length: Length of a step in ns, or of the recording.
        has_steps: Whether the job has steps.
    """
    cost, steps = float(costs.median()), costs.index.tolist()
    priced = _priced(cost, length)
    if faults["cost_ns"][faults["cause"] == "collective"].sum() > faults["cost_ns"].sum() / 2:
        sentence = _SENTENCES["collective"].format(rank=rank, cost=_ms(cost), step=_ms(length))
        return Verdict(cause="collective", sentence=sentence, **priced | {"severity": "warning"})
    by_kind = _by_step(faults, "kind", steps).median()
    layer, phase, kind = _standing_out(faults, layers, length, steps)
    # a cause with a specific place, if it is a large part of the cost; a late host affects all layers
    placed = by_kind[by_kind.index.isin(_PLACES)]
    if kind is None and len(placed) and placed.max() >= max(NOTABLE * length, cost / 3):
        kind = str(placed.idxmax())
    kind = kind or str(by_kind.idxmax())
    of_kind = faults[(faults["kind"] == kind) & ((faults["layer"] == layer) if layer else True)]
    where = f" in {layer} {phase}" if layer else ""
    if layer is None and kind in ("work", "host"):
        phase, where = outside_layers(of_kind, layers)
    cause = {"host": "slow_host", "transfer": "slow_link"}.get(kind, kind)
    if kind == "work":
        is_more = of_kind.groupby("cause")["cost_ns"].sum().idxmax() == "more_kernels"
        cause = "more_work" if is_more else "slow_layer" if where else "slow_gpu"
    peer_ns = float(layers["peers_ns"].sum())
    ratio = f"{float(layers['median_ns'].sum()) / peer_ns:.2f}" if peer_ns else "?"
    why = _WHY.get(cause, cause).format(where=where, ratio=ratio)
    of_step = f"a step of {_ms(length)}" if has_steps else f"the {_ms(length)} that are recorded"
    parts = [f"rank {rank} is the straggler: {why}; it holds the others up for {_ms(cost)} of {of_step}"]
    here = float(_by_step(of_kind, "kind", steps)[kind].median())
    if layer and here < 0.9 * cost:
        parts.append(f"{_ms(here)} of it there")
    if layer and by_kind[kind] - here >= NOTABLE * length:
        reason = f"{_PHRASES[kind]} elsewhere" if kind in ("work", "host") else "for the same reason elsewhere"
        parts.append(f"{_ms(by_kind[kind] - here)} {reason}")
    for other, ns in by_kind.drop(kind).items():
        if ns >= NOTABLE * length:
            elsewhere = {"work": " elsewhere", "host": " in all layers"}.get(str(other), "")
            parts.append(f"{_ms(ns)} {_PHRASES.get(str(other), str(other))}{elsewhere}")
    if has_steps:
        often = int((faults.groupby("step")["cost_ns"].sum() >= NOTABLE * length).sum())
        parts.append(f"in {often} of {plural(len(steps), 'step')}")
    return Verdict(rank=rank, layer=layer, phase=phase, cause=cause, sentence=", ".join(parts), **priced)


def outside_layers(faults: pd.DataFrame, layers: pd.DataFrame) -> tuple[str | None, str]:
    """The phase outside layers that has most of the cost, such as the optimizer, and this place in words; None and ''
    if it has not, or no more of the cost than of the work.
    """
    costs: Any = faults.groupby(["layer", "phase"])["cost_ns"].sum()
    work: Any = layers.groupby(["layer", "phase"])["peers_ns"].sum()
    layer, phase = owner = costs.idxmax()
    share = float(costs.max()) / max(float(costs.sum()), 1.0)
    usual = float(work.get(owner, 0.0)) / max(float(work.sum()), 1.0)
    if layer != NO_LAYER or share <= 0.5 or share < 1.5 * usual:
        return None, ""
    return (None, " outside layers") if phase == NO_PHASE else (str(phase), f" outside layers, in the {phase} phase")


def _standing_out(
    faults: pd.DataFrame, layers: pd.DataFrame, length: float, steps: list[int]
) -> tuple[str | None, str | None, str | None]:
    """The layer, phase and kind of cause that costs a notable part of the step and `STANDS_OUT` times any other layer.

    GPU work is checked first: it varies less than the lateness of a host, which affects all layers.
    """
    places: Any = _by_step(faults[faults["layer"] != NO_LAYER], ["kind", "layer"], steps).median()
    work = layers.groupby("layer")["peers_ns"].sum()
    work = work[work > 0]
    for kind in sorted({str(name) for name, _ in places.index}, key=lambda name: name != "work"):
        by_layer = places[kind].sort_values(ascending=False)
        layer, top = str(by_layer.index[0]), float(by_layer.iloc[0])
        rival = float(by_layer.iloc[1]) if len(by_layer) > 1 else 0.0
        # a layer whose share of the cost equals its share of the work does not stand out
        usual = float(work.get(layer, 0.0) / work.sum()) if len(work) > 1 else 0.0
        if top >= NOTABLE * length and top >= STANDS_OUT * rival and top >= 1.5 * usual * by_layer.sum():
            phases = faults[(faults["layer"] == layer) & (faults["kind"] == kind)].groupby("phase")["cost_ns"].sum()
            return layer, str(phases.idxmax()), kind
    return None, None, None


def slow_link(tables: JobTables, length: float) -> Verdict | None:
    """A verdict on communicators whose transfers of the same sizes are slower than their equals'."""
    table = tables.frame("transfers")
    equals = table.groupby(["sort", "bytes", "n"])["median_ns"]
    table = table.assign(usual=equals.transform("median"), equals=equals.transform("size"))
    slow = table[(table["equals"] >= 3) & (table["usual"] > 0) & (table["median_ns"] > SLOW_LINK * table["usual"])]
    by_group = ((slow["median_ns"] - slow["usual"]) * slow["count"] / slow["steps"]).groupby(slow["c"]).sum()
    cost = float(by_group.max()) if len(slow) else 0.0
    if not cost or cost < NOTABLE * length:
        return None
    groups = tables.communicators()
    slow_groups = [set(groups[comm]) for comm in by_group.index[by_group >= cost / 2]]
    shared = set.intersection(*slow_groups) if len(slow_groups) > 1 else set()
    worst = listing(sorted(groups[int(str(by_group.idxmax()))]))
    times = (slow["median_ns"] / slow["usual"]).max()
    sentence = _SENTENCES["slow_link"].format(ranks=worst, times=times, cost=_ms(cost), step=_ms(length))
    rank = shared.pop() if len(shared) == 1 else None
    return Verdict(rank=rank, cause="slow_link", sentence=sentence, **_priced(cost, length))


def spread_out(faults: pd.DataFrame, costs: pd.DataFrame, length: float) -> Verdict | None:
    """A verdict if steps are slow without a single late rank: a different rank each time, or a single step."""
    if not costs.shape[1]:
        return None
    worst: Any = costs.max(axis=1)
    by: Any = costs.idxmax(axis=1)
    is_late = worst >= NOTABLE * length
    cost = float(worst.median())
    if is_late.mean() > 0.5 and len(costs) >= 3:
        ranks = listing(sorted({int(rank) for rank in by[is_late]}))
        why = _mostly(faults).replace("its host launches", "their hosts launch")
        sentence = _SENTENCES["rotating"].format(ranks=ranks, cost=_ms(cost), step=_ms(length), why=why)
        return Verdict(cause="rotating", sentence=sentence, **_priced(cost, length))
    step = worst.idxmax()
    if worst[step] >= BAD_STEP * NOTABLE * length:
        why = _mostly(faults[(faults["step"] == step) & (faults["rank"] == by[step])])
        sentence = _SENTENCES["one_bad_step"].format(step=step, cost=_ms(worst[step]), rank=int(by[step]), why=why)
        return Verdict(cause="one_bad_step", cost_ns_per_step=round(cost), sentence=sentence)
    return None


def _mostly(faults: pd.DataFrame) -> str:
    """The cause of most of the cost, in words; '' if none."""
    sums = faults.groupby("kind")["cost_ns"].sum()
    top = str(sums.idxmax()) if len(sums) else ""
    if top not in _PHRASES or sums[top] <= sums.sum() / 2:
        return ""
    places: Any = faults.groupby(["layer", "phase"])["cost_ns"].sum()
    layer, phase = places.idxmax()
    is_one_place = layer != NO_LAYER and top in ("work", "host") and places.max() > places.sum() / 2
    return f", {_PHRASES[top]}" + (f" in {layer} {phase}" if is_one_place else "")


def uneven_stages(charges: pd.DataFrame, steps: list[int], length: float) -> Verdict | None:
    """A verdict if pipeline stages wait for one with more work, and no rank has more work than its equals."""
    medians = _by_step(charges[charges["cause"] == "pipeline"], "rank", steps).median()
    if not len(medians) or medians.max() < NOTABLE * length:
        return None
    facts = {"rank": medians.idxmax(), "cost": _ms(float(medians.max())), "step": _ms(length)}
    return Verdict(cause="uneven_stages", sentence=_SENTENCES["uneven_stages"].format(**facts))


def start_up(charges: pd.DataFrame, steps: pd.DataFrame) -> Verdict | None:
    """A verdict if the profilers started at different times and nothing else was found."""
    cold = charges[charges["cause"] == "start_up"]
    if not len(cold) or len(steps) > 1:
        return None
    sentence = _SENTENCES["start_up"].format(wait=_ms(float(cold["cost_ns"].sum())))
    return Verdict(cause="start_up", sentence=sentence)


def more_work(tables: JobTables, layers: pd.DataFrame, costs: pd.DataFrame, length: float) -> Verdict | None:
    """A verdict by what the ranks compute in a step, if so many collectives have no match that waiting says little."""
    unmatched_share = tables.unmatched() / max(tables.rows()[0], 1)
    if unmatched_share <= UNMATCHED or layers["stage"].nunique() != 1:
        return None
    work = layers.pivot_table(index=["layer", "phase"], columns="rank", values="median_ns", fill_value=0.0)
    rank = int(str(work.sum().idxmax()))
    peers, peer_work = work.drop(columns=rank).median(axis=1), float(work.sum().drop(rank).median())
    if work[rank].sum() - peer_work < NOTABLE * length:
        return None
    owner: Any = (work[rank] - peers).idxmax()
    layer, phase = owner
    where = f"in the {phase} phase" if layer == NO_LAYER else f"in {layer} {phase}"
    waits = float(costs[rank].median()) if rank in costs else 0.0
    times = {"work": work[rank].sum(), "others": peer_work, "here": work[rank][owner], "there": peers[owner]}
    facts = {name: _ms(ns) for name, ns in {**times, "step": length, "waits": waits}.items()}
    sentence = _SENTENCES["more_work"].format(rank=rank, where=where, unmatched=unmatched_share, **facts)
    return Verdict(
        rank=rank,
        layer=None if layer == NO_LAYER else str(layer),
        phase=str(phase),
        cause="slow_layer",
        severity="warning",
        cost_ns_per_step=round(waits),
        sentence=sentence,
    )


def _priced(cost: float, length: float) -> dict[str, Any]:
    return {"severity": "critical" if cost >= CRITICAL * length else "warning", "cost_ns_per_step": round(cost)}


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f} ms" if ns >= 1e5 else f"{ns / 1e3:,.0f} µs"
