"""Captures of a job condensed to maps: here, in several processes, or on the workers of a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._api.map_workers import map_in_processes
from nvprof_kit._trace.frames import few
from nvprof_kit._trace.jobs.finding import (
    RankName,
    find_captures,
    groups_of_marks,
    rank_of_capture,
    rank_of_marks,
    rank_of_name,
)
from nvprof_kit._trace.jobs.schema import VERSION
from nvprof_kit._trace.jobs.store import Fingerprint, kept, map_name, write_map
from nvprof_kit.errors import CaptureError, ToolError
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    from nvprof_kit._analysis.foreign.rules import Rules


@dataclass(frozen=True)
class MapTask:
    """One capture to map; sent to a worker process on this or another machine.

    Attributes:
        capture: The capture's path.
        folder: The folder of maps.
        domain: NVTX domain of its ranges.
        rules: How its program names its ranges; None for nvprof_kit's own ranges.
        rank: The rank, if the user gave it.
    """

    capture: str
    folder: str
    domain: str = DOMAIN
    rules: Rules | None = None
    rank: int | None = None

    @property
    def reading(self) -> str:
        """The options with which the capture is read, as text."""
        return f"{self.domain} {self.rules!r} {self.rank}" if self.rules or self.rank is not None else self.domain


def map_capture(task: MapTask) -> list[str]:
    """Map a capture, or reuse its map if the capture is unchanged.

    Returns:
        Names of the map's files, one for each rank in the capture.

    Raises:
        CaptureError: The capture cannot be read, or its rank is unknown.
    """
    from nvprof_kit._analysis.foreign.translate import translate
    from nvprof_kit._ranks.maps.mapping import OPTIONAL, map_rank
    from nvprof_kit._trace.open import open_capture

    path, folder = Path(task.capture), Path(task.folder)
    fingerprint = Fingerprint.of(path, task.reading)
    if maps := kept(folder, [fingerprint]):
        return maps[fingerprint.capture]
    trace = translate(open_capture(path, domain=task.domain, optional=OPTIONAL), task.rules)
    operators = any(issue.code == "operators-as-layers" for issue in trace.info.warnings)
    names = []
    for pid, rank_name in _ranks_in(trace, path, task.rank).items():
        facts = {
            "version": VERSION,
            "capture": fingerprint.capture,
            "size_bytes": fingerprint.size_bytes,
            "changed_ns": fingerprint.changed_ns,
            "reading": fingerprint.reading,
            "run": rank_name.run,
            "world_size": rank_name.world_size,
            "tool": trace.info.tool,
            "groups": _groups_in(trace, pid),
            "evidence": "operators" if operators else trace.info.evidence,
            "gpu": trace.info.gpus[0] if trace.info.gpus else "",
            "rank_told_by": rank_name.found_by,
            "warnings": "\n".join([*trace.info.warnings, *_of_processes(trace, rank_name, pid)]),
        }
        name = map_name(path, rank_name.rank)
        write_map(folder, name, map_rank(trace, rank_name.rank, facts, pid if pid >= 0 else None))
        names.append(name)
    return names


def _ranks_in(trace: Any, path: Path, given_rank: int | None) -> dict[int, RankName]:
    """The ranks of a capture by process id; the key is -1 if there is only one.

    Processes with GPU work that nothing names are ranks in the order of their devices.
    """
    marks = trace.marks
    named: dict[int, RankName] = {}
    if marks is not None and len(marks):
        for pid, of_process in marks.groupby("pid"):
            rank_name = rank_of_marks(map(str, of_process["text"].unique()))
            if rank_name.rank >= 0:
                named[int(str(pid))] = rank_name
    busy = few(trace.ops["pid"].to_numpy()).tolist()
    named = {pid: one for pid, one in named.items() if pid in busy}
    if len(named) > 1:
        return named
    if given_rank is not None:
        return {-1: RankName(given_rank, found_by="given")}
    single = next(iter(named.values()), None) or _first(rank_of_capture(path), rank_of_name(path))
    if single.rank < 0 and len(busy) > 1:  # nothing names them: in the order of their devices
        device = trace.ops.groupby("pid")["device"].min()
        return {pid: RankName(rank, len(busy), found_by="device") for rank, (_, pid) in
                enumerate(sorted((int(device[pid]), pid) for pid in busy))}  # fmt: skip
    if single.rank < 0:
        raise CaptureError(
            f"{path}: its rank is neither in it nor in its name; rename it to …rank3… or pass --rank {path.name}=3"
        )
    return {-1: single}


def _of_processes(trace: Any, rank: RankName, pid: int) -> list[str]:
    """That several processes are one rank, or that nothing but their devices says which ranks they are."""
    count = len(few(trace.ops["pid"].to_numpy()))
    if rank.found_by == "device":
        return [
            f"nothing names the ranks of the {count} processes with GPU work, so they are numbered by their devices; "
            "profile with nvprof_kit.step() or annotate_model: a mark names the rank of each process"
        ]
    if pid >= 0 or count < 2:
        return []
    return [
        f"{count} processes with GPU work are taken as one rank, which the {rank.found_by} names; if each is a rank, "
        "profile with nvprof_kit.step() or annotate_model: a mark names the rank of each process"
    ]


def _groups_in(trace: Any, pid: int) -> str:
    """The process groups in the marks of a process; of all if it is -1."""
    marks = trace.marks
    if marks is None or not len(marks):
        return ""
    of_process = marks if pid < 0 else marks[marks["pid"] == pid]
    return groups_of_marks(map(str, of_process["text"].unique()))


def _first(*found: RankName) -> RankName:
    return next((name for name in found if name.rank >= 0), RankName())


def map_all(tasks: Sequence[MapTask], workers: int = 1, done: Callable[[str], None] = lambda _: None) -> list[str]:
    """Map captures in ``workers`` processes.

    Returns:
        Names of all maps' files.
    """
    names: list[str] = []
    count = min(workers, len(tasks))
    if count <= 1:
        for task in tasks:
            done(task.capture)
            names += map_capture(task)
        return names
    for task, map_names in zip(tasks, map_in_processes(tasks, count), strict=True):
        done(task.capture)
        names += map_names
    return names


def map_captures(
    captures: Iterable[str | Path],
    maps: str | Path,
    *,
    domain: str | None = None,
    rules: str | Path | Rules | None = None,
    ranks: Mapping[str, int] | None = None,
    workers: int | None = None,
    dask: str | None = None,
    part: tuple[int, int] = (0, 1),
    done: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Condense captures to maps, which `open_job` reads; a map is reused while its capture is unchanged.

    On a cluster, each node can map its own captures into a shared folder.

    Args:
        captures: Capture files, and folders of captures.
        maps: Folder to write the maps to, a few megabytes of Parquet per rank.
        domain: NVTX domain of the ranges, as in `nvprof_kit.open`.
        rules: How the program names its ranges, as in `nvprof_kit.open`.
        ranks: Rank by file name, for captures that do not contain their rank.
        workers: Number of processes that read captures; None for one per processor.
        dask: Address of a Dask scheduler, whose workers map instead.
        part: ``(index, count)``: map only this part of the captures, so that several processes can share the work.
        done: Called with the path of each capture when it is mapped.

    Returns:
        The file names of the maps.

    Raises:
        UsageError: A path does not exist, or two captures have the same rank.
        CaptureError: A capture cannot be read, or its rank is unknown.
        ToolError: Dask is not installed, or its scheduler does not answer.
    """
    from nvprof_kit._api.capture import domain_of, read_rules

    rules = read_rules(rules) if rules is None or isinstance(rules, (str, Path)) else rules
    domain = domain_of(rules, domain)
    rank_of = ranks or {}
    tasks = [
        MapTask(str(path), str(maps), domain, rules, rank_of.get(path.name, rank_of.get(str(path))))
        for path in find_captures(list(captures))[part[0] :: part[1]]
    ]
    reused = kept(Path(maps), [Fingerprint.of(Path(task.capture), task.reading) for task in tasks])
    for capture in reused:
        done(capture)
    tasks = [task for task in tasks if task.capture not in reused]
    names = [name for map_names in reused.values() for name in map_names]
    if not tasks:
        return names
    if dask is not None:
        return names + map_on_dask(tasks, dask, done)
    return names + map_all(tasks, workers or os.cpu_count() or 1, done)


def map_on_dask(tasks: Sequence[MapTask], scheduler: str, done: Callable[[str], None] = lambda _: None) -> list[str]:
    """Map captures on a Dask cluster; a capture whose worker dies is mapped by another.

    Raises:
        ToolError: Dask is not installed, or the scheduler does not answer.
    """
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise ToolError("--dask needs Dask: pip install 'nvprof-kit[dask]'") from None
    try:
        client = Client(scheduler, timeout=20)
    except (OSError, ValueError) as error:
        raise ToolError(f"--dask {scheduler}: no scheduler answers there ({error}); name its address") from None
    with client:
        futures = client.map(map_capture, tasks, pure=False, retries=3)
        captures = dict(zip(futures, tasks, strict=True))
        for future in as_completed(futures):
            done(captures[future].capture)
        return [name for names in client.gather(futures) for name in names]
