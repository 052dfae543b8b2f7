"""Rules about where the steps' time goes: a host that is late, waits, loads or allocates; exposed communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nvprof_kit._analysis.advise.evidence import Evidence, ms, share
from nvprof_kit._analysis.attribution.step_times import median_place
from nvprof_kit._analysis.breakdown.causes import CAUSES
from nvprof_kit._findings import Finding
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_SHARE, SYNC_SHARE, DATA_SHARE, ALLOCATION_SHARE, LOADING_SHARE, GC_SHARE = 0.05, 0.005, 0.01, 0.005, 0.01, 0.005
EXPOSED_SHARE, COMM_SHARE, HIDDEN_SHARE, WAITING_SHARE = 0.05, 0.02, 0.1, 0.05
STALL_OF_STEP, STALL_SHARE = 0.1, 0.01
UNSTABLE, STEPS_TO_JUDGE = 1.2, 4
CALLS_OF_WARM_UP = 4
"""Without steps, a layer that loads in more of its calls does so for each shape, not only in prefill and at first."""


def _at(row: Any) -> tuple[int, int]:
    return int(row["longest_at_ns"]), int(row["longest_at_ns"] + row["longest_ns"])


def _worst(rows: pd.DataFrame) -> Any:
    """The row with the most idle time in the layer and phase that have the most, and their total as ``place_ns``."""
    by_place = rows.groupby(["layer", "phase"], sort=False)["idle_ns"].sum()
    layer, phase = by_place.index[int(by_place.to_numpy().argmax())]
    mine = rows[(rows["layer"] == layer) & (rows["phase"] == phase)]
    return mine.iloc[0].to_dict() | {"place_ns": int(by_place.max())}


def _idle(
    found: Evidence, rule: str, causes: tuple[str, ...], least: float, *,
    title: str, advice: str, confidence: str, refuted_by: str,
) -> Iterator[Finding]:  # fmt: skip
    """A finding if these causes of idle time take at least this share of the steps."""
    spent, rows = found.idle_ns(*causes), found.idle(*causes)
    if spent < least * found.wall_ns or not len(rows):
        return
    worst = _worst(rows)
    inside = ", ".join(one for one in (worst["operator"], worst["call"]) if one)
    evidence = (
        f"{ms(spent)} of {ms(found.wall_ns)} ({share(spent, found.wall_ns)}) idle; most in {worst['layer']} "
        f"{worst['phase']}: {ms(worst['place_ns'])}; longest stretch there: {ms(worst['longest_ns'])}"
        f"{f', in {inside}' if inside else ''}"
    )
    yield Finding(
        rule, title, evidence, worst["layer"], worst["phase"], *_at(worst), spent, advice, confidence, refuted_by
    )


def launch_bound(found: Evidence) -> Iterator[Finding]:
    """The GPU waits for launches."""
    if found.trains:
        advice = (
            "capture the step in a CUDA graph, torch.compile(mode='reduce-overhead'), or give each launch more work "
            "(batch size)"
        )
    else:
        advice = (
            "use a CUDA graph or torch.compile(mode='reduce-overhead') for the decoding step (with a static cache), or "
            "decode more sequences at once"
        )
    unknown = found.idle_ns("unknown")
    title, refuted = "The GPU waits for the host to launch", "the step is no faster in a CUDA graph, or takes twice as "
    refuted += "long with twice the batch"
    mostly = unknown > found.idle_ns("launch")
    if mostly:  # a host that is busy with something else launches no earlier from a CUDA graph
        title = "The GPU waits while the host does something unknown"
        advice = (
            "find out what runs there: put nvprof_kit.phase('data') around fetching and preparing data, other phases "
            "around logging and checkpoints, or record with Python backtraces; prepare data in DataLoader workers"
        )
        refuted = "the step takes as long when it reuses one batch and logs nothing: then the host is late to launch"
    elif read_back := _read_back(found):
        refuted = "the step takes twice as long with twice the batch"
        advice = (
            f"{read_back}, as nonzero(), item() and masks used as indices do: a CUDA graph cannot capture this part of "
            "the step; give every expert or branch a fixed size first, or capture only the layers without such "
            "copies, or give each launch more work (batch size)"
        )
    for one in _idle(
        found, "launch", ("launch", "unknown"), LAUNCH_SHARE,
        title=title, advice=advice, confidence="medium" if mostly else "high", refuted_by=refuted,
    ):  # fmt: skip
        note = f"; what the host did for {ms(unknown)} of it is unknown" if unknown >= one.saves_ns / 10 else ""
        stalls = 0 if mostly else min(_stalls_ns(found), unknown)
        if stalls >= STALL_SHARE * found.wall_ns:
            note = (
                f"; what the host did for {ms(unknown)} of it is unknown, {ms(stalls)} in stretches of a tenth of a "
                "step or more, which the fix does not save: put nvprof_kit.phase around what runs there"
            )
        else:
            stalls = 0
        yield replace(one, evidence=one.evidence + note, saves_ns=one.saves_ns - stalls)


def _stalls_ns(found: Evidence) -> int:
    """Idle gaps of a tenth of the median step or more in which what the host did is unknown: it was busy elsewhere."""
    if not found.choice.count:
        return 0
    gaps, wall = found.times.gaps, found.steps["wall_ns"].to_numpy()
    long = gaps["idle_ns"] >= STALL_OF_STEP * int(wall[median_place(wall)])
    mine = long & (gaps["cause"] == "unknown") & gaps["window"].isin(found.steps.index)
    return int(gaps["idle_ns"][mine].sum())


def _read_back(found: Evidence) -> str:
    """Says where layers copy to the host within the steps; '' where none does."""
    copies = np.flatnonzero((found.ops["kind"].to_numpy() == OP_KINDS.index("memcpy")) & found.inside)
    named = (found.trace.ops["name"].iloc[copies] == "memcpy DtoH").to_numpy()
    rows = found.ops.iloc[copies[named]]
    rows = rows[rows["phase"].isin(("forward", "recompute", "backward")) & (rows["layer"] != NO_LAYER)]
    if not len(rows):
        return ""
    places = rows.groupby(["layer", "phase"], observed=True, sort=False).size()
    layer, phase = places.index[int(places.to_numpy().argmax())]
    more = len(places) - 1
    others = f" and {more} other place{'s' * (more > 1)} copy" if more else " copies"
    return f"{layer} {phase}{others} data to the host"


def sync_points(found: Evidence) -> Iterator[Finding]:
    """The host waits for the GPU within the step, and then launches late."""
    waits, gaps = found.times.waits, found.times.gaps
    spent = int(waits["lost_ns"].sum())
    if not len(waits) or spent < SYNC_SHARE * found.wall_ns:
        return
    by_place = waits.groupby(["layer", "phase", "call"], observed=True, sort=False)["lost_ns"].sum()
    layer, phase, call = by_place.index[int(by_place.to_numpy().argmax())]
    mine = waits[(waits["layer"] == layer) & (waits["phase"] == phase) & (waits["call"] == call)]
    worst = mine.iloc[int(mine["lost_ns"].to_numpy().argmax())]
    start = int(gaps["start_ns"].iloc[int(worst["gap"])])
    evidence = (
        f"{ms(spent)} of {ms(found.wall_ns)} ({share(spent, found.wall_ns)}) idle in {len(waits)} gaps that begin "
        f"while the host waits for the GPU; most after {call} in {layer} {phase}: {ms(int(by_place.max()))} in "
        f"{len(mine)} gaps, the longest {ms(int(worst['lost_ns']))}"
    )
    steps = bool(found.choice.count)
    advice = (
        "remove .item(), .cpu(), print(loss), torch.cuda.synchronize() from the "
        f"{'step, or run them every N steps' if steps else 'loop, or run them less often'}"
    )
    refuted = "the idle time remains when the call is removed"
    title = f"The host waits for the GPU{' within a step' if steps else ''}"
    yield Finding(
        "sync", title, evidence, str(layer), str(phase),
        start, start + int(worst["lost_ns"]), spent, advice, "high", refuted,
    )  # fmt: skip


def loading(found: Evidence) -> Iterator[Finding]:
    """Libraries, modules and plans are loaded or built in steps that are not warm-up."""
    rows = found.idle("loading")
    by_call = int(rows["idle_ns"][rows["call"] != ""].sum())
    again = (
        "pad to a few lengths, so that plans are built once; for attention over growing lengths use another kernel: "
        "torch.backends.cuda.enable_cudnn_sdp(False)"
    )
    once = "warm up with every shape first; set CUDA_MODULE_LOADING=EAGER and torch.backends.cudnn.benchmark=False"
    steps = found.steps["idle_loading_ns"] > 0.01 * found.steps["wall_ns"].clip(lower=1)
    many, calls = int(steps.sum()), _calls_that_load(found, rows) if len(rows) else 0
    recurs = many > 1 if found.choice.count else calls > CALLS_OF_WARM_UP
    for one in _idle(
        found, "loading", ("loading",), LOADING_SHARE,
        title=f"Loading, compiling or tuning{' during steps' if found.choice.count else ''}",
        advice=again if recurs else once,
        confidence="high" if 2 * by_call > int(rows["idle_ns"].sum()) else "medium",
        refuted_by="as much time is lost when the same shapes run a second time in the same process",
    ):  # fmt: skip
        where = "; may include warm-up"
        if found.choice.count:
            where = f"; in {many} of {len(found.steps)} steps"
        elif recurs:
            where = f"; in {calls} calls of this layer"
        yield replace(one, evidence=one.evidence + where)


def _calls_that_load(found: Evidence, rows: pd.DataFrame) -> int:
    """In how many calls of the layer that loads most it loads; 0 outside layers."""
    worst, gaps, ranges = _worst(rows), found.times.gaps, found.attribution.ranges
    mine = gaps[(gaps["cause"] == "loading") & (gaps["layer"] == worst["layer"]) & (gaps["phase"] == worst["phase"])]
    named = np.array([one.text == worst["layer"] for one in ranges.names], dtype=bool)
    starts = np.sort(ranges.start[named[ranges.name]]) if len(named) else ranges.start[:0]
    call = np.searchsorted(starts, (mine["start_ns"] + mine["idle_ns"]).to_numpy(), side="right")
    return len(np.unique(call[call > 0]))


def garbage(found: Evidence) -> Iterator[Finding]:
    """The GPU waits while Python collects garbage."""
    yield from _idle(
        found, "gc", ("gc",), GC_SHARE, title="Python garbage collection stalls the GPU",
        advice="call gc.freeze() after building the model, gc.disable() in the loop, and gc.collect() every N steps",
        confidence="high", refuted_by="the gaps remain with gc.disable()",
    )  # fmt: skip


def dataloader(found: Evidence) -> Iterator[Finding]:
    """The GPU waits for data."""
    spent, rows = found.loading_ns, found.idle("dataloader")
    if spent < DATA_SHARE * found.wall_ns or not len(rows):
        return
    worst = rows.iloc[0]
    evidence = (
        f"{ms(spent)} idle inside the data loader's ranges, {share(spent, found.wall_ns)} of the steps' "
        f"time; longest stretch: {ms(worst['longest_ns'])}"
    )
    advice = "use more DataLoader workers, prefetch_factor, persistent_workers, or preprocess the data offline"
    refuted = "the step takes as long when it reuses one batch"
    yield Finding(
        "dataloader", "The GPU waits for data", evidence, "", "data", *_at(worst), spent, advice, "high", refuted
    )


def allocator(found: Evidence) -> Iterator[Finding]:
    """Allocations stall the GPU."""
    yield from _idle(
        found, "allocation", ("allocation",), ALLOCATION_SHARE, title="Allocations stall the GPU",
        advice="keep shapes the same from step to step, warm up first, "
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no empty_cache() in the loop",
        confidence="high", refuted_by="the same calls recur in later steps although shapes repeat and nothing is freed",
    )  # fmt: skip


def exposed_collectives(found: Evidence) -> Iterator[Finding]:
    """Exposed communication, without what may be waiting for other ranks, takes a notable share of the step."""
    rows = found.times.communication
    waiting = min(int(rows["waiting_ns"].sum()) + found.waited_ns, int(found.steps["exposed_comm_ns"].sum()))
    comm, exposed = (int(found.steps[name].sum()) for name in ("comm_ns", "exposed_comm_ns"))
    spent, moving = exposed - waiting, max(comm - waiting, 1)
    in_turns = spent >= COMM_SHARE * found.wall_ns and spent >= (1 - HIDDEN_SHARE) * moving
    if not len(rows) or (spent < EXPOSED_SHARE * found.wall_ns and not in_turns):
        return
    worst = rows.iloc[int((rows["exposed_ns"] - rows["waiting_ns"]).to_numpy().argmax())]
    evidence = (
        f"{ms(spent)} of {ms(found.wall_ns)} ({share(spent, found.wall_ns)}) the GPU moves data between ranks and "
        f"computes nothing; most in {worst['collective']} of {worst['layer']} {worst['phase']}: "
        f"{ms(worst['exposed_ns'])} of {ms(worst['gpu_ns'])} exposed{_moved(worst)}"
    )
    if waiting:
        evidence += f"; {ms(waiting)} more may be waiting for other ranks"
    advice = "use smaller or earlier buckets (bucket_cap_mb), or prefetch the next layer's shards"
    title = "Exposed communication"
    if in_turns:
        title = "Communication and compute do not overlap"
        evidence += f"; {share(moving - spent, moving)} of the transfer time is overlapped by compute"
        advice = (
            "launch collectives asynchronously on their own stream, or let DDP or FSDP do it (without "
            "find_unused_parameters, and with no synchronization in between)"
        )
    refuted = "the collectives take as long by themselves (nccl-tests), or get shorter with a faster slowest rank"
    place = _communication(found)
    yield Finding(
        "exposed-collectives", title, evidence, worst["layer"], worst["phase"], *place, spent, advice,
        "low" if rows["bytes"].isna().any() or waiting > spent else "medium", refuted,
    )  # fmt: skip


def rank_waits(found: Evidence) -> Iterator[Finding]:
    """Collectives take longer than similar ones: this rank may be waiting for others, so the fix is not here."""
    rows = found.times.communication
    waiting = int(rows["waiting_ns"].sum()) if len(rows) else 0
    if waiting < WAITING_SHARE * found.wall_ns:
        return
    worst = rows.iloc[int(rows["waiting_ns"].to_numpy().argmax())]
    evidence = (
        f"{ms(waiting)} of {ms(found.wall_ns)} ({share(waiting, found.wall_ns)}) is exposed communication beyond "
        f"the fastest similar collective; most in {worst['collective']} of {worst['layer']} {worst['phase']}: "
        f"{ms(worst['waiting_ns'])}"
    )
    advice = "find the slowest rank with nvprof-kit ranks, or advise, on the captures of all ranks, and fix it there"
    yield Finding(
        "rank-wait", "This rank may be waiting for others", evidence, worst["layer"], worst["phase"],
        *_communication(found), 0, advice, "medium", "the other ranks' collectives take as long in these steps",
    )  # fmt: skip


def _moved(row: Any) -> str:
    """How much communication moved and how fast, if the capture has it."""
    if str(row["bytes"]) in ("<NA>", "nan"):
        return ""
    return f", {row['bytes'] / 1e6:,.1f} MB at {row['algorithm_gb_per_s']:,.1f} GB/s"


def _communication(found: Evidence) -> tuple[int, int]:
    return found.longest(np.flatnonzero(found.classes.is_a("comm") & found.inside))


def unstable_step(found: Evidence) -> Iterator[Finding]:
    """Some steps take much longer than the median, and not only because they wait for other ranks."""
    rows = found.steps[found.steps["step"].notna()]
    unstable = [one for _, mine in rows.groupby(["process", "device"]) if (one := _unstable(mine)) is not None]
    if not unstable:
        return
    chosen = max(unstable, key=lambda one: one.lost)
    worst = chosen.rows.iloc[int(chosen.rows["wall_ns"].to_numpy().argmax())]
    evidence = (
        f"{chosen.many} of {len(chosen.rows)} steps take more than {UNSTABLE} times the median of "
        f"{ms(chosen.middle)}; step {int(worst['step'])} takes {ms(worst['wall_ns'])}; most of the excess is "
        f"{chosen.named}"
    )
    if len(unstable) > 1:
        evidence += f"; seen on {len(unstable)} GPUs, this one loses most"
    start = int(worst["start_ns"])
    advice = "look there for allocations, logging, checkpoints, garbage collection, or a different shape"
    if chosen.part == "compute_ns":
        advice = (
            "compare the kernels of these steps with the others' (nvprof-kit summary --view kernel --by step): longer "
            "batches can be grouped by length or packed; if the same kernels take longer, the GPU's clocks fell"
        )
    yield Finding(
        "unstable-step",
        "Step times vary",
        evidence,
        "",
        "",
        start,
        start + int(worst["wall_ns"]),
        sum(one.lost for one in unstable),
        advice,
        "low",
        "the long steps are meant to do more work: evaluation, a checkpoint, a longer batch",
        _RULE_OF.get(chosen.part, ""),
    )


class _Unstable(NamedTuple):
    """Slow steps of a GPU: time lost beyond waiting for ranks, the median, their number, the part that grew most."""

    lost: int
    middle: int
    many: int
    part: str
    rows: pd.DataFrame

    @property
    def named(self) -> str:
        words = {"compute_ns": "computing", "exposed_copy_ns": "copying"}
        cause = self.part.removeprefix("idle_").removesuffix("_ns")
        return words.get(self.part) or f"idle: {CAUSES[cause]}"


_RULE_OF = {
    f"idle_{cause}_ns": rule
    for rule, causes in {
        "launch": ("launch", "unknown"),
        "sync": ("sync", "after_sync"),
        **{one: (one,) for one in ("dataloader", "allocation", "loading", "gc")},
    }.items()
    for cause in causes
}


def _unstable(rows: pd.DataFrame) -> _Unstable | None:
    wall = (rows["wall_ns"] - rows["exposed_comm_ns"]).to_numpy()
    whole = rows["wall_ns"].to_numpy()
    middle, usual = (int(one[median_place(one)]) for one in (whole, wall))  # a step's, as in breakdown and on the page
    slow = (whole > UNSTABLE * middle) & (wall - usual > (UNSTABLE - 1) * middle / 2)
    if len(rows) < STEPS_TO_JUDGE or not slow.any():
        return None
    names = ["compute_ns", "exposed_copy_ns", *(f"idle_{cause}_ns" for cause in CAUSES)]
    parts = rows[names]
    more = (parts[slow] - parts[~slow].median()).sum() if (~slow).any() else parts[slow].sum()
    lost = int((wall[slow] - usual).sum())
    return _Unstable(lost, middle, int(slow.sum()), str(more.idxmax()), rows)
