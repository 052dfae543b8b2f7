"""Maps of captures: made by threads here, or by any executor, such as a Dask client's; in memory, or in Parquet files
that are reused while their captures are unchanged.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nvprof_kit._trace.files.process import interruptible
from nvprof_kit._trace.jobs.finding import find_captures, groups_of_marks, processes_warnings, ranks_in, texts_of_marks
from nvprof_kit._trace.jobs.schema import TABLES, VERSION, RankMap, to_arrow
from nvprof_kit._trace.jobs.tables import fault_of
from nvprof_kit.errors import CaptureError, ToolError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from nvprof_kit._analysis.foreign.rules import Rules

IN_MEMORY = 16
"""Maximum number of captures whose maps are held in memory, unless there is a folder to keep them in."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the input of a map; a change of size, time or options invalidates the map.

    Attributes:
        capture: The capture's path.
        size_bytes: Its size.
        changed_ns: Modification time, ns since 1970.
        reading: The options it is read with: domain and rules.
    """

    capture: str
    size_bytes: int
    changed_ns: int
    reading: str


@dataclass(frozen=True)
class MapTask:
    """One capture to map, on this or another machine.

    Attributes:
        capture: The capture's path.
        folder: The folder of maps; '' if they are not kept.
        domain: NVTX domain of its ranges.
        rules: How its program names its ranges; None for nvprof_kit's own ranges.
        rank: The rank, if the user gave it.
    """

    capture: str
    folder: str
    domain: str
    rules: Rules | None = None
    rank: int | None = None

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the capture as it is now.

        Raises:
            CaptureError: The file does not exist.
        """
        has_options = self.rules or self.rank is not None
        try:
            status = os.stat(self.capture)
        except OSError as error:
            raise CaptureError(f"{self.capture}: {error.strerror}") from None
        options = f"{self.domain} {self.rules!r} {self.rank}" if has_options else self.domain
        return Fingerprint(self.capture, status.st_size, status.st_mtime_ns, options)


def tasks_of(
    captures: Sequence[str | Path], folder: str, domain: str, rules: Rules | None, ranks: Mapping[str, int]
) -> list[MapTask]:
    """A task for each capture in the given files and folders.

    Raises:
        UsageError: A path does not exist, or a folder contains no capture.
    """
    return [
        MapTask(str(path), folder, domain, rules, ranks.get(path.name, ranks.get(str(path))))
        for path in find_captures(captures)
    ]


def make_maps(task: MapTask) -> list[RankMap]:
    """Map a capture: one map for each of its ranks.

    Raises:
        CaptureError: The capture cannot be read, or its rank is unknown.
    """
    from nvprof_kit._analysis.foreign.translate import translate
    from nvprof_kit._ranks.mapping import OPTIONAL, map_rank
    from nvprof_kit._trace.open import open_capture

    path = Path(task.capture)
    fingerprint = task.fingerprint()
    trace = translate(open_capture(path, domain=task.domain, optional=OPTIONAL), task.rules)
    operators = any(issue.code == "operators-as-layers" for issue in trace.info.warnings)
    maps = []
    for pid, rank_name in ranks_in(trace, path, task.rank).items():
        facts = asdict(fingerprint) | {
            "version": VERSION,
            "run": rank_name.run,
            "world_size": rank_name.world_size,
            "tool": trace.info.tool,
            "groups": groups_of_marks(texts_of_marks(trace, pid)),
            "evidence": "operators" if operators else trace.info.evidence,
            "gpu": trace.info.gpus[0] if trace.info.gpus else "",
            "rank_told_by": rank_name.found_by,
            "warnings": "\n".join([*trace.info.warnings, *processes_warnings(trace, rank_name, pid)]),
        }
        maps.append(map_rank(trace, rank_name.rank, facts, pid if pid >= 0 else None))
    return maps


def map_capture(task: MapTask) -> list[str]:
    """Map a capture into a folder, or reuse its maps if it is unchanged.

    Returns:
        Names of the maps' files, one for each rank in the capture.

    Raises:
        CaptureError: The capture cannot be read, or its rank is unknown.
        UsageError: The folder cannot be written to.
    """
    folder, path = Path(task.folder), Path(task.capture)
    if names := reusable(folder, [task.fingerprint()]).get(task.capture):
        return names
    names = []
    for rank_map in make_maps(task):
        names.append(map_name(path, int(rank_map.ranks["rank"].iloc[0])))
        write_map(folder, names[-1], {table: to_arrow(getattr(rank_map, table), table) for table in TABLES})
    return names


def run(
    function: Callable[[MapTask], list[_Answer]],
    tasks: Sequence[MapTask],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[_Answer]:
    """Map captures in threads, or in an executor.

    Args:
        function: `make_maps` or `map_capture`.
        tasks: The captures.
        workers: Number of threads; None for one per processor.
        executor: Maps instead of threads.
        notify: Called with the path of each capture when it is mapped.

    Returns:
        What the function returned, in the order of the tasks.
    """
    if executor is None and min(workers or os.cpu_count() or 1, len(tasks)) > 1:
        with ThreadPoolExecutor(min(workers or os.cpu_count() or 1, len(tasks))) as threads:
            return run(function, tasks, executor=threads, notify=notify)
    if executor is None:
        answers = []
        for task in tasks:
            notify(task.capture)
            answers += function(task)
        return answers
    futures = {executor.submit(function, task): task.capture for task in tasks}
    try:
        for future in as_completed(futures):
            future.result()
            notify(futures[future])
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return [answer for future in futures for answer in future.result()]


def map_into(
    folder: Path,
    tasks: Sequence[MapTask],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Map captures into a folder; those whose maps can be reused are not sent to the executor.

    Returns:
        The file names of the maps.
    """
    reused = reusable(folder, [task.fingerprint() for task in tasks])
    for capture in reused:
        notify(capture)
    new = [task for task in tasks if task.capture not in reused]
    names = [name for names_of_capture in reused.values() for name in names_of_capture]
    return names + run(map_capture, new, workers=workers, executor=executor, notify=notify)


@contextmanager
def on_dask(scheduler: str) -> Iterator[Executor]:
    """An executor that maps on a Dask cluster; a capture whose worker dies is mapped by another.

    Raises:
        ToolError: Dask is not installed, or the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ToolError("--dask needs Dask: pip install 'nvprof-kit[dask]'") from None
    try:
        client = Client(scheduler, timeout=20)
    except (OSError, ValueError) as error:
        raise ToolError(f"--dask {scheduler}: no scheduler answers there ({error}); name its address") from None
    with client:
        executor: Executor = client.get_executor(pure=False, retries=3)
        yield executor


def map_name(capture: Path, rank: int) -> str:
    """File name of a rank's map: the capture's name and a part that makes it unique."""
    digest = hashlib.sha256(str(capture.resolve()).encode()).hexdigest()[:10]
    return f"{capture.name.split('.')[0][:60]}-{digest}-rank{rank:05d}.parquet"


def reusable(folder: Path, fingerprints: Sequence[Fingerprint]) -> dict[str, list[str]]:
    """The maps that need not be made again, by capture: complete, of this version, of the capture as it is now."""
    import duckdb

    by_start = {map_name(Path(expected.capture), 0).rpartition("-rank")[0]: expected for expected in fingerprints}
    names = [file.name for file in (folder / "ranks").glob("*.parquet") if file.name.rpartition("-rank")[0] in by_start]
    complete = [name for name in sorted(names) if not fault_of(folder, [name])]
    if not complete:
        return {}
    try:
        with interruptible(), duckdb.connect(config={"threads": 1}) as database:
            files = [str(folder / "ranks" / name) for name in complete]
            maps = database.read_parquet(files, filename=True, union_by_name=True).filter(f"version = {VERSION}")
            rows = maps.project("filename, capture, size_bytes, changed_ns, reading").fetchall()
    except duckdb.Error:
        return {}
    names_of_captures: dict[str, list[str]] = {}
    for file, *values in dict.fromkeys(rows):
        name = Path(file).name
        if Fingerprint(*values) == by_start[name.rpartition("-rank")[0]]:
            names_of_captures.setdefault(values[0], []).append(name)
    return {capture: sorted(names_of_capture) for capture, names_of_capture in names_of_captures.items()}


def write_map(folder: Path, name: str, tables: Mapping[str, pa.Table]) -> None:
    """Write the tables of a map. The file in ``ranks`` is written last, so that an incomplete map is never used.

    Raises:
        UsageError: The folder cannot be written to.
    """
    order = list(TABLES)[::-1]
    with ThreadPoolExecutor(max_workers=2) as pool:  # compression does not hold the GIL
        encoded = dict(zip(order, pool.map(_encoded, (tables[table] for table in order)), strict=True))
    try:
        (folder / "ranks" / name).unlink(missing_ok=True)
        for table, data in encoded.items():
            file = folder / table / name
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{secrets.token_hex(8)}.tmp")  # unpredictable, against symlink attacks
            try:
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as opened:
                    opened.write(data)
                beside.replace(file)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot write maps there: {error.strerror or error}") from None


def _encoded(table: pa.Table) -> bytes:
    """A table as a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # numbers hardly repeat: dictionaries of them take time and make the file larger
    is_text = {name: str(kind).startswith(("dictionary", "string")) for name, kind in
               zip(table.schema.names, table.schema.types, strict=True)}  # fmt: skip
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=[name for name, text in is_text.items() if text])
    data: bytes = buffer.getvalue().to_pybytes()
    return data
