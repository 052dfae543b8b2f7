"""A job: the ranks of one run, opened together.

```python
job = nvprof_kit.open_job("folder/")
print(job.verdict)
job.waits().to_frame()
```
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._api.capture import Capture, domain_of, read_rules
from nvprof_kit._result.writer import Document
from nvprof_kit.errors import UsageError, require_choice
from nvprof_kit.issues import Issue, as_issues, listing, plural
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.foreign.rules import Rules
    from nvprof_kit._analysis.timeline import Timeline
    from nvprof_kit._api.capture import Steps, TraceForm
    from nvprof_kit._ranks.answer import Ranks, RankTable
    from nvprof_kit._ranks.clocks import Alignment
    from nvprof_kit._ranks.replay import Graph
    from nvprof_kit._ranks.verdict import Verdict
    from nvprof_kit._ranks.waits import Waits
    from nvprof_kit._trace.jobs.tables import JobTables
    from nvprof_kit._trace.schema import CaptureInfo


class Job:
    """The ranks of a run: which rank is late, in which layer, and what the waiting costs.

    Open one with `open_job`. Tables are computed on first use and kept.
    """

    def __init__(
        self, tables: JobTables, keep: object = None, *, domain: str = DOMAIN, rules: Rules | None = None
    ) -> None:
        self._tables, self._keep = tables, keep
        self._domain, self._rules = domain, rules
        self.ranks: pd.DataFrame = tables.ranks
        repeated = self.ranks[self.ranks["rank"].duplicated(keep=False)]
        if len(repeated):
            rank = int(repeated["rank"].iloc[0])
            files = repeated.loc[repeated["rank"] == rank, "capture"].astype(str)
            raise UsageError.of("repeated-rank", rank=rank, count=len(files), files=", ".join(files))
        runs = sorted(set(self.ranks["run"]) - {""})
        if len(runs) > 1:
            raise UsageError(f"captures of {len(runs)} runs ({', '.join(runs[:4])}); name those of one run")

    @cached_property
    def _aligned(self) -> Alignment:
        from nvprof_kit._ranks.clocks import align_job

        return align_job(self._tables)

    @cached_property
    def _waits(self) -> Waits:
        from nvprof_kit._ranks.waits import find_waits

        return find_waits(self._aligned.tables, self._aligned.floor_ns)

    @cached_property
    def _layers(self) -> pd.DataFrame:
        from nvprof_kit._ranks.stages import layer_table

        return layer_table(self._tables.layer_medians)

    @cached_property
    def verdict(self) -> Verdict:
        """Which rank the others wait for, if any; with layer, phase, cause and cost per step in nanoseconds."""
        from nvprof_kit._ranks.verdict import judge

        return judge(self._aligned.tables, self._waits.charges, self._layers, self._aligned.floor_ns)

    def clocks(self) -> RankTable:
        """Offset (ns) and drift (ppm) of each rank's clock relative to the job's clock."""
        return self._table("clocks", self._aligned.clocks)

    def waits(self) -> RankTable:
        """One row per collective and waiting rank: how long it waited in ns, for which rank, and why."""
        return self._table("waits", self._waits.waits)

    def charges(self) -> RankTable:
        """Total waiting time in ns, grouped by the late rank, cause, layer and phase that caused it."""
        return self._table("charges", self._waits.charges)

    def layers(self) -> RankTable:
        """One row per layer, phase and rank, with median times over the rank's steps in nanoseconds."""
        return self._table("layers", self._layers)

    @cached_property
    def _stages(self) -> dict[int, int]:
        from nvprof_kit._ranks.stages import stages_of

        return stages_of(self._tables.layer_medians)

    def groups(self) -> RankTable:
        """The parallel groups: which ranks share a communicator, and for which parallelism (data, tensor, …)."""
        from nvprof_kit._ranks.groups import parallel_groups

        return self._table("groups", parallel_groups(self._aligned.tables, self._stages, self._aligned.marked_groups))

    @cached_property
    def _micro_batches(self) -> pd.DataFrame:
        from nvprof_kit._ranks.stages import micro_batches

        return micro_batches(self._aligned.tables, self._stages)

    def micro_batches(self) -> RankTable:
        """How long each pipeline stage waits for each micro-batch, in ns; empty without pipeline parallelism."""
        return self._table("micro-batches", self._micro_batches)

    def bubbles(self) -> RankTable:
        """The pipeline bubbles: time in ns per stage and step without computing; empty without pipeline parallelism."""
        from nvprof_kit._ranks.stages import bubbles

        return self._table("bubbles", bubbles(self._tables, self._stages, self._micro_batches))

    @cached_property
    def warnings(self) -> tuple[Issue, ...]:
        """What may be missing or distorted; each sentence says what to do about it."""
        from nvprof_kit._ranks.answer import job_warnings

        of_ranks = job_warnings(self._aligned)
        ranks_of: dict[str, list[int]] = {}
        for rank, text in zip(self.ranks["rank"].tolist(), self.ranks["warnings"].tolist(), strict=True):
            for line in filter(None, text.split("\n")):
                ranks_of.setdefault(line, []).append(rank)
        of_captures = [f"rank{'s' * (len(of) > 1)} {listing(of, 6)}: {line}" for line, of in ranks_of.items()]
        return as_issues("job", (*of_ranks, *of_captures))

    @cached_property
    def _graph(self) -> Graph:
        from nvprof_kit._ranks.replay import build
        from nvprof_kit._ranks.waits import MOST

        tables = self._aligned.tables
        if (count := tables.value("count")) > MOST:
            raise UsageError.of("many-collectives", count=count, limit=MOST)
        ranks = self.ranks["rank"].tolist()
        return build(tables.points(ranks), tables.segments(ranks), tables.instances())

    def critical_path(self) -> RankTable:
        """The critical path across ranks: time in ns by step, rank, layer and phase.

        Raises:
            UsageError: The job has too many collectives to replay.
        """
        from nvprof_kit._ranks.replay import critical_path

        return self._table("critical-path", critical_path(self._graph))

    def what_if(self, rank: int | None = None, layer: str | None = None) -> RankTable:
        """The predicted step time in ns if a rank, one of its layers, the data loaders or the network were as fast as
        their median.

        The prediction replays the measured operations and collectives of all ranks with changed durations.

        Args:
            rank: The rank to change; None for the rank of `verdict`, if it names one.
            layer: The layer to change; None for the layer of `verdict`.

        Raises:
            UsageError: The job does not contain the rank or the layer, or has too many collectives to replay.
        """
        from nvprof_kit._ranks.replay import what_if

        if rank is not None:
            self._check_there([rank])
        if layer is not None and layer not in set(self._layers["layer"]):
            raise UsageError(f"layer={layer!r}: no such layer in the job; see layers()")
        named = self.verdict.layer if rank is None and layer is None else layer
        rows = what_if(self._graph, self._layers, self.verdict.rank if rank is None else rank, named)
        return self._table("what-if", rows)

    def answer(self) -> Ranks:
        """All tables together. Critical path, what-if, groups and bubbles are left out if the job has too many
        collectives.
        """
        import pandas as pd

        from nvprof_kit._ranks.answer import REPLAYED, Ranks
        from nvprof_kit._ranks.columns import COLUMNS
        from nvprof_kit._ranks.replay import error
        from nvprof_kit._ranks.waits import MOST

        matched, waits = self._aligned.tables, self._waits
        replayed = 0 < matched.value("count") <= MOST
        tables: dict[str, Any] = {name: pd.DataFrame(columns=list(COLUMNS[name])) for name in REPLAYED}
        if replayed:
            replays = (self.groups(), self.bubbles(), self.micro_batches(), self.critical_path(), self.what_if())
            tables = {table.name: table.rows for table in replays}
        return Ranks(
            verdict=self.verdict,
            clocks=self._aligned.clocks,
            waits=waits.waits,
            charges=waits.charges,
            matrix=matched.matrix(),
            layers=self._layers,
            **{name.replace("-", "_"): rows for name, rows in tables.items()},
            replay_error=error(self._graph) if replayed else None,
            steps=len(self._tables.frame("step_lengths")),
            collectives=matched.value("count"),
            total_wait_ns=waits.total_ns,
            warnings=self.warnings,
            sources=self._sources,
            make_page=self.report,
        )

    def report(self, *, timeline: Sequence[int] = (), title: str = "", command: str = "") -> Document:
        """Make one self-contained HTML page: verdict, layers and steps by rank, who waits for whom, timeline, what-if.

        Args:
            timeline: Ranks to show on the timeline; by default those that matter most for the verdict.
            title: Title of the page; by default the folder of the captures.
            command: The command that the page suggests for details.

        Returns:
            The page, which loads nothing from the network; `Document.save` writes it.

        Raises:
            UsageError: The job does not contain the rank.
        """
        from nvprof_kit._report.page.job import job_page

        self._check_there(timeline)
        captures = list(dict.fromkeys(self.ranks["capture"].astype(str)))
        named = title or (captures[0] if len(captures) == 1 else str(Path(captures[0]).parent))
        page = job_page(self.answer(), self._tables, named, command or f"nvprof-kit ranks {named}", timeline)
        return Document(page, (".html", ".htm"), self._sources)

    def export(self, *, ranks: Sequence[int] = (), data_format: TraceForm = "json.gz", steps: Steps = None) -> Document:
        """Make a trace that shows the ranks side by side on one clock, for the Perfetto UI.

        Args:
            ranks: Include only these ranks; all by default.
            data_format: Plain or gzipped JSON; the UI opens both.
            steps: Include only these steps; None for the whole captures.

        Raises:
            UsageError: The job lacks the rank or the steps, its captures are gone, or one contains several ranks.
        """
        import pandas as pd

        from nvprof_kit._analysis.attribution.steps import StepOptions
        from nvprof_kit._report.export import SUFFIXES, RankClock, job_trace

        self._check_there(ranks)
        require_choice(data_format, SUFFIXES, "data_format")
        selected = self.ranks[self.ranks["rank"].isin(ranks)] if ranks else self.ranks
        chosen = StepOptions.of(steps)
        sources: list[Path] = []
        readers: list[tuple[RankClock, Callable[[], tuple[Timeline, CaptureInfo]]]] = []
        clocks: Any = self._aligned.clocks.set_index("rank")
        path: Any
        for path, of_capture in self.ranks[self.ranks["capture"].isin(selected["capture"])].groupby("capture"):
            if not Path(path).exists():
                raise UsageError(f"{path}: the map's capture is not here; a trace is made of the captures themselves")
            if len(of_capture) != 1:
                raise UsageError.of("several-ranks", path=path, count=len(of_capture))
            rank = int(of_capture["rank"].iloc[0])
            clock = RankClock(rank, None)
            if pd.notna(clocks.loc[rank, "offset_ns"]):
                offset_ns, at_ns = (int(clocks.loc[rank, name]) for name in ("offset_ns", "at_ns"))
                clock = RankClock(rank, offset_ns, float(clocks.loc[rank, "drift_ppm"]) * 1e-6, at_ns)
            capture = Capture(path, rules=self._rules, domain=self._domain)
            sources += capture.sources

            def read(capture: Capture = capture) -> tuple[Timeline, CaptureInfo]:
                timeline = capture._timeline(chosen)
                capture.close()  # keep only one capture in memory at a time
                return timeline

            readers.append((clock, read))
        readers.sort(key=lambda reader: reader[0].rank)
        origin = min((clock.offset_ns or 0) - round(clock.drift * clock.at_ns) for clock, _ in readers)
        unaligned = [clock.rank for clock, _ in readers if clock.offset_ns is None]
        warnings = tuple(Issue.of("clocks:export", rank=rank) for rank in unaligned)
        content = partial(job_trace, readers, origin, data_format)
        return Document(content, SUFFIXES[data_format], tuple(sources), warnings)

    def _check_there(self, ranks: Sequence[int]) -> None:
        if absent := sorted(set(ranks) - set(self.ranks["rank"].tolist())):
            raise UsageError(f"no rank {absent[0]} in the job; it has {plural(len(self.ranks), 'rank')}")

    def _table(self, name: str, rows: pd.DataFrame) -> RankTable:
        from nvprof_kit._ranks.answer import RankTable

        return RankTable(name, rows, self.warnings, sources=self._sources)

    @property
    def _sources(self) -> tuple[Path, ...]:
        return tuple(Path(capture) for capture in self.ranks["capture"])

    def __str__(self) -> str:
        return str(self.answer())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.answer()._repr_html_()


def open_job(
    captures: str | Path | Iterable[str | Path],
    *,
    domain: str | None = None,
    rules: str | Path | Rules | None = None,
    ranks: Mapping[str, int] | None = None,
    executor: Executor | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Job:
    """Open the captures of a run's ranks, or the maps made from them.

    A map is a capture condensed to what the analysis across ranks needs; `map_captures` makes them to be kept.

    Args:
        captures: Capture files, folders of captures, or one folder of maps.
        domain: NVTX domain of the ranges; separate several with commas. [default: that of the rules, else
            nvprof_kit]
        rules: How the program names its ranges: a preset or a TOML file, as in `nvprof_kit.open`.
        ranks: Rank by file name, for captures that do not contain their rank.
        executor: Reads the captures instead of threads, one for each processor of this process: any executor of
            `concurrent.futures`, or a Dask client's.
        notify: Called with the path of each capture when it is mapped.

    Raises:
        UsageError: No path is given, a path does not exist, or two captures have the same rank.
        CaptureError: A capture cannot be read, or its rank is unknown.
    """
    from nvprof_kit._ranks.maps import IN_MEMORY, make_maps, map_into, run, tasks_of
    from nvprof_kit._trace.jobs.tables import JobTables, is_maps

    read = read_rules(rules)
    domain = domain_of(read, domain)
    named = [captures] if isinstance(captures, (str, Path)) else list(captures)
    if not named:
        raise UsageError("no captures; needed those of the ranks of one run, or a folder of them")
    if len(named) == 1 and is_maps(Path(named[0])):
        return Job(JobTables(Path(named[0])), domain=domain, rules=read)
    tasks = tasks_of(named, "", domain, read, ranks or {})
    if len(tasks) <= IN_MEMORY:
        return Job(JobTables(run(make_maps, tasks, executor=executor, notify=notify)), domain=domain, rules=read)
    folder = tempfile.TemporaryDirectory(prefix="nvprof-kit-maps-")
    tasks = [replace(task, folder=folder.name) for task in tasks]
    names = map_into(Path(folder.name), tasks, executor=executor, notify=notify)
    return Job(JobTables(Path(folder.name), names), folder, domain=domain, rules=read)


def map_captures(
    captures: Iterable[str | Path],
    maps: str | Path,
    *,
    domain: str | None = None,
    rules: str | Path | Rules | None = None,
    ranks: Mapping[str, int] | None = None,
    executor: Executor | None = None,
    dask: str | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Condense captures to maps, which `open_job` reads; a map is reused while its capture is unchanged.

    On a cluster, each node can map its own captures into a shared folder.

    Args:
        captures: Capture files, and folders of captures.
        maps: Folder to write the maps to, a few megabytes of Parquet per rank.
        domain: As in `open_job`.
        rules: As in `open_job`.
        ranks: As in `open_job`.
        executor: As in `open_job`.
        dask: Address of a Dask scheduler; its workers, which see captures and maps under the same paths, map instead.
        notify: As in `open_job`.

    Returns:
        The file names of the maps.

    Raises:
        UsageError: A path does not exist, or two captures have the same rank.
        CaptureError: A capture cannot be read, or its rank is unknown.
        ToolError: Dask is not installed, or its scheduler does not answer.
    """
    from nvprof_kit._ranks.maps import map_into, on_dask, tasks_of

    read = read_rules(rules)
    domain = domain_of(read, domain)
    tasks = tasks_of(list(captures), str(maps), domain, read, ranks or {})
    with nullcontext(executor) if dask is None else on_dask(dask) as chosen:
        return map_into(Path(maps), tasks, executor=chosen, notify=notify)
