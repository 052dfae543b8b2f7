"""Jobs of many ranks with planted faults and clock errors, written as maps without captures.

The ranks are a grid. A step is a loop over intervals: a rank works in one layer, then takes part in a collective with
its row or, every few times, with its column, and goes on when that has ended. All arithmetic is on the true time; each
rank's own clock is offset and drifts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from nvprof_kit._ranks.maps import write_map
from nvprof_kit._trace.jobs.schema import TABLES, VERSION
from nvprof_kit.names import GroupName, groups_text

US, MS = 1_000, 1_000_000
COLUMN_EVERY = 5
KINDS = (
    "none", "slow_gpu", "slow_layer", "slow_host", "slow_link", "data_loading", "rotating", "one_bad_step"
)  # fmt: skip
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fault:
    """A planted fault: kind, rank, layer or step if they apply, and size."""

    kind: str = "none"
    rank: int = 0
    layer: int = 0
    step: int = 0
    size: float = 1.0


@dataclass(frozen=True)
class SyntheticJob:
    rows: int = 4
    columns: int = 4
    steps: int = 8
    per_step: int = 24
    layers: int = 6
    fault: Fault = Fault()
    seed: int = 0
    lost: int = 0
    missing: tuple[int, ...] = ()
    work_ns: float = 0.5 * MS
    transfer_ns: float = 40 * US
    more: tuple[Fault, ...] = ()  # faults beside the first
    named: bool = True  # communicators bear names of their own; else only their streams tell them
    sized: bool = True  # captures tell how many ranks a communicator has
    listed: bool = False  # marks list the groups
    true_clocks: dict[int, tuple[float, float]] = field(default_factory=dict, compare=False)

    @property
    def ranks(self) -> int:
        return self.rows * self.columns

    def layer_of(self, k: int) -> tuple[int, str]:
        """Forward through the layers, then backward."""
        half = (self.per_step + 1) // 2
        place = k if k < half else self.per_step - 1 - k
        return place * self.layers // half, "forward" if k < half else "backward"

    def in_column(self, k: int) -> bool:
        return self.columns == 1 or (self.rows > 1 and k % COLUMN_EVERY == COLUMN_EVERY - 1)


@dataclass
class Played:
    """What happened, in true time: arrays by (collective, rank)."""

    arrived: Floats
    ended: Floats
    computed: Floats
    idled: Floats
    loaded: Floats  # by (step, rank)
    began: Floats  # steps, by (step, rank)


def play(job: SyntheticJob) -> Played:
    random = np.random.default_rng(job.seed)
    count, ranks = job.steps * job.per_step, job.ranks
    arrived, ended, computed = (np.zeros((count, ranks)) for _ in range(3))
    idled = np.zeros((count, ranks))
    loaded, began = np.zeros((job.steps, ranks)), np.zeros((job.steps, ranks))
    now = random.uniform(0, 80 * MS, ranks)  # the profilers start one after the other
    work = job.work_ns * random.uniform(0.7, 1.3, job.per_step)
    grid = np.arange(ranks).reshape(job.rows, job.columns)
    link = np.ones((2, ranks))
    faults = [(fault, np.arange(ranks) == fault.rank) for fault in (job.fault, *job.more)]
    for fault, _ in faults:
        if fault.kind == "slow_link":
            link[0, grid[fault.rank // job.columns]] = 1 + 5 * fault.size
    for step in range(job.steps):
        began[step] = now
        loaded[step] = 0.3 * MS + random.exponential(20 * US, ranks)
        for fault, hit in faults:
            if fault.kind == "data_loading":
                loaded[step] += hit * fault.size * 0.25 * job.work_ns * job.per_step
        now = now + loaded[step]
        for k in range(job.per_step):
            layer, _ = job.layer_of(k)
            took = work[k] * random.normal(1, 0.004, ranks).clip(0.97, 1.03)
            idle = random.exponential(3 * US, ranks)
            for fault, hit in faults:
                if fault.kind == "slow_gpu":
                    took = took * np.where(hit, 1 + 0.2 * fault.size, 1)
                elif fault.kind == "slow_layer" and layer == fault.layer:
                    took = took * np.where(hit, 1 + 0.25 * job.layers * fault.size, 1)
                elif fault.kind == "slow_host":
                    idle = idle + hit * 0.2 * fault.size * job.work_ns
                elif fault.kind in ("rotating", "one_bad_step"):
                    late = np.arange(ranks) == _late_in(job, fault, step)
                    took = took * np.where(late, 1 + (0.25 if fault.kind == "rotating" else 2.0) * fault.size, 1)
            place = step * job.per_step + k
            arrived[place] = now + took + idle
            computed[place], idled[place] = took, idle
            column = job.in_column(k)
            shaped = arrived[place].reshape(job.rows, job.columns)
            last = np.broadcast_to(shaped.max(axis=0 if column else 1, keepdims=True), shaped.shape).ravel()
            now = last + job.transfer_ns * link[int(column)] * random.normal(1, 0.01)
            ended[place] = now + random.exponential(0.5 * US, ranks)
            now = ended[place]
    return Played(arrived, ended, computed, idled, loaded, began)


def _late_in(job: SyntheticJob, fault: Fault, step: int) -> int:
    if fault.kind == "rotating":
        return int(np.random.default_rng(job.seed).permutation(job.ranks)[step % job.ranks])
    return fault.rank if step == fault.step else -1


def write_maps(job: SyntheticJob, folder: Path, ranks_per_file: int = 1, processes: int = 1) -> None:
    """Write the maps of a job, several ranks per file, in several processes."""
    played = play(job)
    random = np.random.default_rng(job.seed + 1)
    offset = random.uniform(-10e9, 10e9, job.ranks)
    drift = random.uniform(-50e-6, 50e-6, job.ranks)
    kept = [rank for rank in range(job.ranks) if rank not in job.missing]
    for rank in kept:
        job.true_clocks[rank] = (offset[rank], drift[rank])
    lost = set(map(int, random.integers(0, job.steps * job.per_step * job.ranks, job.lost)))
    firsts = list(enumerate(range(0, len(kept), ranks_per_file)))

    def write(part: int) -> None:
        for number, first in firsts[part::processes]:
            mine = np.array(kept[first : first + ranks_per_file])

            def clock(moments: Floats, own: Ints = mine) -> Ints:
                """True times, by (…, rank), on the ranks' own clocks."""
                return np.round(moments * (1 + drift[own]) + offset[own]).astype(np.int64)

            made = dict(_tables(job, played, mine, clock, lost))
            tables = {table: pa.table({name: made[table][name] for name in schema}) for table, schema in TABLES.items()}
            write_map(folder, f"part-{number:05d}.parquet", tables)

    if processes == 1:
        write(0)
        return
    fork = get_context("fork")  # what was played, which can be gigabytes, is shared
    children = [fork.Process(target=write, args=(part,)) for part in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        if child.exitcode:
            raise RuntimeError(f"a process that writes maps ended with {child.exitcode}")


@lru_cache(maxsize=8)
def _kinds(per_step: int, steps: int, rows: int, columns: int, layers: int) -> tuple[Ints, Ints, Ints]:
    """Of each collective of a rank: whether it is in a column, its layer, and whether it is in the backward pass."""
    job = SyntheticJob(rows, columns, steps, per_step, layers)
    k = np.tile(np.arange(per_step), steps)
    column = np.array([job.in_column(one) for one in range(per_step)])[k]
    layer = np.array([job.layer_of(one)[0] for one in range(per_step)])[k]
    backward = np.array([job.layer_of(one)[1] == "backward" for one in range(per_step)])[k].astype(int)
    return column, layer, backward


def _tables(job, played, ranks, clock, lost) -> Iterator[tuple[str, dict[str, object]]]:
    count, here = job.steps * job.per_step, len(ranks)
    step = np.repeat(np.arange(job.steps), job.per_step)
    column, layer, backward = _kinds(job.per_step, job.steps, job.rows, job.columns, job.layers)
    layers = [f"model.layers.{one}" for one in range(job.layers)] + ["(none)"]
    place = np.arange(count)
    number = np.where(column, np.cumsum(column.reshape(job.steps, -1), axis=1).ravel(), 0)
    number = np.where(column, number, np.cumsum(~column.reshape(job.steps, -1), axis=1).ravel()) - 1
    rank = np.repeat(ranks, count)
    comm = np.where(column[None, :], job.rows + (ranks % job.columns)[:, None], (ranks // job.columns)[:, None])
    names = [f"row {one}" for one in range(job.rows)] + [f"column {one}" for one in range(job.columns)]
    keep = np.ones(here * count, dtype=bool)
    if lost:
        keep = ~np.isin((ranks[:, None] * count + place[None, :]).ravel(), list(lost))
    flat = {name: clock(values[:, ranks]).T.ravel() for name, values in (("a", played.arrived), ("e", played.ended))}
    if not job.named:
        names = ["stream 0"] * job.rows + ["stream 1"] * job.columns
    index, numbers = _renumbered(keep, here, np.tile(place, here), np.tile(number, here), (comm, step, count))
    plain = {
        "rank": rank,
        "index": index,
        "operation": np.full(here * count, -1),
        "sequence": np.full(here * count, -1),
        "step": np.tile(step, here),
        "number": numbers,
        "bytes": np.full(here * count, 1 << 22),
        "size": np.tile(np.where(column, job.rows, job.columns), here) if job.sized else np.full(here * count, -1),
        "start_ns": flat["a"],
        "end_ns": flat["e"],
        "alone_ns": flat["e"] - flat["a"],
        "stream": np.tile(column.astype(np.int64), here),
        "ready_ns": flat["a"],
        "ready_segment": np.tile(2 * place, here),
        "end_segment": np.tile(2 * place + 1, here),
        "gates": np.ones(here * count, dtype=bool),
    }
    collectives: dict[str, object] = {name: values[keep] for name, values in plain.items()}
    collectives |= {
        "comm": _words(comm.ravel()[keep], names),
        "group": _words(np.zeros(keep.sum(), dtype=int), [""]),
        "kind": _words(np.zeros(keep.sum(), dtype=int), ["AllReduce"]),
        "layer": _words(np.tile(layer, here)[keep], layers),
        "phase": _words(np.tile(backward, here)[keep], ["forward", "backward"]),
    }
    yield "collectives", collectives
    computed, idled = (
        np.round(values[:, ranks]).astype(np.int64).T.ravel() for values in (played.computed, played.idled)
    )
    waited, loaded = flat["e"] - flat["a"], np.round(played.loaded[:, ranks]).astype(np.int64).T.ravel()
    kinds, loads = 3, np.zeros(here * job.steps, dtype=np.int64)  # computing, idling and waiting; then loading
    segments: dict[str, Any] = {
        "rank": np.concatenate([np.tile(rank, kinds), np.repeat(ranks, job.steps)]),
        "segment": np.concatenate(
            [
                np.tile(2 * place, 2 * here),
                np.tile(2 * place + 1, here),
                np.tile(2 * job.per_step * np.arange(job.steps), here),
            ]
        ),
        "step": np.concatenate([np.tile(step, kinds * here), np.tile(np.arange(job.steps), here)]),
        "doing": np.concatenate([np.repeat(np.arange(kinds), here * count), loads + kinds]),
        "layer": np.concatenate([np.tile(layer, kinds * here), loads + job.layers]),
        "phase": np.concatenate([np.tile(backward, kinds * here), loads + 2]),
        "collective": np.concatenate([np.full(2 * here * count, -1), np.where(keep, index, -1), loads - 1]),
        "ns": np.concatenate([computed, idled, waited, loaded]),
        "ops": np.concatenate([np.full(here * count, 10), np.zeros(2 * here * count, dtype=int), loads]),
    }
    table = pd.DataFrame(segments).sort_values(["rank", "segment"], kind="stable")
    words = {
        "doing": ["compute", "launch", "communication", "dataloader"],
        "layer": layers,
        "phase": ["forward", "backward", "data"],
    }
    yield "segments", _columns(table, words)
    table = table[table["doing"] != 2]
    of = {"compute_ns": table["doing"] == 0, "idle_ns": table["doing"] != 0, "loading_ns": table["doing"] == 3}
    amounts = table.assign(**{name: table["ns"] * chosen for name, chosen in of.items()}, comm_ns=0, copy_ns=0)
    by_layer = amounts.groupby(["rank", "step", "layer", "phase"])[[*of, "comm_ns", "copy_ns", "ops"]].sum()
    yield "layers", _columns(by_layer.reset_index(), words)
    begins = clock(played.began[:, ranks]).T.ravel()
    ends = clock(np.concatenate([played.began[1:, ranks], played.ended[-1:, ranks]])).T.ravel()
    nothing = np.zeros(here * job.steps, dtype=np.int64)
    yield "steps", {"rank": np.repeat(ranks, job.steps), "step": np.tile(np.arange(job.steps), here), "start_ns": begins, "end_ns": ends, "loading_ns": loaded, "gc_ns": nothing, "warm_up": nothing != 0}  # fmt: skip  # noqa: E501
    same = {"version": VERSION, "capture": "synthetic", "reading": "", "run": "one"}
    told = {"world_size": job.ranks, "tool": "synthetic", "gpu": "", "rank_told_by": "given", "warnings": ""}
    told |= {"evidence": "", "named": job.named, "numbered": False}
    every = {name: [value] * here for name, value in (same | told).items()}
    yield "ranks", {"rank": ranks, "groups": [_groups_of(job, rank) for rank in ranks.tolist()]} | every


def _groups_of(job: SyntheticJob, rank: int) -> str:
    """The mark's list of a rank's groups: all ranks, its row and its column."""
    if not job.listed:
        return ""
    row, column = divmod(rank, job.columns)
    return groups_text(
        [
            GroupName("0", "default_pg", tuple(range(job.ranks))),
            GroupName(f"r{row}", "mesh_cp", tuple(range(row * job.columns, (row + 1) * job.columns))),
            GroupName(f"c{column}", "mesh_dp", tuple(range(column, job.ranks, job.columns))),
        ]
    )


def _renumbered(keep, here: int, index: Ints, number: Ints, by) -> tuple[Ints, Ints]:
    """Places and numbers as they are counted where collectives are lost."""
    if keep.all():
        return index, number
    comm, step, count = by
    index, number = index.copy(), number.copy()
    for one in range(here):
        mine = slice(one * count, (one + 1) * count)
        kept = keep[mine]
        index[mine] = np.cumsum(kept) - 1
        for which in np.unique(comm[one]):
            for at in np.unique(step[~kept]):
                here_too = np.flatnonzero((comm[one] == which) & (step == at))
                number[one * count + here_too] = np.cumsum(kept[here_too]) - 1
    return index, number


def _columns(table: pd.DataFrame, words: dict[str, list[str]]) -> dict[str, object]:
    """The columns of a table, with texts in place of their numbers."""
    columns = {str(name): values.to_numpy() for name, values in table.items()}
    return {name: _words(values, words[name]) if name in words else values for name, values in columns.items()}


def _words(codes: npt.NDArray[np.integer], names: list[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))


def _random_fault(random: np.random.Generator, kind: str, ranks: int, layers: int, first: int, steps: int) -> Fault:
    rank, layer, step = (int(random.integers(low, high)) for low, high in ((0, ranks), (0, layers), (first, steps)))
    return Fault(kind, rank, layer, step, float(random.uniform(0.8, 2.0)))


def random_job(seed: int) -> SyntheticJob:
    """A job with one random fault, on a random grid, with random noise."""
    random = np.random.default_rng(seed)
    rows, columns = (int(random.integers(3, 6)), int(random.integers(2, 6)))
    kind = KINDS[seed % len(KINDS)]
    ranks, steps, layers = rows * columns, int(random.integers(6, 10)), int(random.integers(4, 9))
    fault = _random_fault(random, kind, ranks, layers, 1, steps)
    gone = [rank for rank in random.permutation(ranks).tolist() if rank != fault.rank][: int(random.integers(0, 2))]
    in_row = {fault.rank // columns * columns + one for one in range(columns)}
    missing = tuple(rank for rank in gone if rank not in in_row)
    return SyntheticJob(
        rows, columns, steps, int(random.integers(10, 16)) * 2, layers, fault, seed,
        int(random.integers(0, 4)), missing,
    )  # fmt: skip


ODD_WORLDS = ((1, 2), (1, 3), (1, 5), (1, 7), (2, 2), (3, 1), (2, 3), (7, 3), (3, 5), (1, 8), (6, 2))


def odd_job(seed: int) -> SyntheticJob:
    """A job of an odd world, half of them without names of communicators, with more collectives lost."""
    random = np.random.default_rng(seed)
    rows, columns = ODD_WORLDS[seed % len(ODD_WORLDS)]
    ranks, kind = rows * columns, KINDS[int(random.integers(len(KINDS)))]
    # a slow link needs others to compare with, and two ranks do not rotate
    if (kind == "slow_link" and (rows < 3 or columns < 2)) or (kind == "rotating" and ranks < 3):
        kind = "none"
    steps, layers = int(random.integers(6, 10)), int(random.integers(3, 9))
    fault = _random_fault(random, kind, ranks, layers, 2, steps)
    lost = int(random.integers(0, 12))
    in_row = {fault.rank // columns * columns + one for one in range(columns)}
    gone = random.permutation(ranks)[: int(random.integers(0, 2))].tolist()
    missing = tuple(rank for rank in gone if rank not in in_row)
    per_step, named = int(random.integers(10, 16)) * 2, bool(random.integers(2))
    return SyntheticJob(
        rows, columns, steps, per_step, layers, fault, seed, lost, missing,
        named=named, sized=named or seed % 2 == 1,
    )  # fmt: skip


def misjudged(job: SyntheticJob, verdict: object) -> str:
    """What is wrong in a job's verdict; '' if nothing is."""
    said = (verdict.rank, verdict.layer, verdict.cause, verdict.severity)
    kind, rank = job.fault.kind, job.fault.rank
    layer = f"model.layers.{job.fault.layer}"
    right = {
        "none": said[0] is None and said[3] == "none" and said[2] in ("none", "start_up"),
        "slow_gpu": said[:3] == (rank, None, "slow_gpu"),
        "slow_layer": said[:3] == (rank, layer, "slow_layer"),
        "slow_host": said[0] == rank and said[2] == "slow_host",
        "slow_link": said[2] == "slow_link",
        "data_loading": said[0] == rank and said[2] == "data_loading",
        "rotating": said[0] is None and said[2] == "rotating",
        "one_bad_step": said[0] is None and said[2] == "one_bad_step" and said[3] == "none",
    }[kind]
    return "" if right else f"seed {job.seed}: {job.fault} of {job.rows}x{job.columns}: {verdict}"
