"""The maps of a job's ranks as one DuckDB database over the Parquet files, which can exceed memory."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.process import interruptible, without_progress_bar
from nvprof_kit._trace.jobs.schema import TABLES, VERSION, RankMap, to_arrow
from nvprof_kit.errors import CaptureError
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

FEW = 2_000_000
"""Maximum number of collectives in a small job."""

MEMORY = "1000MB"
"""DuckDB's memory limit; larger data spills to temporary files."""

_AT_ONCE = 1_000
"""Number of ranks with medians at a time."""

SYMMETRIC = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Barrier")
"""Collectives that cannot end on any rank before all ranks have arrived."""

_SORTS = (*SYMMETRIC, "SendRecv", "Broadcast", "Reduce")
_IN_QUERIES = {
    "symmetric": SYMMETRIC,
    "sorts": list(_SORTS),
    "code_of_sort": " ".join(f"WHEN '{sort}' THEN {code}" for code, sort in enumerate(_SORTS, 1)),
}
"""What is filled in in all queries."""

_DAMAGE = ("BinderException", "ConversionException", "InvalidInputException", "IOException", "OutOfRangeException")
"""Errors of DuckDB that damaged files raise: a missing column, another type, pages that cannot be read."""

_QUERY = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", re.DOTALL | re.MULTILINE)
_QUERIES = dict(_QUERY.findall((files("nvprof_kit._trace.jobs") / "queries.sql").read_text(encoding="utf-8")))
"""The queries of `queries.sql` by name."""


def map_names(folder: Path) -> list[str]:
    """File names of the maps in a folder; empty if it has no maps.

    Raises:
        CaptureError: A table of a map is missing.
    """
    names = {table: {file.name for file in (folder / table).glob("*.parquet")} for table in TABLES}
    all_names = set().union(*names.values())
    for table in TABLES:
        for name in sorted(all_names - names[table]):
            raise CaptureError(f"{folder / table / name}: no such file, and the map is not whole without it; map again")
    return sorted(all_names)


def is_maps(folder: Path) -> bool:
    """Whether a folder contains maps."""
    return all((folder / table).is_dir() for table in TABLES)


def is_whole(folder: Path, name: str) -> bool:
    """Whether all files of a map are there and were written to their ends."""
    try:
        for table in TABLES:
            with (folder / table / name).open("rb") as file:
                file.seek(-4, os.SEEK_END)
                if file.read() != b"PAR1":
                    return False
    except OSError:
        return False
    return True


class JobTables:
    """Queries over the maps of a job.

    Args:
        maps: The maps, or the folder of their files.
        names: The files that belong to the job; None for all in the folder.

    Attributes:
        ranks: The table ``ranks`` of all maps.
        has_unlike_layers: Whether ranks have their layers from different evidence: a module of one and an operator of
            another are no equals, so ranks are compared without layers, and by phase only if all compute in the same.
        has_unlike_phases: Whether such ranks compute in different phases too.

    Raises:
        CaptureError: There is no map, or a map is incomplete or has another version.
    """

    def __init__(self, maps: Path | Sequence[RankMap], names: Sequence[str] | None = None) -> None:
        import duckdb
        import pyarrow as pa

        self._folder = maps if isinstance(maps, Path) else None
        self._names = map_names(self._folder) if self._folder is not None and names is None else names
        if self._folder is not None and not self._names:
            command = f"nvprof-kit ranks map -o {maps} CAPTURE..."
            raise CaptureError(f"{maps}: no map in it; make some with {command}")
        self._spill = tempfile.TemporaryDirectory(prefix="nvprof-kit-ranks-")
        config = {"memory_limit": MEMORY, "temp_directory": self._spill.name, "preserve_insertion_order": False}
        self._db: Any = duckdb.connect(config=config)
        without_progress_bar(self._db)
        with suppress(duckdb.Error):  # not in every build: return free memory to the system soon
            self._db.execute("SET allocator_background_threads = true")
        self._db.execute("SET parquet_metadata_cache = true")  # each of 10,000 files is opened several times
        if not isinstance(maps, Path):
            for table in TABLES:
                parts = [to_arrow(getattr(rank_map, table), table) for rank_map in maps]
                self._db.register(f"maps_{table}", pa.concat_tables(parts).unify_dictionaries())
        self._constants: dict[str, str] = {}
        self.ranks: pd.DataFrame = self._run(self._read("ranks"), "df").sort_values("rank", ignore_index=True)
        other_version = self.ranks[self.ranks["version"] != VERSION]["version"]
        if len(other_version):
            self._refuse(
                f"{self._folder}: maps of version {other_version.iloc[0]}, this release reads {VERSION}; map again"
            )
        self.has_unlike_layers = self.ranks["evidence"].nunique() > 1
        self.has_unlike_phases = False
        if self.has_unlike_layers:
            self.has_unlike_phases = self.value("phases_of_ranks", layers=self._read("layers")) > 1
            self._constants = {"layer": NO_LAYER} | ({"phase": NO_PHASE} if self.has_unlike_phases else {})
        for table in ("collectives", "segments"):
            self._run(f"CREATE VIEW {table} AS {self._read(table)}")
        for table in ("layers", "steps"):  # small tables are merged: opening 10,000 files takes seconds
            file = str(Path(self._spill.name) / f"{table}.parquet").replace("'", "''")
            self._run(f"COPY ({self._read(table)}) TO '{file}' (FORMAT parquet)")
            self._run(f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{file}')")
        named, numbered = self.ranks["named"], self.ranks["numbered"]
        # if only some ranks have communicator ids, match by stream, which all ranks have
        by_stream = named.any() and not named.all()
        row_number = "row_number() OVER (PARTITION BY x.rank, stream, x.step ORDER BY x.index)"
        ids = {
            "comm": "'stream ' || stream" if by_stream else "x.comm",
            "number": row_number if by_stream else "number",
            "sequence": "sequence" if numbered.all() else "-1",
            "operation": "operation" if self.value("has_operations") else "-1",
        }
        self._run("CREATE TABLE parts (comm VARCHAR, rank BIGINT, part BIGINT)")
        self._run("CREATE TABLE renumbered (rank BIGINT, index BIGINT, c UBIGINT, s BIGINT, k BIGINT)")
        self._query("members", **ids)
        self._query("tallies")

    def _read(self, table: str) -> str:
        """A query over a table of the maps."""
        source, columns = f"maps_{table}", {name: f'"{name}"' for name in TABLES[table]}
        if self._folder is not None and self._names is not None:
            files = (str(self._folder / table / name).replace("'", "''") for name in self._names)
            source = "read_parquet([" + ", ".join(f"'{file}'" for file in files) + "])"
        columns |= {name: f"'{text}' AS {name}" for name, text in self._constants.items() if name in columns}
        group_by = ""
        if table == "layers" and self._constants:
            sums = [name for name in columns if name not in ("rank", "step", "layer", "phase")]
            columns |= {name: f'sum("{name}")::BIGINT AS "{name}"' for name in sums}
            group_by = "GROUP BY ALL"
        return f"SELECT {', '.join(columns.values())} FROM {source} {group_by}"

    def insert(self, table: str, rows: pd.DataFrame) -> None:
        """Change the keys of collectives.

        Args:
            table: ``parts`` to split communicators that share a name, or ``renumbered`` to replace keys.
            rows: comm, rank, and the part of the communicator that the rank belongs to; or rank, index, and the keys c,
                s and k.
        """
        if len(rows):
            self._db.register("given", rows)
            self._run(f"INSERT INTO {table} BY NAME SELECT * FROM given")
            self._query("tallies")

    def close(self) -> None:
        """Release memory and temporary files."""
        self._db.close()
        self._spill.cleanup()

    def rows(self) -> tuple[int, int]:
        """Number of collectives of all ranks, and the maximum of one rank."""
        by_rank = self.frame("collectives_by_rank")["n"]
        return int(by_rank.sum()), int(by_rank.max()) if len(by_rank) else 0

    def ends(self, keep_every: int) -> pd.DataFrame:
        """End times of collectives for clock alignment, a sample of one in `keep_every`: c, s, k, rank, end_ns,
        took_ns, symmetric.
        """
        return self.frame("ends", keep_every=max(keep_every, 1))

    def stream_ends(self, ranks: Sequence[int]) -> pd.DataFrame:
        """End times of these ranks' collectives with communicators known only by stream: comm, s, k, rank, end_ns,
        size.
        """
        return self.frame("stream_ends", ranks=", ".join(map(str, ranks)))

    def members_of_steps(self, steps: pd.DataFrame) -> pd.DataFrame:
        """The members of the given communicators and steps: rank, index, c, s, sort, end_ns."""
        self._db.register("given_steps", steps)
        return self.frame("members_of_steps")

    def match(self, clocks: pd.DataFrame) -> None:
        """Align the collectives to a common clock and match them.

        Args:
            clocks: The clocks: rank, at_ns, offset_ns, drift (a fraction).
        """
        self._db.register("given", clocks)
        self._run("CREATE OR REPLACE TABLE clocks AS SELECT * FROM given")
        for name in ("matched", "matches", "waiting", "clipped", "instances"):
            self._query(name)

    def instances(self, limit: int = 0) -> pd.DataFrame:
        """Matched collectives: c, s, k, n, step, sort, bytes, size, arrival, late_rank, late_index, ended, wait_ns
        summed over all ranks, and alone_ns, the exposed time summed over all ranks but the late one.

        Args:
            limit: Maximum number, longest waits first; 0 for all.
        """
        return self.frame("chosen_instances", order=f"ORDER BY wait_ns DESC LIMIT {limit}" if limit else "")

    def matrix(self, without: Sequence[int] = ()) -> pd.DataFrame:
        """Wait time by pair of ranks: waiting_rank, late_rank, wait_ns.

        Args:
            without: Steps to leave out.
        """
        return self.frame("matrix", without=list(without))

    def unmatched(self) -> int:
        """Number of collectives without a match on another rank."""
        return self.rows()[0] - int(self.value("matched_collectives"))

    def communicators(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each communicator."""
        return {c: tuple(ranks) for c, ranks in self._query("communicators", "fetchall")}

    def members_of(self, instances: pd.DataFrame) -> pd.DataFrame:
        """Members of the given instances: c, s, k, rank, index, comm, a and e (aligned start and end), alone."""
        self._db.register("given_instances", instances[["c", "s", "k"]])
        return self.frame("members_of")

    def points(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The collectives of the given ranks: rank, index, c, s, k, step, a, e, ready_segment, end_segment, gates,
        queued_ns (from ready to start), layer, phase; and of those that are matched arrival, late_rank and sort of all
        ranks.
        """
        points = self.frame("points", ranks=", ".join(map(str, ranks)))
        self._check_filled("collectives", points.drop(columns=["arrival", "late_rank", "sort"]))
        # causes look rows up by it
        if (points["index"] != points.groupby("rank", sort=False).cumcount()).any():
            raise CaptureError(f"{self._folder}: collectives.index does not count from 0 without gaps; map again")
        return points

    def segments(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The segments of the given ranks, by rank and segment."""
        segments = self.frame("segments", ranks=", ".join(map(str, ranks)))
        self._check_filled("segments", segments)
        return segments

    def _check_filled(self, table: str, rows: pd.DataFrame) -> None:
        """Check rows that are read from maps: NULL would become NaN or another row's value."""
        lacking = rows.isna().sum()
        for name, count in lacking[lacking > 0].items():
            self._refuse(f"{self._folder}: {table}.{name} lacks {count} values; map again")

    @cached_property
    def layer_medians(self) -> pd.DataFrame:
        """Layer x phase x rank, as medians over the rank's steps: rank, layer, phase, median_ns, idle_ns, comm_ns, ops,
        steps. Without steps, values of the whole capture.
        """
        import pandas as pd

        in_steps = "step >= 0" if self.value("has_steps") else "true"
        ranks = sorted(self.ranks["rank"].tolist())
        batches = (ranks[low : low + _AT_ONCE] for low in range(0, len(ranks), _AT_ONCE))
        # in parts: DuckDB's memory limit does not hold for the values of which it finds the median
        parts = [self.frame("layer_medians", in_steps=in_steps, first=batch[0], last=batch[-1]) for batch in batches]
        return pd.concat(parts, ignore_index=True)

    def excesses(self, least_ns: int, least_share: float) -> pd.DataFrame:
        """Excess time of ranks over the median of the ranks with the same layer, phase and step.

        Args:
            least_ns: Minimum excess.
            least_share: Minimum excess as a share of the median.

        Returns:
            step, rank, kind (compute, copy, host, data_loading), layer, phase, excess_ns, more_ops.
        """
        import pandas as pd

        kinds = {"compute": "compute_ns", "copy": "copy_ns", "host": "idle_ns - loading_ns"}
        kinds |= {"data_loading": "loading_ns"}
        limits = {"least_ns": least_ns, "least_share": least_share}
        tables = [self.frame("excesses", kind=kind, ns=ns, **limits) for kind, ns in kinds.items()]
        return pd.concat(tables, ignore_index=True)

    def matched_steps(self) -> pd.DataFrame:
        """Steps in which each rank has collectives: step, rank, and whether any of them is matched. All are taken for
        matched in a large job.
        """
        return self.frame("all_steps" if self.rows()[0] > FEW else "matched_steps")

    def _refuse(self, fault: str) -> None:
        self.close()
        raise CaptureError(fault)

    def value(self, name: str, **words: object) -> Any:
        """The single value of a query of `queries.sql`; see `_query`."""
        return self._query(name, "fetchall", **words)[0][0]

    def frame(self, name: str, **words: object) -> pd.DataFrame:
        """The rows of a query of `queries.sql`; see `_query`."""
        frame: pd.DataFrame = self._query(name, "df", **words)
        return frame

    def _query(self, name: str, fetch: str = "", **words: object) -> Any:
        """Run a query of `queries.sql` with these words filled in; see `_run`."""
        return self._run(_QUERIES[name].format(**_IN_QUERIES, **words), fetch)

    def _run(self, query: str, fetch: str = "") -> Any:
        """Run a query and call the method `fetch` of its result: values are only read, and found to be damaged, then.

        Raises:
            CaptureError: The maps are damaged.
        """
        import duckdb

        try:
            with interruptible():
                result = self._db.execute(query)
                return getattr(result, fetch)() if fetch else result
        except duckdb.Error as error:
            # damaged pages raise the base class
            if self._folder is None or type(error) not in (duckdb.Error, *(getattr(duckdb, name) for name in _DAMAGE)):
                raise
            message = str(error).partition("\n")[0]
            raise CaptureError(f"{self._folder}: a damaged map ({message}); map again") from None
