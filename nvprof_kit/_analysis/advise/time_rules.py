"""Rules about where the steps' time goes: a host that is late, waits, loads or allocates; exposed communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nvprof_kit._analysis.advise.evidence import Evidence, ms, share
from nvprof_kit._analysis.attribution.windows import median_place
from nvprof_kit._analysis.breakdown.host_activity import CAUSES
from nvprof_kit._findings import Finding
from nvprof_kit._trace.schema import OP_KINDS
from nvprof_kit.names import NO_LAYER

if TYPE_CHECKING:
    import pandas as pd

LAUNCH_SHARE, SYNC_SHARE, DATA_SHARE, ALLOCATION_SHARE, LOADING_SHARE, GC_SHARE = 0.05, 0.005, 0.01, 0.005, 0.01, 0.005
EXPOSED_SHARE, COMM_SHARE, HIDDEN_SHARE, WAITING_SHARE = 0.05, 0.02, 0.1, 0.05
OFTEN, OFTEN_SHARE, PLACES = 4, 0.001, 3
SIBLINGS, SLOW_HOST_SHARE = 4, 0.02
_INDEX = r"(?<=\.)\d+(?=\.|$)"
STALL_SHARE = 0.01
STEADY, SURE_SHARE, LIKELY_SHARE = 0.8, 0.5, 0.3
"""Launching late in every step is what the steps that wait least show; a profiler at most doubles the host's time, so
half of the step is idle without it too, and of less than a third there may be nothing left.
"""
OUTSIDE_KERNELS, OUTSIDE_SHARE = 50, 0.2
LAUNCH_CALL_NS = 3_000
"""A call that launches a kernel takes about this long where no profiler traces it."""
UNSTABLE, STEPS_TO_JUDGE = 1.2, 4
CALLS_OF_WARM_UP = 4
"""Without steps, a layer that loads in more of its calls does so for each shape, not only in prefill and at first."""


def _at(row: Any) -> tuple[int, int]:
    return int(row["longest_at_ns"]), int(row["longest_at_ns"] + row["longest_ns"])


def _worst(rows: pd.DataFrame) -> Any:
    """The row with the most idle time in the layer and phase that have the most, and their total as ``place_ns``."""
    by_place = rows.groupby(["layer", "phase"], sort=False)["idle_ns"].sum()
    layer, phase = by_place.index[int(by_place.to_numpy().argmax())]
    rows_there = rows[(rows["layer"] == layer) & (rows["phase"] == phase)]
    return rows_there.iloc[0].to_dict() | {"place_ns": int(by_place.max())}


def _idle(
    facts: Evidence, rule: str, causes: tuple[str, ...], least_share: float, *,
    title: str, advice: str, confidence: str, refuted_by: str,
) -> Iterator[Finding]:  # fmt: skip
    """A finding if these causes of idle time take at least this share of the steps."""
    idle_ns, rows = facts.idle_ns(*causes), facts.idle(*causes)
    if idle_ns < least_share * facts.wall_ns or not len(rows):
        return
    worst = _worst(rows)
    inside = ", ".join(name for name in (worst["operator"], worst["call"]) if name)
    figures = (
        f"{facts.ms(idle_ns)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(idle_ns, facts.wall_ns)}) idle; "
        f"most in {worst['layer']} {worst['phase']}: {facts.ms(worst['place_ns'])}{facts.per_step}; longest stretch "
        f"there: {ms(worst['longest_ns'])}{f', in {inside}' if inside else ''}"
    )
    yield Finding(
        rule, title, figures, worst["layer"], worst["phase"], *_at(worst), idle_ns, advice, confidence, refuted_by
    )


_LAUNCH_ADVICE = {
    "training": "capture the step in a CUDA graph, torch.compile(mode='reduce-overhead'), or give each launch more "
    "work (batch size)",
    "sharded": "torch.compile the layers, use fewer and larger shards (wrap several blocks as one), or give each "
    "launch more work (batch size)",
    "decode": "use a CUDA graph or torch.compile(mode='reduce-overhead') for the decoding step (with a static cache), "
    "or decode more sequences at once",
    "mixed": "use CUDA graphs for the decoding steps (with a static cache), and put more prompts or longer chunks into "
    "each prefill",
    "prefill": "put more tokens into each launch (more sequences at once, longer chunks), or "
    "torch.compile(mode='reduce-overhead') for a few fixed lengths",
    "evaluation": "evaluate larger batches, or torch.compile(mode='reduce-overhead')",
}
"""What makes launches fewer or each worth more, by `Evidence.program`; `sharded` is training with FSDP or ZeRO."""


def launch_bound(facts: Evidence) -> Iterator[Finding]:
    """The GPU waits for launches: in layers, and apart from them where the loop outside launches many kernels."""
    if facts.program == "graph capture":  # launches are recorded then, not run, once
        return
    rows, stalls = facts.idle("launch", "unknown"), facts.stalls
    idle_ns = facts.idle_ns("launch", "unknown")
    stalls_ns = int(stalls["idle_ns"].sum())
    copy_gaps = facts.around_copies
    late_ns = idle_ns - stalls_ns - int(copy_gaps["idle_ns"][copy_gaps["cause"] == "unknown"].sum())
    unknown_ns = max(facts.idle_ns("unknown") - stalls_ns, 0)
    notes, saves = [], late_ns
    if stalls_ns >= STALL_SHARE * facts.wall_ns:
        notes.append(f"without {facts.ms(stalls_ns)} in which the host was long busy with something else")
    if unknown_ns >= saves / 10:
        notes.append(f"what the host did for {facts.ms(unknown_ns)} of it is unknown")
    steady = min(_steady_ns(facts), saves)
    if steady < STEADY * saves:
        notes.append(
            f"only {facts.ms(steady)} of it in the steps that wait least: the host was disturbed in the others"
        )
        saves = steady
    traced = _tracing_ns(facts)
    if traced >= saves / 10:
        notes.append(f"tracing makes the kernels' launches {facts.ms(traced)} longer{facts.per_step}: not counted")
    saves -= traced
    if saves < LAUNCH_SHARE * facts.wall_ns or not len(rows):
        return
    confidence = "high"
    if facts.has_stacks:
        confidence = "low"
        notes.append("the recording of Python's stacks slows the host: record without them to know")
    elif saves < SURE_SHARE * facts.wall_ns:
        confidence = "medium" if saves >= LIKELY_SHARE * facts.wall_ns else "low"
        notes.append("the profiler makes the host slower: compare the step's time without it")
    advice = _launch_advice(facts)
    refuted = "the step takes twice as long with twice the batch"
    if "CUDA graph" in advice and not _read_back(facts):
        refuted = f"the step is no faster in a CUDA graph, or {refuted.replace('the step ', '')}"
    in_stalls = stalls.groupby(["layer", "phase"], observed=True)["idle_ns"].sum()
    places = rows.groupby(["layer", "phase"], sort=False)["idle_ns"].sum()
    places = places.sub(in_stalls, fill_value=0).clip(lower=0)
    outside = _outside(facts, places)
    parts = [(outside, "Kernels outside the layers are launched one by one", _OUTSIDE_ADVICE, "it stays as it is")]
    parts.append((places.drop(outside.index), "The GPU waits for the host to launch", advice, refuted))
    for of_places, title, fix, refuted_by in parts:
        if not len(of_places) or not of_places.sum():
            continue
        layer, phase = map(str, of_places.index[int(of_places.to_numpy().argmax())])
        worst = rows[(rows["layer"] == layer) & (rows["phase"] == phase)].iloc[0]
        inside = ", ".join(name for name in (worst["operator"], worst["call"]) if name)
        figures = (
            f"{facts.ms(of_places.sum())} of {facts.ms(facts.wall_ns)}{facts.per_step} "
            f"({share(of_places.sum(), facts.wall_ns)}) idle; most in {layer} {phase}: {facts.ms(of_places.max())}"
            f"{facts.per_step}; longest stretch there: {ms(worst['longest_ns'])}{f', in {inside}' if inside else ''}"
        )
        yield Finding(
            "launch", title, "; ".join((figures, *notes)), layer, phase, *_at(worst),
            round(saves * of_places.sum() / places.sum()), fix, confidence, refuted_by,
        )  # fmt: skip


_OUTSIDE_ADVICE = (
    "do for all at once what a loop over parameters, tokens or sequences does one by one (torch._foreach_*, an index "
    "for all of them), do it every N steps, or compile that function"
)


def _outside(facts: Evidence, places: pd.Series[int]) -> pd.Series[int]:
    """The places outside layers and optimizer, if they launch many kernels and hold a notable part of the waiting."""
    layer, phase = (places.index.get_level_values(level).astype(str) for level in (0, 1))
    outside = places[(layer == NO_LAYER) & (phase != "optimizer")]
    ops = facts.ops
    kernels = (ops["kind"] == OP_KINDS.index("kernel")) & facts.inside & (facts.trace.ops["graph_node"] < 0)
    kernels &= (ops["layer"] == NO_LAYER) & (ops["phase"] != "optimizer")
    is_loop = int(kernels.sum()) >= OUTSIDE_KERNELS * facts.steps_and_gpus
    return outside if is_loop and OUTSIDE_SHARE * places.sum() <= outside.sum() < places.sum() else outside[:0]


def _launch_advice(facts: Evidence) -> str:
    """How to launch earlier, or less often."""
    read_back = _read_back(facts)
    if read_back:
        split = " give every expert or branch a fixed size first, or" if facts.has_experts else ""
        return (
            f"{read_back}, as nonzero(), item() and masks used as indices do: a CUDA graph cannot capture this part of "
            f"the step;{split} capture only the layers without such copies, or give each launch more work (batch size)"
        )
    if facts.replays_graphs:
        return "put more of the step into the CUDA graphs that it replays, or give each replay more work (batch size)"
    return _LAUNCH_ADVICE["sharded" if facts.program == "training" and facts.is_sharded else facts.program]


def _steady_ns(facts: Evidence) -> int:
    """What the steps would wait for launches if each waited as little as those that wait least: as the least of steps
    that run equally many operations, so that only a disturbed host tells them apart; else as a quarter of them. The
    first step does not count among many: what came before it may lie outside the capture.
    """
    rows = facts.steps
    stalls = facts.stalls.groupby("window")["idle_ns"].sum().reindex(rows.index, fill_value=0)
    idle_ns = rows["idle_launch_ns"] + rows["idle_unknown_ns"] - stalls
    quantile, total = 0.05 if facts.steps_are_alike else 0.25, 0
    for _, of_gpu in idle_ns.groupby([rows["process"], rows["device"]]):
        compared = of_gpu.iloc[1:] if len(of_gpu) >= STEPS_TO_JUDGE else of_gpu
        total += int(compared.quantile(quantile, interpolation="lower")) * len(of_gpu)
    return total


def _tracing_ns(facts: Evidence) -> int:
    """By how much the profiler makes the launches of these steps' kernels longer."""
    calls = facts.trace.calls
    if calls is None:
        return 0
    launches = calls[calls["name"].astype(str).str.contains("LaunchKernel")]
    if not len(launches):
        return 0
    call_ns = int((launches["end_ns"] - launches["start_ns"]).median())
    kernels = (facts.ops["kind"] == OP_KINDS.index("kernel")) & (facts.trace.ops["graph_node"] < 0) & facts.inside
    return max(call_ns - LAUNCH_CALL_NS, 0) * int(kernels.sum())


def slow_host_in_layer(facts: Evidence) -> Iterator[Finding]:
    """A layer in which the host launches later than in others of its kind, in most steps."""
    gaps, windows = facts.times.gaps, facts.steps.index
    here = gaps[gaps["cause"].isin(["launch", "off_cpu"]) & gaps["window"].isin(windows) & (gaps["layer"] != NO_LAYER)]
    if len(windows) < STEPS_TO_JUDGE or not len(here):
        return
    sums = here.groupby(["layer", "phase", "window"], observed=True)["idle_ns"].sum().unstack(fill_value=0)
    usual = sums.reindex(columns=windows, fill_value=0).median(axis=1).reset_index(name="ns")
    usual = usual.astype({"layer": str, "phase": str})
    usual["kind"] = usual["layer"].str.replace(_INDEX, "N", regex=True)
    peers = usual[usual["kind"] != usual["layer"]].groupby(["kind", "phase"])["ns"]
    usual["excess"] = usual["ns"] - peers.transform("median").reindex(usual.index)
    usual["peers"] = peers.transform("size").reindex(usual.index)
    starts = facts.ops[facts.inside].groupby(["layer", "phase"], observed=True)["start_ns"].min().rename("start")
    starts.index = starts.index.map(lambda place: (str(place[0]), str(place[1])))
    first = usual.join(starts, on=["layer", "phase"]).groupby(["kind", "phase"])["start"].transform("min")
    is_first = usual.join(starts, on=["layer", "phase"])["start"] == first  # what came before it delays it
    usual = usual[(usual["peers"] >= SIBLINGS) & (usual["excess"] > usual["ns"] / 2) & ~is_first]
    if not len(usual):
        return
    worst = usual.loc[usual["excess"].idxmax()]
    saves = int(worst["excess"]) * len(windows)
    if saves < SLOW_HOST_SHARE * facts.wall_ns:
        return
    in_worst = here[(here["layer"] == worst["layer"]) & (here["phase"] == worst["phase"])]
    longest = in_worst.loc[in_worst["idle_ns"].idxmax()]
    start = int(longest["start_ns"])
    figures = (
        f"{worst['layer']} {worst['phase']}: the GPU waits {ms(worst['ns'])} for the host in the median step, "
        f"{ms(worst['ns'] - worst['excess'])} in the median of the {int(worst['peers'])} layers like it"
    )
    yield Finding(
        "slow-host-layer", "The host is slower in a layer than in its peers", figures, str(worst["layer"]),
        str(worst["phase"]), start, start + int(longest["idle_ns"]), saves,
        "look at the Python code of this layer: hooks, sleeps, locks, logging, data prepared there, or many small "
        "operations; move it out of the layer or fuse it", "high", "the layer is meant to do more than its peers",
    )  # fmt: skip


def _read_back(facts: Evidence) -> str:
    """Says where layers copy to the host within the steps; '' where none does."""
    copies = np.flatnonzero((facts.ops["kind"].to_numpy() == OP_KINDS.index("memcpy")) & facts.inside)
    named = (facts.trace.ops["name"].iloc[copies] == "memcpy DtoH").to_numpy()
    rows = facts.ops.iloc[copies[named]]
    rows = rows[rows["phase"].isin(("forward", "recompute", "backward")) & (rows["layer"] != NO_LAYER)]
    if not len(rows):
        return ""
    places = rows.groupby(["layer", "phase"], observed=True, sort=False).size()
    layer, phase = places.index[int(places.to_numpy().argmax())]
    more = len(places) - 1
    other_places = f" and {more} other place{'s' * (more > 1)} copy" if more else " copies"
    return f"{layer} {phase}{other_places} data to the host"


def sync_points(facts: Evidence) -> Iterator[Finding]:
    """The host waits for the GPU within the step, and then launches late: the places where most is lost."""
    waits, gaps = facts.times.waits, facts.times.gaps
    waits = waits[~waits["gap"].isin(facts.around_copies.index)]
    if not len(waits) or not _notable_waits(waits, facts):
        return
    waits = waits.astype({"layer": str, "phase": str, "call": str})
    waits = waits.assign(kind=waits["layer"].str.replace(_INDEX, "N", regex=True))  # equal layers are one place
    places = sorted(
        (rows_there for _, rows_there in waits.groupby(["kind", "phase", "call"], sort=False)),
        key=lambda rows_there: -int(rows_there["lost_ns"].sum()),
    )
    more_places = [rows_there for rows_there in places[1:PLACES] if _notable_waits(rows_there, facts)]
    lost_ns = int(waits["lost_ns"].sum() - sum(rows_there["lost_ns"].sum() for rows_there in more_places))
    steps = bool(facts.choice.count)
    for rows_there in (places[0], *more_places):
        saves = lost_ns if rows_there is places[0] else int(rows_there["lost_ns"].sum())
        by_layer = rows_there.groupby("layer", sort=False)["lost_ns"].sum()
        in_layer = rows_there[rows_there["layer"] == by_layer.idxmax()]
        worst = in_layer.iloc[int(in_layer["lost_ns"].to_numpy().argmax())]
        figures = (
            f"{facts.ms(saves)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(saves, facts.wall_ns)}) idle in "
            f"gaps that begin while the host waits for the GPU; most after {worst['call']} in {worst['layer']} "
            f"{worst['phase']}: {facts.ms(int(by_layer.max()))} in {_number(len(in_layer), facts)}, the longest "
            f"{ms(int(worst['lost_ns']))}"
        )
        if len(by_layer) > 1:
            figures += (
                f"; in {len(by_layer)} layers like it {facts.ms(int(rows_there['lost_ns'].sum()))}, "
                f"{_number(len(rows_there), facts)}"
            )
        copies = "copies to and from pageable memory, " if "Memcpy" in worst["call"] else ""
        start = int(gaps["start_ns"].iloc[int(worst["gap"])])
        yield Finding(
            "sync", f"The host waits for the GPU{' within a step' if steps else ''}", figures, worst["layer"],
            worst["phase"], start, start + int(worst["lost_ns"]), saves,
            f"remove {copies}.item(), .cpu(), print(loss), torch.cuda.synchronize() from the "
            f"{'step, or run them every N steps' if steps else 'loop, or run them less often'}",
            "high" if facts.idle_ns("launch") < LIKELY_SHARE * facts.wall_ns else "medium",
            "the idle time remains when the call is removed",
        )  # fmt: skip


def _notable_waits(waits: pd.DataFrame, facts: Evidence) -> bool:
    """Whether these waits lose a notable share of the steps' time."""
    often = len(waits) >= OFTEN * facts.steps_and_gpus and bool(facts.choice.count)
    return bool(waits["lost_ns"].sum() >= (OFTEN_SHARE if often else SYNC_SHARE) * facts.wall_ns)


def _number(count: int, facts: Evidence) -> str:
    """A number of gaps as text, per step and GPU where it is one or more."""
    each = count / facts.steps_and_gpus
    return f"{each:,.0f} gaps per step" if facts.choice.count and each >= 1.5 else f"{count:,} gaps"


def loading(facts: Evidence) -> Iterator[Finding]:
    """Libraries, modules and plans are loaded or built in steps that are not warm-up."""
    rows = facts.idle("loading")
    by_call = int(rows["idle_ns"][rows["call"] != ""].sum())
    recurring_fix = (
        "pad to a few lengths, so that plans are built once; for attention over growing lengths use another kernel: "
        "torch.backends.cuda.enable_cudnn_sdp(False)"
    )
    once = "warm up with every shape first; set CUDA_MODULE_LOADING=EAGER and torch.backends.cudnn.benchmark=False"
    steps = facts.steps["idle_loading_ns"] > 0.01 * facts.steps["wall_ns"].clip(lower=1)
    steps_that_load, calls = int(steps.sum()), 0
    if len(rows):  # in how many calls of the layer that loads most it loads; none outside layers
        worst, gaps, ranges = _worst(rows), facts.times.gaps, facts.attribution.ranges
        gaps = gaps[
            (gaps["cause"] == "loading") & (gaps["layer"] == worst["layer"]) & (gaps["phase"] == worst["phase"])
        ]
        named = np.array([name.text == worst["layer"] for name in ranges.names], dtype=bool)
        starts = np.sort(ranges.start[named[ranges.name]]) if len(named) else ranges.start[:0]
        call = np.searchsorted(starts, (gaps["start_ns"] + gaps["idle_ns"]).to_numpy(), side="right")
        calls = len(np.unique(call[call > 0]))
    recurs = steps_that_load > 1 if facts.choice.count else calls > CALLS_OF_WARM_UP
    for finding in _idle(
        facts, "loading", ("loading",), LOADING_SHARE,
        title=f"Loading, compiling or tuning{' during steps' if facts.choice.count else ''}",
        advice=recurring_fix if recurs else once,
        confidence="high" if 2 * by_call > int(rows["idle_ns"].sum()) else "medium",
        refuted_by="as much time is lost when the same shapes run a second time in the same process",
    ):  # fmt: skip
        where = "; may include warm-up"
        if facts.choice.count:
            where = f"; in {steps_that_load} of {len(facts.steps)} steps"
        elif recurs:
            where = f"; in {calls} calls of this layer"
        yield replace(finding, evidence=finding.evidence + where)


def garbage(facts: Evidence) -> Iterator[Finding]:
    """The GPU waits while Python collects garbage."""
    yield from _idle(
        facts, "gc", ("gc",), GC_SHARE, title="Python garbage collection stalls the GPU",
        advice="call gc.freeze() after building the model, gc.disable() in the loop, and gc.collect() every N steps",
        confidence="high", refuted_by="the gaps remain with gc.disable()",
    )  # fmt: skip


def dataloader(facts: Evidence) -> Iterator[Finding]:
    """The GPU waits for data."""
    loading_ns, rows = facts.loading_ns, facts.idle("dataloader")
    if loading_ns < DATA_SHARE * facts.wall_ns or not len(rows):
        return
    worst = rows.iloc[0]
    inside = ", ".join(name for name in (worst["operator"], worst["call"]) if name)
    figures = (
        f"{facts.ms(loading_ns)}{facts.per_step} idle inside the data loader's ranges, "
        f"{share(loading_ns, facts.wall_ns)} of the steps' time; longest stretch: {ms(worst['longest_ns'])}"
        f"{f', in {inside}' if inside else ''}"
    )
    advice = "use more DataLoader workers, prefetch_factor, persistent_workers, or preprocess the data offline"
    refuted = "the step takes as long when it reuses one batch"
    yield Finding(
        "dataloader", "The GPU waits for data", figures, "", "data", *_at(worst), loading_ns, advice, "high", refuted
    )


def host_busy(facts: Evidence) -> Iterator[Finding]:
    """The GPU waits for long while the host does something else than launch: a Python function outside layers, a call
    of the operating system, or what the capture does not tell.
    """
    stalls = facts.stalls.assign(longest_ns=facts.stalls["idle_ns"], longest_at_ns=facts.stalls["start_ns"])
    off_cpu = facts.idle("off_cpu")
    waits = {"python": facts.idle("python"), "off_cpu": off_cpu[off_cpu["layer"] == NO_LAYER], "unknown": stalls}
    for cause, rows in waits.items():
        idle_ns = int(rows["idle_ns"].sum())
        if idle_ns < DATA_SHARE * facts.wall_ns or not len(rows):
            continue
        names = rows["operator" if cause == "python" else "call"].astype(str)
        by_name = rows.groupby(names)["idle_ns"].sum().sort_values(ascending=False)
        full_name = str(by_name.index[0]) if cause != "unknown" else ""
        name = full_name.rpartition(": ")[2]
        longest = rows.loc[rows["longest_ns"].where(names == by_name.index[0], 0).idxmax()]
        figures = (
            f"{facts.ms(idle_ns)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(idle_ns, facts.wall_ns)}) idle "
        )
        if name:
            more = ", ".join(f"{text or 'no call'}: {facts.ms(ns)}" for text, ns in by_name.iloc[1:3].items())
            where = "host runs Python outside layers" if cause == "python" else "thread that launches is on no CPU"
            figures += f"while the {where}; most in {full_name}: {facts.ms(int(by_name.iloc[0]))}"
            figures += f"; {more}" if more else ""
        else:
            figures += "in long stretches in which the host neither launches nor calls CUDA"
        subject = f"{name}" if name else "something unknown on the host"
        advice = f"make {name} faster, or run it while the GPU works: in DataLoader workers, another thread or process"
        if not name:
            advice = (
                "find out what runs there: put nvprof_kit.phase('data') around fetching and preparing data, other "
                "phases around logging, checkpoints and gc.collect(), record with -t cuda,nvtx,osrt or with Python "
                "backtraces; then run it while the GPU works"
            )
        yield Finding(
            "host-busy", f"The GPU waits for {subject}", figures, str(longest["layer"]), str(longest["phase"]),
            *_at(longest), idle_ns, advice, "medium",
            f"the step takes as long without {name or 'what runs there'}",
        )  # fmt: skip


def allocator(facts: Evidence) -> Iterator[Finding]:
    """Allocations stall the GPU."""
    yield from _idle(
        facts, "allocation", ("allocation",), ALLOCATION_SHARE, title="Allocations stall the GPU",
        advice="keep shapes the same from step to step, warm up first, "
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no empty_cache() in the loop",
        confidence="high", refuted_by="the same calls recur in later steps although shapes repeat and nothing is freed",
    )  # fmt: skip


def exposed_collectives(facts: Evidence) -> Iterator[Finding]:
    """Exposed communication, without what may be waiting for other ranks, takes a notable share of the step."""
    rows = facts.times.communication
    waiting = min(int(rows["waiting_ns"].sum()) + facts.waited_ns, int(facts.steps["exposed_comm_ns"].sum()))
    comm, exposed = (int(facts.steps[name].sum()) for name in ("comm_ns", "exposed_comm_ns"))
    moving_alone, moving = exposed - waiting, max(comm - waiting, 1)
    in_turns = moving_alone >= COMM_SHARE * facts.wall_ns and moving_alone >= (1 - HIDDEN_SHARE) * moving
    if not len(rows) or (moving_alone < EXPOSED_SHARE * facts.wall_ns and not in_turns):
        return
    worst = rows.iloc[int((rows["exposed_ns"] - rows["waiting_ns"]).to_numpy().argmax())]
    figures = (
        f"{facts.ms(moving_alone)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(moving_alone, facts.wall_ns)}) "
        f"the GPU moves data between ranks and computes nothing; most in {worst['collective']} of {worst['layer']} "
        f"{worst['phase']}: {facts.ms(worst['exposed_ns'])} of {facts.ms(worst['gpu_ns'])} exposed{_moved(worst)}"
    )
    if waiting:
        figures += f"; {facts.ms(waiting)} more may be waiting for other ranks"
    advice = "use smaller or earlier buckets (bucket_cap_mb), or prefetch the next layer's shards"
    title = "Exposed communication"
    one_stream = _shares_stream(facts)
    if in_turns or one_stream:
        title = "Communication and compute do not overlap"
        figures += f"; {share(moving - moving_alone, moving)} of the transfer time is overlapped by compute"
        advice = (
            "launch collectives asynchronously on their own stream, or let DDP or FSDP do it (without "
            "find_unused_parameters, and with no synchronization in between)"
        )
    if one_stream:
        title = "Communication and compute share a stream"
        figures += "; the collectives run on the stream that computes, where nothing can overlap them"
        advice = "issue collectives on a stream of their own (async_op=True), and wait where their result is used"
    refuted = "the collectives take as long by themselves (nccl-tests), or get shorter with a faster slowest rank"
    if facts.program != "training":
        title = "All-reduces of tensor parallelism" if str(worst["collective"]).lower() == "allreduce" else title
        advice = (
            "each layer needs the result at once, so nothing hides it: use the engine's own or fused all-reduce "
            "(one-shot over NVLink, in the switch), fewer ranks of tensor parallelism, or more tokens per step"
        )
        refuted = "one rank less of tensor parallelism makes the step no shorter"
    yield Finding(
        "exposed-collectives", title, figures, worst["layer"], worst["phase"], *_longest_collective(facts, worst),
        moving_alone, advice, "low" if rows["bytes"].isna().any() or waiting > moving_alone else "medium", refuted,
    )  # fmt: skip


def _shares_stream(facts: Evidence) -> bool:
    """Whether most of the communication runs on streams that also compute."""
    comm = facts.classes.is_a("comm") & facts.inside
    kernels = (facts.ops["kind"] == OP_KINDS.index("kernel")).to_numpy() & facts.inside & ~comm
    streams = facts.trace.ops[["pid", "device", "stream"]]
    computing = streams[kernels].value_counts()
    shares = streams[comm].merge(computing[computing > 1].rename("count").reset_index(), how="left")["count"].notna()
    ns = facts.ops["ns"].to_numpy()[comm]
    return bool(2 * ns[shares.to_numpy()].sum() > ns.sum())


def rank_waits(facts: Evidence) -> Iterator[Finding]:
    """Collectives take longer than similar ones: this rank may be waiting for others, so the fix is not here."""
    rows = facts.times.communication
    waiting = int(rows["waiting_ns"].sum()) if len(rows) else 0
    if waiting < WAITING_SHARE * facts.wall_ns:
        return
    worst = rows.iloc[int(rows["waiting_ns"].to_numpy().argmax())]
    figures = (
        f"{facts.ms(waiting)} of {facts.ms(facts.wall_ns)}{facts.per_step} ({share(waiting, facts.wall_ns)}) is "
        f"exposed communication beyond the fastest similar collective; most in {worst['collective']} of "
        f"{worst['layer']} {worst['phase']}: {facts.ms(worst['waiting_ns'])}"
    )
    advice = "find the slowest rank with nvprof-kit ranks, or advise, on the captures of all ranks, and fix it there"
    yield Finding(
        "rank-wait", "This rank may be waiting for others", figures, worst["layer"], worst["phase"],
        *_longest_collective(facts, worst), 0, advice, "medium",
        "the other ranks' collectives take as long in these steps",
    )  # fmt: skip


def _moved(row: Any) -> str:
    """How much communication moved and how fast, if the capture has it."""
    if str(row["bytes"]) in ("<NA>", "nan"):
        return ""
    return f", {row['bytes'] / 1e6:,.1f} MB at {row['algorithm_gb_per_s']:,.1f} GB/s"


def _longest_collective(facts: Evidence, row: Any) -> tuple[int, int]:
    """Start and end of the longest collective in the layer and phase of a row."""
    in_layer = (facts.ops["layer"] == row["layer"]) & (facts.ops["phase"] == row["phase"])
    return facts.longest(np.flatnonzero(facts.classes.is_a("comm") & facts.inside & in_layer.to_numpy()))


def unstable_step(facts: Evidence) -> Iterator[Finding]:
    """Some steps take much longer than the median, and not only because they wait for other ranks."""
    rows = facts.steps[facts.steps["step"].notna()]
    unstable = [
        gpu for _, rows_of_gpu in rows.groupby(["process", "device"]) if (gpu := _unstable(rows_of_gpu)) is not None
    ]
    if not unstable:
        return
    chosen = max(unstable, key=lambda gpu: gpu.lost_ns)
    if chosen.column == "idle_launch_ns" and facts.steps_are_alike:
        return  # the host launches the same, but was disturbed
    worst = chosen.rows.iloc[int(chosen.rows["wall_ns"].to_numpy().argmax())]
    figures = (
        f"{chosen.slow_steps} of {len(chosen.rows)} steps take more than {UNSTABLE} times the median of "
        f"{ms(chosen.median_ns)}; step {int(worst['step'])} takes {ms(worst['wall_ns'])}; most of the excess is "
        f"{chosen.cause}"
    )
    if len(unstable) > 1:
        figures += f"; seen on {len(unstable)} GPUs, this one loses most"
    start = int(worst["start_ns"])
    advice = "look there for allocations, logging, checkpoints, garbage collection, or a different shape"
    if chosen.column == "compute_ns":
        advice = (
            "compare the kernels of these steps with the others' (nvprof-kit summary --view kernel --by step): longer "
            "batches can be grouped by length or packed; if the same kernels take longer, the GPU's clocks fell"
        )
    yield Finding(
        "unstable-step",
        "Step times vary",
        figures,
        "",
        "",
        start,
        start + int(worst["wall_ns"]),
        sum(gpu.lost_ns for gpu in unstable),
        advice,
        "low",
        "the long steps are meant to do more work: evaluation, a checkpoint, a longer batch",
        _RULE_OF.get(chosen.column, ""),
    )


class _Unstable(NamedTuple):
    """Slow steps of a GPU: time lost beyond waiting for ranks, the median, their number, the part that grew most."""

    lost_ns: int
    median_ns: int
    slow_steps: int
    column: str
    rows: pd.DataFrame

    @property
    def cause(self) -> str:
        name_of_part = {"compute_ns": "computing", "exposed_copy_ns": "copying"}
        idle_cause = self.column.removeprefix("idle_").removesuffix("_ns")
        return name_of_part.get(self.column) or f"idle: {CAUSES[idle_cause]}"


_RULE_OF = {
    f"idle_{cause}_ns": rule
    for rule, causes in {
        "launch": ("launch",),
        "host-busy": ("unknown", "python", "off_cpu"),
        "sync": ("sync", "after_sync"),
        **{cause: (cause,) for cause in ("dataloader", "allocation", "loading", "gc")},
    }.items()
    for cause in causes
}


def _unstable(rows: pd.DataFrame) -> _Unstable | None:
    wall = (rows["wall_ns"] - rows["exposed_comm_ns"]).to_numpy()
    wall_ns = rows["wall_ns"].to_numpy()
    median_ns, usual = (
        int(walls[median_place(walls)]) for walls in (wall_ns, wall)
    )  # a step's, as in breakdown and on the page
    slow = (wall_ns > UNSTABLE * median_ns) & (wall - usual > (UNSTABLE - 1) * median_ns / 2)
    if len(rows) < STEPS_TO_JUDGE or not slow.any():
        return None
    names = ["compute_ns", "exposed_copy_ns", *(f"idle_{cause}_ns" for cause in CAUSES)]
    parts = rows[names]
    more = (parts[slow] - parts[~slow].median()).sum() if (~slow).any() else parts[slow].sum()
    lost_ns = int((wall[slow] - usual).sum())
    return _Unstable(lost_ns, median_ns, int(slow.sum()), str(more.idxmax()), rows)
