"""Rules about a host that keeps the GPU waiting: it launches late, waits itself, loads, allocates, or does else."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nvprof_kit._analysis.advise.findings import TEXTS, finding_of, ms, share
from nvprof_kit._analysis.advise.program import (
    FUSED,
    SIBLINGS,
    STEPS_TO_JUDGE,
    WORTH_A_NOTE,
    Program,
    at,
    costliest,
    kinds,
    largest,
    placed,
)
from nvprof_kit._analysis.advise.replay import READS, matching
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.breakdown.devices import PLACE
from nvprof_kit._analysis.breakdown.host import CAUSES, OTHER_CAUSES
from nvprof_kit._findings import Finding
from nvprof_kit._trace.joins import distinct
from nvprof_kit.issues import plural
from nvprof_kit.names import NO_LAYER

LAUNCH_SHARE = 0.05
SURE_SHARE, LIKELY_SHARE = 0.5, 0.35
"""A profiler at most doubles the host's time, so half of the step is idle without it too, and of hardly more than a
third there may be nothing left.
"""
SLOWED = 1.3
LOOP_KERNELS, LOOP_SHARE = 50, 0.2
SYNC_SHARE, OFTEN, OFTEN_SHARE, PLACES, TOGETHER, LOOP = 0.005, 4, 0.001, 3, 1.5, 0.5
BUSY_SHARE = 0.01
CALLS_OF_WARM_UP = 4
"""Without steps, a layer that loads in more of its calls does so for each shape, not only in prefill and at first."""
UNSTABLE = 1.2
_EXPERTS = re.compile(r"expert|(^|\.|_)moe|MoE|router", re.IGNORECASE)


def launch(program: Program) -> Iterator[Finding]:
    """The GPU waits for launches for 5 % of the time or more, and graphs are not being captured. Where the loop
    outside the layers launches 50 kernels a step or more and holds a fifth of it, that is a finding of its own. If a
    layer copies data to the host, as `nonzero()` and `item()` do, it says which and that a CUDA graph cannot capture
    that part. Profilers slow the host: below 50 % of the step the confidence is `medium`, below 35 % `low`; where
    launches take 1.3 times as long as usual under one, it is never `high`, and `low` below 50 %; `low`, too, if
    Python's stacks were recorded.

    Saves: How long the GPU would wait for launches without the profiler, as in `sync`, if the host never waited for the
    GPU. A disturbed host makes single steps longer, so all steps count like a short one: the 5th percentile of their
    waits if all run equally many operations, else the 25th, and of four steps or more without the first.
    """
    least_ns = LAUNCH_SHARE * program.wall_ns
    if program.idle_ns("launch", "unknown") < least_ns or program.mode == "graph capture":
        return
    busy_gaps = pd.concat(
        [program.stalls, program.gaps_at_copies[program.gaps_at_copies["cause"].isin(("unknown", "launch"))]]
    )
    saves_ns, notes = _launch_savings(program, busy_gaps)
    if saves_ns < least_ns:
        return
    confidence = "high"
    if program.has_stacks:
        confidence = "low"
        notes.append("the recording of Python's stacks slows the host: record without them to know")
    is_slowed = any(replay.slowdown >= SLOWED for replay, _ in program.replays)
    if confidence == "high" and (is_slowed or saves_ns < SURE_SHARE * program.wall_ns):
        likely = SURE_SHARE if is_slowed else LIKELY_SHARE
        confidence = "medium" if saves_ns >= likely * program.wall_ns else "low"
        notes.append("the profiler makes the host slower: compare the step's time without it")
    idle, in_loop = _launch_idle(program, busy_gaps)
    note = "".join(f"; {text}" for text in notes)
    if notes and in_loop.any():
        note = f"; part of {program.ms(idle['idle_ns'].sum())} in layers and outside{note}"
    case, facts = _launch_case(program)
    for cases, rows in (("launch:loop", idle[in_loop]), (case, idle[~in_loop])):
        if row_ns := rows["idle_ns"].sum():
            unknown_ns = rows["idle_ns"][rows["cause"] == "unknown"].sum()
            unknown = f"; in {program.ms(unknown_ns)} of the idle time what the host does is unknown"
            of_it = unknown if unknown_ns >= BUSY_SHARE * row_ns else ""
            saves = saves_ns * (row_ns / idle["idle_ns"].sum())
            yield program.finding_in_idle(cases, rows, note=of_it + note, saves=saves, confidence=confidence, **facts)


def _launch_savings(program: Program, busy_gaps: pd.DataFrame) -> tuple[int, list[str]]:
    """How much shorter the steps would be if every launch came in time, and notes on what that leaves out.

    Args:
        program: The program.
        busy_gaps: The gaps of the causes `launch` and `unknown` in which the host did something else than launch.
    """
    busy_ns = int(busy_gaps["idle_ns"].sum())
    launch_idle_ns = program.idle_ns("launch", "unknown") - busy_ns
    # without the profiler, late launches have the same part in the idle time as with it
    launch_share = launch_idle_ns / max(launch_idle_ns + busy_ns + program.idle_ns(*OTHER_CAUSES), 1)
    saves_ns = min(int(program.launched_late_ns() * launch_share), launch_idle_ns)
    notes = []
    stalls = program.stalls
    if (long_ns := stalls["idle_ns"].sum()) >= BUSY_SHARE * program.wall_ns:
        notes.append(f"without {program.ms(long_ns)} in which the host was long busy with something else")
    if saves_ns < WORTH_A_NOTE * launch_idle_ns:
        notes.append(f"{program.ms(launch_idle_ns - saves_ns)} of it are the profiler's or follow waits: not counted")
    stalls_ns = stalls.groupby("window")["idle_ns"].sum().reindex(program.steps.index, fill_value=0)
    by_step_ns = program.steps["idle_launch_ns"] + program.steps["idle_unknown_ns"] - stalls_ns
    steady_ns = int(saves_ns * min(program.steady_ns(by_step_ns) / max(by_step_ns.sum(), 1), 1))
    if steady_ns >= WORTH_A_NOTE * saves_ns:
        return saves_ns, notes
    notes.append(
        f"only {program.ms(steady_ns)} of it in the steps that wait least: the host was disturbed in the others"
    )
    return steady_ns, notes


def _launch_idle(program: Program, busy_gaps: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series[bool]]:
    """The rows of `Program.idle` in which the GPU waits for launches, without the time of these gaps; and which of them
    belong to the loop outside the layers, if it launches many kernels and has much of that time, but not all.
    """
    idle, keys = program.idle("launch", "unknown"), ["cause", *PLACE]
    busy_ns = busy_gaps.groupby(keys, observed=True)["idle_ns"].sum().to_dict()
    idle_ns = [
        max(row.idle_ns - busy_ns.get(row[: len(keys)], 0), 0)
        for row in idle[[*keys, "idle_ns"]].itertuples(index=False)
    ]
    idle = idle.assign(idle_ns=idle_ns).astype({"layer": str, "phase": str})
    outside, total_ns = _outside_layers(idle), idle["idle_ns"].sum()
    outside_ns = idle["idle_ns"][outside].sum()
    kernels = (_outside_layers(program.kernels) & (program.kernels["graph_node"] < 0)).sum()
    is_loop = kernels >= LOOP_KERNELS * program.parts and LOOP_SHARE * total_ns <= outside_ns < total_ns
    return idle, outside & is_loop


def _outside_layers(rows: pd.DataFrame) -> pd.Series[bool]:
    return (rows["layer"] == NO_LAYER) & (rows["phase"] != "optimizer")


def _launch_case(program: Program) -> tuple[str, dict[str, str]]:
    """The case of `launch` that says how to launch earlier, or less often, with the facts that it names."""
    ops = program.ops
    in_layers = matching(ops["phase"], ("forward", "recompute", "backward")) & (ops["layer"] != NO_LAYER)
    read_backs = ops[in_layers & matching(ops["name"], READS)]
    if len(read_backs):
        places = read_backs.groupby(["layer", "phase"], observed=True).size()
        layer, phase = costliest(read_backs.assign(copies=1), "copies")
        more = len(places) - 1
        copy = f" and {more} other place{'s' * (more > 1)} copy" if more else " copies"
        has_experts = (ops["kernel_class"] == "experts").any() or matching(ops["layer"], _EXPERTS).any()
        split = " give every expert or branch a fixed size first, or" if has_experts else ""
        return "launch:copies", {"places": f"{layer} {phase}{copy}", "split": split}
    if program.replays_graphs:
        return "launch:replays", {}
    is_sharded = {"AllGather", "ReduceScatter"} <= set(program.times.communication["collective"])
    mode = "sharded training" if is_sharded and program.mode == "training" else program.mode
    return f"launch:{mode}" if f"launch:{mode}" in TEXTS else "launch", {}


def slow_host_in_layer(program: Program) -> Iterator[Finding]:
    """Of four or more layers that differ only in their number, the GPU waits for the host in one, but the first, more
    than twice as long as in the median, counted in the median of four or more steps.

    Saves: What it waits longer.
    """
    gaps, steps, keys = program.times.gaps, program.steps.index, ["layer", "phase"]
    is_late = matching(gaps["cause"], ("launch", "off_cpu")) & (gaps["layer"] != NO_LAYER)
    gaps = program.gaps(is_late)
    if len(steps) < STEPS_TO_JUDGE or not len(gaps):
        return
    codes, index = placed(gaps)
    codes, position = distinct(codes)
    cell = position.astype(np.int64) * len(steps) + np.searchsorted(steps, gaps["window"])
    idle_ns = exact_sums(cell, gaps["idle_ns"].to_numpy(), len(codes) * len(steps)).reshape(-1, len(steps))
    usual = pd.Series(np.median(idle_ns, axis=1), index[codes]).reset_index(name="ns")
    (place, index), unknown = placed(program.ops), np.iinfo(np.int64).max
    earliest = np.full(len(index), unknown)
    np.minimum.at(earliest, place, program.ops["start_ns"].to_numpy())
    starts = pd.Series(earliest, index)[earliest < unknown].reset_index(name="start")
    usual = usual.astype(dict.fromkeys(keys, str)).merge(starts.astype(dict.fromkeys(keys, str)), how="left")
    usual = usual.assign(kind=kinds(usual["layer"]))
    peers = usual[usual["kind"] != usual["layer"]].groupby(["kind", "phase"])
    usual["excess"] = usual["ns"] - peers["ns"].transform("median")
    usual["peers"] = peers["ns"].transform("size")
    is_first = usual["start"] == peers["start"].transform("min").reindex(usual.index)  # what came before it delays it
    usual = usual[(usual["peers"] >= SIBLINGS) & (usual["excess"] > usual["ns"] / 2) & ~is_first]
    if len(usual):
        worst = largest(usual, "excess")
        gaps = at(gaps, worst["layer"], worst["phase"])
        longest = largest(gaps, "idle_ns")
        evidence = f"{worst['layer']} {worst['phase']}: the GPU waits {ms(worst['ns'])} for the host in the median "
        evidence += f"step, {ms(worst['ns'] - worst['excess'])} in the median of the {int(worst['peers'])} layers like "
        evidence += "it"
        yield finding_of(
            "slow-host-layer", evidence, (worst["layer"], worst["phase"]), (longest["start_ns"], longest["idle_ns"]),
            int(worst["excess"]) * len(steps),
        )  # fmt: skip


class _Cost(NamedTuple):
    """What the steps take longer for some rows of `Program.waits`: of a ``place``, a ``call``, or each ``launch``."""

    saves_ns: int
    is_notable: bool
    of: str
    call: str
    rows: pd.DataFrame


def sync(program: Program) -> Iterator[Finding]:
    """Waits of the host for the GPU, in whose gaps the GPU idles, make the steps 0.5 % longer or more (0.1 % if there
    are four or more a step); up to three places. Where a wait follows another with nothing but work of its own place
    between them, as in a loop that reads number after number, the host's time between them counts too. If nine of ten
    launches of a process return only after the end of their kernel, as with CUDA_LAUNCH_BLOCKING=1, they are one
    finding. So are the waits at one call in more than three kinds of places that together cost half as much again as
    one by one: without those of one place, the host waits at the next instead. So are those that follow a tenth of the
    backward pass's operations, as in anomaly detection.

    Saves: By how much the steps are shorter without them, both without the profiler: the calls and operations are run
    again by what they wait for, each call without what tracing adds, and the host as fast as one where a traced
    launch can take 5 µs, as one of ten does; what computes beside communication counts, but for 30 % of that
    time, by which the communication then slows something else. Of a loop, and of many places, what computes the numbers
    is left out too: light kernels that run alike before nine of ten of the waits, up to the copy to the host. Of
    anomaly detection, the late launches of the forward pass are left out too. What else a loop launches, in layers also
    in their backward pass, is launched once for all turns.
    """
    gaps, waits, launches = program.times.gaps, program.waits, program.waiting_launches
    equal_layers = waits.groupby([kinds(waits["layer"]), "phase", "by_call"], sort=False)
    longest = sorted((rows for _, rows in equal_layers), key=lambda rows: -int(rows["lost_ns"].sum()))[: 2 * PLACES]
    places = equal_layers.size().groupby("by_call", sort=False).size()
    groups = [("place", rows) for rows in longest] + [("launch", launches)] * bool(len(launches))
    groups += [("call", waits[waits["call"] == call]) for call in places.index[places > PLACES]]
    if not groups:
        return
    often = OFTEN * program.parts if program.choice.count else np.inf
    costs = []
    for of, rows in groups:
        saves = program.wait_ns(rows)
        is_notable = saves >= max((OFTEN_SHARE if len(rows) >= often else SYNC_SHARE) * program.wall_ns, 1)
        costs.append(_Cost(saves, is_notable, of, rows["call"].iloc[0], rows))
    costs.sort(key=lambda cost: -cost.saves_ns)
    singles = [cost for cost in costs if cost.of == "place"]
    together = [cost for cost in costs if cost.of == "launch"]
    for cost in [cost for cost in costs if cost.of == "call"]:
        measured = [single for single in singles if single.call == cost.call]
        lost_ns = sum(int(single.rows["lost_ns"].sum()) for single in measured)
        one_by_one_ns = sum(single.saves_ns for single in measured) * int(cost.rows["lost_ns"].sum()) / max(lost_ns, 1)
        if measured and (cost.saves_ns >= TOGETHER * one_by_one_ns or program.is_checked(cost.rows)):
            together.append(cost)
            singles = [single for single in singles if single.call != cost.call]
    reported = [cost for cost in together if cost.is_notable] + [cost for cost in singles if cost.is_notable][:PLACES]
    within, away = "", "loop, or run them less often"
    if program.choice.count:
        within, away = " within a step", "step, or run them every N steps"
    for alone_ns, _, of, _, rows in reported:
        is_loop = of == "place" and len(rows) >= OFTEN * program.parts and rows["follows"].mean() >= LOOP
        saves = program.wait_ns(rows, with_checks=True, is_loop=is_loop) if is_loop or of == "call" else alone_ns
        layer, phase = costliest(rows, "lost_ns")
        of_layer = at(rows, layer, phase)
        worst = largest(of_layer, "lost_ns")
        evidence = f"{program.of_wall(rows['lost_ns'].sum())} idle in gaps that begin while the host waits for the "
        evidence += f"GPU; most after {worst['call']} in {layer} {phase}: {program.ms(of_layer['lost_ns'].sum())} in "
        evidence += f"{program.number(len(of_layer), 'gap')}{program.on_average}, the longest {ms(worst['lost_ns'])}"
        if (layers := rows["layer"].nunique()) > 1:
            like_it = " like it" * (of == "place")
            evidence += f"; in all in {plural(layers, 'layer')}{like_it}, {program.number(len(rows), 'gap')}"
        is_late = program.idle_ns("launch") >= LIKELY_SHARE * program.wall_ns
        if is_late or not WORTH_A_NOTE * rows["lost_ns"].sum() <= saves <= rows["lost_ns"].sum():
            evidence += (
                f"; without the profiler these waits{' and what goes with them' * bool(saves > alone_ns)} make the "
                f"{'steps' if program.choice.count else 'capture'} {program.ms(saves)} longer{program.per_step}"
            )
        copies = "copies to and from pageable memory, " if "Memcpy" in worst["call"] else ""
        anomaly = "torch.autograd.set_detect_anomaly and " * (program.mode == "training")
        case = {"place": "sync", "call": "sync:places", "launch": "sync:launch"}[of]
        confidence = "medium" if is_late and of != "launch" else "high"
        yield finding_of(
            case, evidence, (layer, phase), (gaps["start_ns"].iloc[int(worst["gap"])], worst["lost_ns"]), saves,
            confidence=confidence, within=within, away=away, copies=copies, anomaly=anomaly,
        )  # fmt: skip


def dataloader(program: Program) -> Iterator[Finding]:
    """Idle inside ranges of category `data`.

    Saves: That time.
    """
    if len(rows := program.idle("dataloader")):
        yield program.finding_in_idle("dataloader", rows, saves=program.loading_ns)


def host_busy(program: Program) -> Iterator[Finding]:
    """Idle while the host runs Python outside layers (in a PyTorch trace with stacks; it names the function), while
    the thread that launches is on no CPU outside layers (with `-t osrt`, it names the call: `recv`, `read`,
    `nanosleep`), or in stretches of a twentieth of a step or more in which what the host does is unknown, and of a
    quarter outside layers and calls, as with an optimizer on the CPU.

    Saves: That time, in the first and last step as in `gc`.
    """
    stalls = program.stalls.assign(longest_ns=program.stalls["idle_ns"], longest_at_ns=program.stalls["start_ns"])
    off_cpu = program.idle("off_cpu")
    for rows, column, activity in (
        (program.idle("python"), "operator", "the host runs Python outside layers"),
        (off_cpu[off_cpu["layer"] == NO_LAYER], "call", "the thread that launches is on no CPU"),
        (stalls, "operator", "the host neither launches nor calls CUDA, in long stretches"),
    ):
        if not len(rows):
            continue
        by_name = rows.groupby(rows[column].astype(str))["idle_ns"].sum().nlargest(3)
        name = str(by_name.index[0]).rpartition(": ")[2]
        named = ", ".join(f"{text or 'no call'}: {program.ms(ns)}" for text, ns in by_name.items())
        case, note = ("host-busy", f", most in {named}") if name else ("host-busy:unknown", "")
        is_optimizer = costliest(rows, "idle_ns")[1] == "optimizer"
        offload = "keep weights and the optimizer's states on the GPU, without CPU offload; " * is_optimizer
        saves, cut = _whole_steps_save(program, rows["idle_ns"].sum(), rows["cause"].unique())
        note = f"; while {activity}{note}{cut}"
        yield program.finding_in_idle(
            case, rows, note=note, saves=saves, confidence="medium", name=name, offload=offload
        )


def allocation(program: Program) -> Iterator[Finding]:
    """Idle inside cudaMalloc, cudaFree and their like.

    Saves: What the steps take longer for them, both without the profiler: a cudaFree also waits until the GPU is done;
    in the first and last step as in `gc`.
    """
    if len(rows := program.idle("allocation")):
        saves, cut = _whole_steps_save(program, program.allocating_ns(), ["allocation"])
        note = f"{cut}; the host waits longer in them: without these calls {program.shorter(saves)}"
        note *= bool(saves > rows["idle_ns"].sum())
        yield program.finding_in_idle("allocation", rows, note=note, saves=saves)


def loading(program: Program) -> Iterator[Finding]:
    """Idle while libraries, modules or plans for a shape are loaded, compiled or made, or a graph is captured; the fix
    depends on whether it recurs: in several steps or, without steps, in more than four calls of a layer.

    Saves: That time.
    """
    rows = program.idle("loading")
    if not len(rows):
        return
    if program.choice.count:
        is_loading = program.steps["idle_loading_ns"] > 0.01 * program.steps["wall_ns"]
        during, number = " during steps", int(is_loading.sum())
        recurs, note = number > 1, f"; in {number} of {plural(len(program.steps), 'step')}"
    else:
        layer, phase = costliest(rows, "idle_ns")
        gaps, ranges = program.times.gaps, program.attribution.ranges
        gaps = at(program.gaps(gaps["cause"] == "loading"), layer, phase)
        starts = np.sort(ranges.start[np.array([name.text == layer for name in ranges.names], dtype=bool)[ranges.name]])
        calls = np.searchsorted(starts, gaps["start_ns"] + gaps["idle_ns"], side="right")
        during, number = "", len(np.unique(calls[calls > 0]))
        recurs = number > CALLS_OF_WARM_UP
        note = f"; in {plural(number, 'call')} of this layer" if recurs else "; may include warm-up"
    confidence = "high" if 2 * rows["idle_ns"][rows["call"] != ""].sum() > rows["idle_ns"].sum() else "medium"
    yield program.finding_in_idle(
        "loading:recurs" if recurs else "loading", rows, note=note, saves=program.idle_ns("loading"),
        confidence=confidence, during=during,
    )  # fmt: skip


def garbage(program: Program) -> Iterator[Finding]:
    """Idle while Python collects garbage.

    Saves: That time, in the first and last step, which may be cut, as in the median one.
    """
    if len(rows := program.idle("gc")):
        saves, cut = _whole_steps_save(program, program.idle_ns("gc"), ["gc"])
        yield program.finding_in_idle("gc", rows, note=cut, saves=saves)


def _whole_steps_save(program: Program, saves: float, causes: Collection[str]) -> tuple[float, str]:
    """What is saved if the first step idles for these causes as long as the median one, as what came before it may lie
    outside the capture, and so the last one, as far as no operation follows; and a note that says so.
    """
    steps, idle_ns = program.steps, program.steps[[f"idle_{cause}_ns" for cause in causes]].sum(axis=1)
    of_gpu = idle_ns.groupby([steps["process"], steps["device"]])
    at_most_ns = steps["idle_other_ns"].where(of_gpu.cumcount(ascending=False) == 0, 0).where(of_gpu.cumcount() > 0)
    less_ns = (of_gpu.transform("median") - idle_ns).clip(0, at_most_ns)
    added = float(less_ns.sum() / max(idle_ns.sum(), 1)) * (program.choice.count >= STEPS_TO_JUDGE)
    note = f"; {share(added, 1)} more if the first and last step, which are cut, count as the median one"
    return saves * (1 + added), note * (added >= BUSY_SHARE)


_RULE_OF_CAUSE = {
    "launch": "launch", "unknown": "host-busy", "python": "host-busy", "off_cpu": "host-busy", "sync": "sync",
    "after_sync": "sync", "dataloader": "dataloader", "allocation": "allocation", "loading": "loading", "gc": "gc",
}  # fmt: skip


def unstable_step(program: Program) -> Iterator[Finding]:
    """Of four steps or more, one takes more than 1.2 times the median, for more than communication and the end of the
    capture, and not because the same launches came late. Where some steps run kernels of torch.compile, and others, of
    equal products, do not, the median is that of the compiled ones.

    Saves: What such steps take above it.
    """
    steps = program.steps[program.steps["step"].notna()]
    is_last = ~steps.duplicated(["process", "device"], keep="last")  # its end may lie outside the capture
    steps = steps.assign(work_ns=steps["wall_ns"] - steps["exposed_comm_ns"] - steps["idle_other_ns"] * is_last)
    gpus, ops = [steps["process"], steps["device"]], program.ops
    products_ns = ops["ns"].where(ops["kernel_class"] == "gemm", 0).groupby(ops["step"]).sum()
    is_compiled = products_ns.index.isin(ops["step"][matching(ops["name"], FUSED)])
    usual_ns = products_ns[is_compiled].median()  # NaN if none is compiled
    is_alike = products_ns.between(usual_ns / UNSTABLE, usual_ns * UNSTABLE)
    is_eager = steps["step"].isin(products_ns.index[is_alike & ~is_compiled])
    compared = steps[["wall_ns", "work_ns"]].where(~is_eager).groupby(gpus)
    usual = compared.transform("quantile", 0.5, interpolation="lower")
    excess_ns = steps["work_ns"] - usual["work_ns"]
    is_slow = (steps["wall_ns"] > UNSTABLE * usual["wall_ns"]) & (excess_ns > (UNSTABLE - 1) * usual["wall_ns"] / 2)
    is_slow &= steps.groupby(gpus)["wall_ns"].transform("size") >= STEPS_TO_JUDGE
    if not is_slow.any():
        return
    slow = steps[is_slow].assign(excess_ns=excess_ns)
    lost_ns: Any = slow.groupby(["process", "device"])["excess_ns"].sum()
    process, device = lost_ns.idxmax()
    of_gpu = (steps["process"] == process) & (steps["device"] == device)
    parts = steps[["compute_ns", "exposed_copy_ns", *(f"idle_{cause}_ns" for cause in CAUSES)]]
    more_ns = parts[of_gpu & is_slow] - parts[of_gpu & ~is_slow].median().fillna(0)
    grown = str(more_ns.sum().idxmax()).removesuffix("_ns")
    cause = grown.removeprefix("idle_")
    if cause == "launch" and program.steps_are_alike:
        return  # the host launches the same, but was disturbed
    more = {"compute": "computing", "exposed_copy": "copying"}.get(grown) or f"idle: {CAUSES[cause]}"
    worst, count = steps.loc[steps["wall_ns"][of_gpu].idxmax()], (of_gpu & is_slow).sum()
    evidence = f"{count} of {of_gpu.sum()} steps {'takes' if count == 1 else 'take'} more than {UNSTABLE} times the "
    evidence += f"median of {ms(usual['wall_ns'][worst.name])}; step {int(worst['step'])} takes {ms(worst['wall_ns'])}"
    evidence += f"; most of the excess is {more}"
    if len(lost_ns) > 1:
        evidence += f"; seen on {len(lost_ns)} GPUs, this one loses most"
    case = "unstable-step:compute" if grown == "compute" else "unstable-step"
    symptom_of, confidence = _RULE_OF_CAUSE.get(cause, ""), "low"
    if (is_slow & is_eager).any():
        case, symptom_of, confidence = "unstable-step:eager", "", "medium"
        eager_steps = plural((of_gpu & is_eager).sum(), "step", "runs/run")
        evidence += f"; {eager_steps} none of the kernels that torch.compile made for the others"
    yield finding_of(
        case, evidence, ("", ""), (worst["start_ns"], worst["wall_ns"]), int(lost_ns.sum()),
        confidence=confidence, symptom_of=symptom_of,
    )  # fmt: skip
