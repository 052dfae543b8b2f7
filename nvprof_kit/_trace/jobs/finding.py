"""Find the captures in a folder and the rank of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nvprof_kit._trace.files.kinds import PARQUET_FOLDER, has_tables
from nvprof_kit._trace.files.packed import UNREADABLE, beginning_of
from nvprof_kit._trace.joins import few
from nvprof_kit._trace.open import nsys_export
from nvprof_kit._trace.schema import TABLES, Trace
from nvprof_kit.errors import CaptureError, UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import GroupName, groups_text, parse_groups, parse_rank

SUFFIXES = (".sqlite", ".nsys-rep", ".json", ".json.gz")
"""Suffixes of captures; each also with ``.xz`` appended."""

_CAPTURE_NAME = re.compile(rf"[^.].*({'|'.join(map(re.escape, SUFFIXES))})(\.xz)?", re.IGNORECASE | re.DOTALL)
_IN_NAME = re.compile(r"(?:^|[^a-z])rank[-_.=]?0*(\d+)(?!\d)", re.IGNORECASE)
_ENVIRONMENT = re.compile(
    r"(?:^|[^A-Z_])(?:RANK|OMPI_COMM_WORLD_RANK|PMI_RANK|SLURM_PROCID)[\"']?\s*[=:]\s*[\"']?(\d+)"
)
_DISTRIBUTED = re.compile(r'"distributedInfo"\s*:\s*\{')
_HEAD = 1 << 16


@dataclass(frozen=True)
class CaptureRank:
    """The rank of a capture and where it was found.

    Attributes:
        rank: The rank; -1 if unknown.
        world_size: Number of ranks in the job; -1 if unknown.
        run: Id of the run; '' if unknown.
        found_by: Source of the rank: ``mark``, ``capture``, ``name``, ``device``, or ``given``.
    """

    rank: int = -1
    world_size: int = -1
    run: str = ""
    found_by: str = ""


def find_captures(named: Sequence[str | Path]) -> list[Path]:
    """The captures in the given files and folders; a report and its exports count as one capture.

    Args:
        named: Files and folders.

    Raises:
        UsageError: A path does not exist, or a folder contains no capture.
    """
    captures: list[Path] = []
    for folder in map(Path, named):
        if folder.is_dir() and not has_tables(folder):
            inside = sorted(
                path
                for path in folder.iterdir()
                if has_tables(path) or (path.is_file() and _CAPTURE_NAME.fullmatch(path.name))
            )
            if not inside:
                raise UsageError.of("no-capture-in-folder", folder=folder, suffixes=" ".join(SUFFIXES))
            by_stem: dict[str, Path] = {}  # of a report and its exports the folder is read, else the SQLite file
            for path in inside:
                name = path.name.removesuffix(".xz")
                stem = name.removesuffix(PARQUET_FOLDER).removesuffix(".sqlite").removesuffix(".nsys-rep")
                other = by_stem.setdefault(stem, path)
                if path.is_dir() or (".nsys-rep" in other.name and ".sqlite" in name):
                    by_stem[stem] = path
            captures += sorted(by_stem.values())
        elif folder.exists():
            captures.append(folder)
        else:
            raise UsageError(f"{folder}: no such file or folder")
    return list(dict.fromkeys(captures))


def rank_of_marks(texts: Iterable[str]) -> CaptureRank:
    """The rank in this package's NVTX mark (`rank_text`)."""
    for text in texts:
        if name := parse_rank(text):
            return CaptureRank(name.rank, name.world or -1, name.run or "", "mark")
    return CaptureRank()


def groups_of_marks(texts: Iterable[str]) -> str:
    """The process groups in this package's marks (`groups_text`): those of the last mark, and of earlier ones."""
    groups: dict[str, GroupName] = {}
    for text in texts:
        groups |= {group.name: group for group in parse_groups(text)}
    return groups_text(list(groups.values()))


def texts_of_marks(trace: Trace, pid: int) -> list[str]:
    """The distinct texts of the marks of a process, in order; of all processes if it is -1."""
    if trace.marks is None or not len(trace.marks):
        return []
    of_process = trace.marks if pid < 0 else trace.marks[trace.marks["pid"] == pid]
    return [str(text) for text in of_process["text"].unique()]


def ranks_in(trace: Trace, path: Path, given_rank: int | None) -> dict[int, CaptureRank]:
    """The ranks of a capture by process id; the key is -1 if there is only one.

    Processes with GPU work that nothing names are ranks in the order of their devices.

    Raises:
        CaptureError: Nothing tells the rank.
    """
    busy = few(trace.ops["pid"].to_numpy()).tolist()
    names = {pid: rank_of_marks(texts_of_marks(trace, pid)) for pid in busy}
    named = {pid: rank_name for pid, rank_name in names.items() if rank_name.rank >= 0}
    if len(named) > 1:
        return named
    if given_rank is not None:
        return {-1: CaptureRank(given_rank, found_by="given")}
    in_name = [CaptureRank(int(number), found_by="name") for number in _IN_NAME.findall(path.name)[-1:]]
    for candidate in (*named.values(), rank_of_capture(path), *in_name):
        if candidate.rank >= 0:
            return {-1: candidate}
    if len(busy) > 1:
        device = trace.ops.groupby("pid")["device"].min()
        in_order = enumerate(sorted((int(device[pid]), pid) for pid in busy))
        return {pid: CaptureRank(rank, len(busy), found_by="device") for rank, (_, pid) in in_order}
    raise CaptureError.of("no-rank-of-capture", path=path, name=path.name)


def of_process(trace: Trace, path: Path, rank: int) -> Trace:
    """The part of a capture that the process of a rank recorded, see `ranks_in`.

    Raises:
        UsageError: No process of the capture has this rank.
    """
    ranks = {name.rank: pid for pid, name in ranks_in(trace, path, None).items()} if trace.info.processes > 1 else {}
    if rank not in ranks:
        available = f"it has {', '.join(map(str, sorted(ranks)))}" if ranks else "it has one process"
        raise UsageError(f"{path}: no process of rank {rank}; {available}")
    pid = ranks[rank]
    if pid < 0:  # several processes that are one rank
        return trace
    tables = {
        name: table[table["pid"] == pid].reset_index(drop=True)
        for name in TABLES
        if (table := getattr(trace, name)) is not None and "pid" in table
    }
    on_device = set(few(tables["ops"]["device"].to_numpy()).tolist())
    gpus = zip(trace.info.ordinals, trace.info.gpus, strict=False)
    used = {ordinal: gpu for ordinal, gpu in gpus if ordinal in on_device}
    warnings = (*trace.info.warnings, Issue.of("one-process", rank=rank, count=len(ranks)))
    info = replace(trace.info, processes=1, gpus=tuple(used.values()), ordinals=tuple(used), warnings=warnings)
    return replace(trace, info=info, **tables)


def processes_warnings(trace: Trace, rank: CaptureRank, pid: int) -> list[Issue]:
    """That several processes are one rank, or that nothing but their devices says which ranks they are."""
    count = len(few(trace.ops["pid"].to_numpy()))
    if rank.found_by == "device":
        return [Issue.of("devices-as-ranks", count=count)]
    is_one_rank = pid < 0 and count > 1
    return [Issue.of("processes-as-rank", count=count, source=rank.found_by)] if is_one_rank else []


def rank_of_capture(path: Path) -> CaptureRank:
    """The rank that a capture records apart from marks: in Kineto's ``distributedInfo`` or nsys's environment."""
    if path.is_dir():
        return _rank_of_nsys(path)
    try:
        beginning = beginning_of(path, _HEAD)
    except UNREADABLE:
        return CaptureRank()  # the reader reports the damage
    if beginning.lstrip()[:1] not in (b"{", b"["):  # a PyTorch trace contains "NVIDIA" too
        return _rank_of_nsys(path) if beginning else CaptureRank()
    text = beginning.decode("utf-8", "replace")
    match = _DISTRIBUTED.search(text)
    numbers = dict(re.findall(r'"(rank|world_size)"\s*:\s*(\d+)', text[match.end() :])) if match else {}
    if "rank" not in numbers:
        return CaptureRank()
    return CaptureRank(int(numbers["rank"]), int(numbers.get("world_size", -1)), found_by="capture")


def _rank_of_nsys(path: Path) -> CaptureRank:
    with nsys_export(path) as db:
        if not db.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
            return CaptureRank()
        entries = db.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value"))
        matches = (_ENVIRONMENT.search(str(value)) for name, value in entries if name == "DeviceEnvironment")
        return next((CaptureRank(int(match[1]), found_by="capture") for match in matches if match), CaptureRank())
