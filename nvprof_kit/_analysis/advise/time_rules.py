"""Rules over the time of the steps: the host late, waiting, loading or allocating; communication in the open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nvprof_kit._analysis.advise.evidence import Evidence, Finding, ms, share

LAUNCH_SHARE, SYNC_SHARE, DATA_SHARE, ALLOCATION_SHARE = 0.05, 0.005, 0.01, 0.005
EXPOSED_SHARE, COMM_SHARE, HIDDEN_SHARE = 0.05, 0.02, 0.1
UNSTABLE, STEPS_TO_JUDGE = 1.2, 4


def _at(row: Any) -> tuple[int, int]:
    return int(row["longest_at_ns"]), int(row["longest_at_ns"] + row["longest_ns"])


def _idle(found: Evidence, cause: str, least: float, title: str, advice: str) -> Iterator[Finding]:
    """A finding where a cause of idle time takes a part of the steps."""
    spent, rows = found.idle_ns(cause), found.idle(cause)
    if spent < least * found.wall_ns or not len(rows):
        return
    worst = rows.iloc[0]
    call = f", in {worst['call']}" if worst["call"] else ""
    evidence = (
        f"{ms(spent)} of {ms(found.wall_ns)} ({share(spent, found.wall_ns)}) in "
        f"{int(rows['gaps'].sum())} gaps; most in "
        f"{worst['layer']} {worst['phase']}{call}: {ms(worst['idle_ns'])} in {worst['gaps']} gaps, "
        f"the longest {ms(worst['longest_ns'])}"
    )
    yield Finding(cause, title, evidence, worst["layer"], worst["phase"], *_at(worst), spent, advice)


def launch_bound(found: Evidence) -> Iterator[Finding]:
    """The GPU waits for launches."""
    yield from _idle(
        found, "launch", LAUNCH_SHARE, "The GPU waits for the host to launch",
        "capture the step in a CUDA graph, torch.compile(mode='reduce-overhead'), or give each "
        "launch more work (batch size)",
    )  # fmt: skip


def sync_points(found: Evidence) -> Iterator[Finding]:
    """The host waits for the GPU inside the step."""
    yield from _idle(
        found, "sync", SYNC_SHARE, "The step waits for the GPU in the middle",
        "remove .item(), .cpu(), print(loss), torch.cuda.synchronize() from the step, or do them every N steps",
    )  # fmt: skip


def dataloader(found: Evidence) -> Iterator[Finding]:
    """The GPU waits for data."""
    spent, rows = found.loading_ns, found.idle("dataloader")
    if spent < DATA_SHARE * found.wall_ns or not len(rows):
        return
    worst = rows.iloc[0]
    evidence = (
        f"{ms(spent)} idle inside the data loader's ranges, {share(spent, found.wall_ns)} of the steps' "
        f"time; the longest {ms(worst['longest_ns'])}"
    )
    advice = "more DataLoader workers, prefetch_factor, persistent_workers, or prepare the data beforehand"
    yield Finding("dataloader", "The GPU waits for data", evidence, "", "data", *_at(worst), spent, advice)


def allocator(found: Evidence) -> Iterator[Finding]:
    """Allocations stall the GPU."""
    yield from _idle(
        found, "allocation", ALLOCATION_SHARE, "Allocations stall the GPU",
        "keep shapes the same from step to step, warm up before, "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, no empty_cache() in the loop",
    )  # fmt: skip


def exposed_collectives(found: Evidence) -> Iterator[Finding]:
    """Communication that nothing hides takes a part of the step."""
    spent, rows = int(found.steps["exposed_comm_ns"].sum()), found.times.communication
    if spent < EXPOSED_SHARE * found.wall_ns or not len(rows):
        return
    worst = rows.iloc[0]
    evidence = (
        f"{ms(spent)} of {ms(found.wall_ns)} ({share(spent, found.wall_ns)}) the GPU only "
        f"communicates; most in {worst['collective']} of "
        f"{worst['layer']} {worst['phase']}: {ms(worst['exposed_ns'])} of {ms(worst['gpu_ns'])} exposed{_moved(worst)}"
    )
    place = _communication(found)
    advice = (
        "smaller or earlier buckets (bucket_cap_mb), prefetch of the next layer's shards, and look for "
        "the slowest rank first"
    )
    yield Finding(
        "exposed-collectives",
        "Communication in the open",
        evidence,
        worst["layer"],
        worst["phase"],
        *place,
        spent,
        advice,
    )


def _moved(row: Any) -> str:
    """What communication moved and how fast, where the capture tells."""
    if str(row["bytes"]) in ("<NA>", "nan"):
        return ""
    return f", {row['bytes'] / 1e6:,.1f} MB at {row['algorithm_gb_per_s']:,.1f} GB/s"


def missing_overlap(found: Evidence) -> Iterator[Finding]:
    """Nothing at all computes beside communication."""
    spent, exposed = (int(found.steps[name].sum()) for name in ("comm_ns", "exposed_comm_ns"))
    if spent < COMM_SHARE * found.wall_ns or exposed < (1 - HIDDEN_SHARE) * spent:
        return
    evidence = f"{share(spent - exposed, spent)} of {ms(spent)} of communication has computing beside it"
    advice = (
        "issue collectives asynchronously on a stream of their own; let DDP or FSDP do it (not "
        "find_unused_parameters, no sync between)"
    )
    yield Finding(
        "missing-overlap",
        "Communication and computing take turns",
        evidence,
        "",
        "",
        *_communication(found),
        exposed,
        advice,
    )


def _communication(found: Evidence) -> tuple[int, int]:
    return found.longest(np.flatnonzero(found.classes.is_a("comm")))


def unstable_step(found: Evidence) -> Iterator[Finding]:
    """Some steps take much longer than the median."""
    rows = found.steps[found.steps["step"].notna()]
    unstable = []
    for _, mine in rows.groupby(["process", "device"]):
        wall = mine["wall_ns"].to_numpy()
        middle = float(np.median(wall))
        slow = np.flatnonzero(wall > UNSTABLE * middle)
        if len(wall) >= STEPS_TO_JUDGE and len(slow):
            unstable.append((int((wall[slow] - middle).sum()), middle, len(slow), mine))
    if not unstable:
        return
    _, middle, count, mine = max(unstable, key=lambda one: one[0])
    worst = mine.iloc[int(mine["wall_ns"].to_numpy().argmax())]
    evidence = (
        f"{count} of {len(mine)} steps take more than {UNSTABLE} times the median of {ms(middle)}; "
        f"step {int(worst['step'])} takes {ms(worst['wall_ns'])}"
    )
    if len(unstable) > 1:
        evidence += f"; on {len(unstable)} GPUs, this one loses most"
    start = int(worst["start_ns"])
    advice = (
        "leave warm-up out of the window; else look there for allocation, logging, checkpoints, "
        "garbage collection, a slow rank"
    )
    yield Finding(
        "unstable-step",
        "Steps of unequal length",
        evidence,
        "",
        "",
        start,
        start + int(worst["wall_ns"]),
        sum(lost for lost, *_ in unstable),
        advice,
    )
