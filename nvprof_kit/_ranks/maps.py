"""Maps of captures: made by threads here, or by any executor, such as a Dask client's; in memory, or in Parquet files
that are reused while their captures are unchanged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nvprof_kit._result.writer import writing
from nvprof_kit._trace.jobs.finding import find_captures, groups_of_marks, processes_warnings, ranks_in, texts_of_marks
from nvprof_kit._trace.jobs.schema import TABLES, VERSION, RankMap, to_arrow
from nvprof_kit._trace.jobs.tables import is_whole
from nvprof_kit.errors import CaptureError, ToolError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from nvprof_kit._analysis.foreign.rules import Rules

IN_MEMORY = 16
"""Maximum number of captures whose maps are held in memory, unless there is a folder to keep them in."""

_Answer = TypeVar("_Answer")


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

    @property
    def reading(self) -> str:
        """The options that the capture is read with."""
        return f"{self.domain} {self.rules!r} {self.rank}" if self.rules or self.rank is not None else self.domain

    @property
    def name(self) -> str:
        """What the file names of the maps begin with: the capture's name, and a part that makes it unique."""
        path = Path(self.capture)
        return f"{path.name.split('.')[0][:60]}-{_digest(str(path.resolve()))}"

    @property
    def current_name(self) -> str:
        """The same, followed by a part that changes with the capture's size or time, and with the options.

        Raises:
            CaptureError: The file does not exist.
        """
        try:
            status = os.stat(self.capture)
        except OSError as error:
            raise CaptureError(f"{self.capture}: {error.strerror}") from None
        return f"{self.name}-{_digest(f'{VERSION} {status.st_size} {status.st_mtime_ns} {self.reading}')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


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
    trace = translate(open_capture(path, domain=task.domain, optional=OPTIONAL), task.rules)
    operators = any(issue.code == "operators-as-layers" for issue in trace.info.warnings)
    maps = []
    for pid, rank_name in ranks_in(trace, path, task.rank).items():
        facts = {
            "version": VERSION,
            "capture": task.capture,
            "reading": task.reading,
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
    """Map a capture into a folder.

    Returns:
        Names of the maps' files, one for each rank in the capture.

    Raises:
        CaptureError: The capture cannot be read, or its rank is unknown.
        UsageError: The folder cannot be written to.
    """
    current_name, names = task.current_name, []
    for rank_map in make_maps(task):
        names.append(f"{current_name}-rank{int(rank_map.ranks['rank'].iloc[0]):05d}.parquet")
        write_map(Path(task.folder), names[-1], {name: to_arrow(getattr(rank_map, name), name) for name in TABLES})
    return names


def run(
    function: Callable[[MapTask], list[_Answer]],
    tasks: Sequence[MapTask],
    *,
    executor: Executor | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[_Answer]:
    """Map captures in threads, or in an executor.

    Args:
        function: `make_maps` or `map_capture`.
        tasks: The captures.
        executor: Maps instead of threads, one for each processor of this process.
        notify: Called with the path of each capture when it is mapped.

    Returns:
        What the function returned, in the order of the tasks.
    """
    threads = max(min(len(os.sched_getaffinity(0)), len(tasks)), 1)
    with ThreadPoolExecutor(threads) if executor is None else nullcontext(executor) as pool:
        futures = {pool.submit(function, task): task.capture for task in tasks}
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
    executor: Executor | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Map captures into a folder; maps of unchanged captures are reused, those of changed ones replaced.

    Returns:
        The file names of the maps.
    """
    existing: dict[str, list[str]] = {}
    for file in sorted((folder / "ranks").glob("*-rank*.parquet")):
        existing.setdefault(file.name.rsplit("-", 2)[0], []).append(file.name)
    names, changed = [], []
    for task in tasks:
        maps, current_name = existing.get(task.name, []), task.current_name
        if maps and all(name.startswith(current_name) and is_whole(folder, name) for name in maps):
            names += maps
            notify(task.capture)
            continue
        changed.append(task)
        for file in (folder / table / name for name in maps for table in TABLES):
            file.unlink(missing_ok=True)
    return names + run(map_capture, changed, executor=executor, notify=notify)


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


def write_map(folder: Path, name: str, tables: Mapping[str, pa.Table]) -> None:
    """Write the tables of a map. The file in ``ranks`` is written last, so that an incomplete map is never reused.

    Raises:
        UsageError: The folder cannot be written to.
    """
    import pyarrow.parquet as pq

    for table in reversed(list(TABLES)):
        # numbers hardly repeat: dictionaries of them take time and make the file larger
        texts = [column for column, kind in TABLES[table].items() if kind.dtype == "object"]
        try:
            (folder / table).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: cannot write maps there: {error.strerror}") from None
        with writing(folder / table / name) as file:
            pq.write_table(tables[table], file, compression="zstd", use_dictionary=texts)
