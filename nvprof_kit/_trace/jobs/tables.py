"""The maps of a job's ranks as one DuckDB database over the Parquet files, which can exceed memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
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

_MEMBERS = """
    SELECT x.rank, x.index, x.kind, x.step, bytes, size, start_ns, end_ns, alone_ns AS alone, {comm} AS comm,
        CASE WHEN kind IN ('Send', 'Recv', 'SendRecv') THEN 'SendRecv' ELSE kind END AS sort,
        coalesce(r.c, CASE WHEN {operation} >= 0 AND {comm} LIKE 'stream %' THEN 0
            ELSE hash({comm}, coalesce(part, 0)) END) AS c,
        coalesce(r.s, CASE WHEN {operation} >= 0 OR {sequence} >= 0 THEN -2 ELSE x.step END) AS s,
        coalesce(r.k, CASE WHEN {operation} >= 0 THEN {operation} WHEN {sequence} >= 0 THEN sequence
            ELSE {number} END) AS k
    FROM collectives AS x LEFT JOIN parts AS p ON p.comm = {comm} AND p.rank = x.rank
        LEFT JOIN renumbered AS r ON r.rank = x.rank AND r.index = x.index
"""
"""The collectives with the keys that match them across ranks: communicator, step and number."""

_SORTS = (*SYMMETRIC, "SendRecv", "Broadcast", "Reduce")
_CODE = " ".join(f"WHEN '{sort}' THEN {code}" for code, sort in enumerate(_SORTS, 1))

_MATCHES = f"""
    SELECT * EXCLUDE (late, low, high, sum_alone, late_alone), (late >> 32)::INTEGER AS late_rank,
        (late & 4294967295)::INTEGER AS late_index, coalesce({list(_SORTS)}[low], '') AS sort, low <> high AS unlike,
        sum_alone::BIGINT - late_alone AS alone_ns
    FROM (
        SELECT c, s, k, count(*)::INTEGER AS n, max(a) AS arrival, arg_max((rank << 32) | index, a) AS late,
            sum(a) AS sum_a, max(e) AS ended, arg_min(e, a) AS first_end, min(sort) AS low, max(sort) AS high,
            coalesce(min(step) FILTER (WHERE step >= 0), -1) AS step,
            max(bytes) AS bytes, max(size)::INTEGER AS size, sum(alone::DOUBLE) AS sum_alone,
            arg_max(alone, a) AS late_alone
        FROM (SELECT * REPLACE (CASE sort {_CODE} ELSE 0 END::UTINYINT AS sort) FROM matched)
        GROUP BY c, s, k HAVING count(*) > 1
    )
"""
"""One row per matched collective. There are millions of groups, so each has few bytes: rank and index are packed into
one integer, kinds are codes, and sums of what is far below 2^53 are floating-point numbers, which are exact there.
"""

_ENDS_ALONE = f"(n = 2 OR i.sort NOT IN {SYMMETRIC})"
"""With two ranks, or in a collective that a rank can finish before others arrive, a wait ends with it at the latest."""

_WAITING = f"""
    SELECT m.rank, m.step, c, s, k, i.sort, i.late_rank, i.arrival - m.a AS late_ns,
        CASE WHEN {_ENDS_ALONE} THEN least(late_ns, greatest(m.e - m.a, 0)) ELSE late_ns END AS wait_ns
    FROM matched AS m JOIN matches AS i USING (c, s, k) WHERE NOT unlike
"""
"""The wait time of each rank in each matched collective."""

_INSTANCES = """
    SELECT i.*, CAST(CASE WHEN clipped_ns IS NOT NULL THEN clipped_ns
        WHEN n = 2 THEN least(n * arrival::HUGEINT - sum_a, greatest(first_end - (sum_a - arrival), 0))
        ELSE n * arrival::HUGEINT - sum_a END AS BIGINT) AS wait_ns
    FROM matches AS i LEFT JOIN clipped USING (c, s, k) WHERE NOT unlike
"""
"""The matched collectives of one kind with the wait time of all their ranks: without those that end alone, sums do."""

_PHASES_OF_RANKS = """
    SELECT count(DISTINCT phases) FROM (SELECT string_agg(DISTINCT phase, ' ' ORDER BY phase) AS phases
    FROM ({layers}) WHERE compute_ns > 0 GROUP BY rank)
"""
"""How many sets of phases the ranks compute in."""

_DAMAGE = ("BinderException", "ConversionException", "InvalidInputException", "IOException", "OutOfRangeException")
"""Errors of DuckDB that damaged files raise: a missing column, another type, pages that cannot be read."""


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
        self.ranks: pd.DataFrame = self._frame(self._read("ranks")).sort_values("rank", ignore_index=True)
        other_version = self.ranks[self.ranks["version"] != VERSION]["version"]
        if len(other_version):
            self._refuse(
                f"{self._folder}: maps of version {other_version.iloc[0]}, this release reads {VERSION}; map again"
            )
        self.has_unlike_layers = self.ranks["evidence"].nunique() > 1
        self.has_unlike_phases = self.has_unlike_layers and self._value(
            _PHASES_OF_RANKS.format(layers=self._read("layers"))
        ) > 1  # fmt: skip
        if self.has_unlike_layers:
            self._constants = {"layer": NO_LAYER} | ({"phase": NO_PHASE} if self.has_unlike_phases else {})
        for table in ("collectives", "segments"):
            self._query(f"CREATE VIEW {table} AS {self._read(table)}")
        for table in ("layers", "steps"):  # small tables are merged: opening 10,000 files takes seconds
            file = str(Path(self._spill.name) / f"{table}.parquet").replace("'", "''")
            self._query(f"COPY ({self._read(table)}) TO '{file}' (FORMAT parquet)")
            self._query(f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{file}')")
        named, numbered = self.ranks["named"], self.ranks["numbered"]
        has_operations = "SELECT min(known) FROM (SELECT max(operation) >= 0 AS known FROM collectives GROUP BY rank)"
        # if only some ranks have communicator ids, match by stream, which all ranks have
        by_stream = named.any() and not named.all()
        row_number = "row_number() OVER (PARTITION BY x.rank, stream, x.step ORDER BY x.index)"
        ids = {
            "comm": "'stream ' || stream" if by_stream else "x.comm",
            "number": row_number if by_stream else "number",
            "sequence": "sequence" if numbered.all() else "-1",
            "operation": "operation" if self._value(has_operations) else "-1",
        }
        self._query("CREATE TABLE parts (comm VARCHAR, rank BIGINT, part BIGINT)")
        self._query("CREATE TABLE renumbered (rank BIGINT, index BIGINT, c UBIGINT, s BIGINT, k BIGINT)")
        self._query(f"CREATE VIEW members AS {_MEMBERS.format(**ids)}")
        self._count_members()

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

    def _count_members(self) -> None:
        """Count the collectives by key: c, comm, s, rank, n."""
        columns = "c, comm, s, rank"
        self._query(
            f"CREATE OR REPLACE TABLE tallies AS SELECT {columns}, count(*) AS n FROM members GROUP BY {columns}"
        )

    def split(self, parts: pd.DataFrame) -> None:
        """Split communicators that share a name.

        Args:
            parts: comm, rank, and the part of the communicator that the rank belongs to.
        """
        self._insert("parts", parts)

    def renumber(self, members: pd.DataFrame) -> None:
        """Replace the keys of some collectives.

        Args:
            members: rank, index, and the keys c, s and k.
        """
        self._insert("renumbered", members)

    def _insert(self, table: str, rows: pd.DataFrame) -> None:
        if len(rows):
            self._db.register("given", rows)
            self._query(f"INSERT INTO {table} BY NAME SELECT * FROM given")
            self._count_members()

    def close(self) -> None:
        """Release memory and temporary files."""
        self._db.close()
        self._spill.cleanup()

    def rows(self) -> tuple[int, int]:
        """Number of collectives of all ranks, and the maximum of one rank."""
        by_rank = self._frame("SELECT sum(n)::BIGINT AS n FROM tallies GROUP BY rank")["n"]
        return int(by_rank.sum()), int(by_rank.max()) if len(by_rank) else 0

    def ends(self, keep_every: int) -> pd.DataFrame:
        """End times of collectives for clock alignment, a sample of one in `keep_every`: c, s, k, rank, end_ns,
        took_ns, symmetric.
        """
        chosen = "" if keep_every <= 1 else f"WHERE hash(s, k) % {keep_every} = 0"
        return self._frame(
            f"SELECT c, s, k, rank, end_ns, end_ns - start_ns AS took_ns, sort IN {SYMMETRIC} AS symmetric "
            f"FROM members {chosen}"
        )

    def stream_members(self) -> pd.DataFrame:
        """The ranks of the communicators known only by stream: comm, rank."""
        return self._frame(
            "SELECT DISTINCT comm, rank FROM tallies WHERE comm LIKE 'stream %' AND s >= -1 ORDER BY ALL"
        )

    def stream_ends(self, ranks: Sequence[int]) -> pd.DataFrame:
        """End times of these ranks' collectives with communicators known only by stream: comm, s, k, rank, end_ns,
        size.
        """
        rank_list = ", ".join(map(str, ranks))
        return self._frame(
            "SELECT comm, s, k, rank, end_ns, size FROM members "
            f"WHERE comm LIKE 'stream %' AND s >= -1 AND rank IN ({rank_list})"
        )

    def messages(self) -> pd.DataFrame:
        """Sends and receives identified only by stream and order: rank, index, kind, step, bytes, start_ns, end_ns."""
        return self._frame(
            "SELECT rank, index, kind, step, bytes, start_ns, end_ns FROM members "
            "WHERE sort = 'SendRecv' AND s <> -2 AND comm LIKE 'stream %' ORDER BY rank, index"
        )

    def odd_steps(self) -> pd.DataFrame:
        """Communicators and steps with different numbers of order-matched collectives on their ranks: c, s."""
        return self._frame(
            "SELECT c, s FROM (SELECT c, s, rank, sum(n) AS n FROM tallies WHERE s <> -2 "
            "GROUP BY c, s, rank) GROUP BY c, s HAVING min(n) <> max(n)"
        )

    def members_of_steps(self, steps: pd.DataFrame) -> pd.DataFrame:
        """The members of the given communicators and steps: rank, index, c, s, sort, end_ns."""
        self._db.register("given_steps", steps)
        return self._frame("SELECT rank, index, c, s, sort, end_ns FROM members SEMI JOIN given_steps USING (c, s)")

    def match(self, clocks: pd.DataFrame) -> None:
        """Align the collectives to a common clock and match them.

        Args:
            clocks: The clocks: rank, at_ns, offset_ns, drift (a fraction).
        """
        self._db.register("given", clocks)
        self._query("CREATE OR REPLACE TABLE clocks AS SELECT * FROM given")
        aligned = "m.{0} + t.offset_ns + CAST(round(t.drift * (m.{0} - t.at_ns)) AS BIGINT)"
        self._query(
            f"CREATE OR REPLACE VIEW matched AS SELECT m.*, {aligned.format('start_ns')} AS a, "
            f"{aligned.format('end_ns')} AS e FROM members AS m JOIN clocks AS t USING (rank)"
        )
        self._query(f"CREATE OR REPLACE TABLE matches AS {_MATCHES}")
        self._query(f"CREATE OR REPLACE VIEW waiting AS {_WAITING}")
        self._query(
            "CREATE OR REPLACE TABLE clipped AS SELECT c, s, k, sum(wait_ns)::BIGINT AS clipped_ns FROM waiting "
            f"WHERE sort NOT IN {SYMMETRIC} GROUP BY c, s, k"
        )
        self._query(f"CREATE OR REPLACE VIEW instances AS {_INSTANCES}")

    def instances(self, limit: int = 0) -> pd.DataFrame:
        """Matched collectives: c, s, k, n, step, sort, bytes, size, arrival, late_rank, late_index, ended, wait_ns
        summed over all ranks, and alone_ns, the exposed time summed over all ranks but the late one.

        Args:
            limit: Maximum number, longest waits first; 0 for all.
        """
        order = f"ORDER BY wait_ns DESC LIMIT {limit}" if limit else ""
        columns = "c, s, k, n, step, sort, bytes, size, arrival, late_rank, late_index, ended, wait_ns, alone_ns"
        return self._frame(f"SELECT {columns} FROM instances {order}")

    def matrix(self, without: Sequence[int] = ()) -> pd.DataFrame:
        """Wait time by pair of ranks: waiting_rank, late_rank, wait_ns.

        Args:
            without: Steps to leave out.
        """
        condition = f"AND step NOT IN ({', '.join(map(str, without))}) " if len(without) else ""
        return self._frame(
            "SELECT rank AS waiting_rank, late_rank, sum(wait_ns)::BIGINT AS wait_ns FROM waiting "
            f"WHERE rank <> late_rank {condition}GROUP BY rank, late_rank ORDER BY waiting_rank, late_rank"
        )

    def count(self) -> int:
        """Number of matched collectives."""
        return int(self._value("SELECT count(*) FROM matches WHERE NOT unlike"))

    def unlike(self) -> int:
        """Number of matched collectives with different kinds on their ranks."""
        return int(self._value("SELECT count(*) FROM matches WHERE unlike"))

    def unmatched(self) -> int:
        """Number of collectives without a match on another rank."""
        return self.rows()[0] - int(self._value("SELECT coalesce(sum(n), 0) FROM matches"))

    def span(self) -> int:
        """From the first arrival to the last end of the matched collectives, in ns."""
        return int(self._value("SELECT coalesce(max(e) - min(a), 0) FROM matched SEMI JOIN instances USING (c, s, k)"))

    def total_wait(self) -> int:
        """Total wait time of all ranks, in ns."""
        return int(self._value("SELECT coalesce(sum(wait_ns), 0) FROM instances"))

    def by_late_rank(self) -> pd.DataFrame:
        """Wait time by step, communicator and last rank: step, c, late_rank, n, wait_ns, exposed_ns (approximately the
        part of it without concurrent work).
        """
        return self._frame(
            "SELECT step, c, late_rank, max(n) AS n, sum(wait_ns)::BIGINT AS wait_ns, "
            "sum(least(wait_ns, alone_ns))::BIGINT AS exposed_ns FROM instances GROUP BY step, c, late_rank"
        )

    def transfers(self) -> pd.DataFrame:
        """Transfer times by communicator, kind and size: c, sort, bytes, n (ranks of the communicator; if unknown, only
        those present), count, median_ns, steps.
        """
        return self._frame(
            "SELECT c, sort, bytes, greatest(max(n), max(size)) AS n, count(*) AS count, "
            "count(DISTINCT step) AS steps, quantile_cont(ended - arrival, 0.5) AS median_ns "
            "FROM matches WHERE NOT unlike GROUP BY c, sort, bytes"
        )

    def communicators(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each communicator."""
        members = self._query("SELECT c, list(DISTINCT rank ORDER BY rank) FROM tallies GROUP BY c", "fetchall")
        return {c: tuple(ranks) for c, ranks in members}

    def uses(self) -> pd.DataFrame:
        """Use of communicators: c, comm, group, kind, phase, size, ranks (a list), collectives."""
        return self._frame(
            "SELECT m.c, min(m.comm) AS comm, max(x.group) AS group, m.kind, x.phase, max(m.size) AS size, "
            "list(DISTINCT m.rank) AS ranks, count(*) AS collectives "
            "FROM members AS m JOIN collectives AS x USING (rank, index) GROUP BY m.c, m.kind, x.phase "
            "ORDER BY m.c, m.kind, x.phase"
        )

    def passed_on(self) -> pd.DataFrame:
        """The members of matched sends and receives in steps: c, s, k, rank, kind, step, a, e, alone."""
        return self._frame(
            "SELECT c, s, k, rank, kind, step, a, e, alone FROM matched SEMI JOIN matches USING (c, s, k) "
            "WHERE sort = 'SendRecv' AND step >= 0"
        )

    def step_times(self) -> pd.DataFrame:
        """Device activity in steps: step, rank, doing, passes_on (only in a send or receive), ns."""
        return self._frame(
            "SELECT p.step, p.rank, p.doing, coalesce(x.sort = 'SendRecv', false) AS passes_on, "
            "sum(p.ns)::BIGINT AS ns FROM segments AS p "
            "LEFT JOIN members AS x ON x.rank = p.rank AND x.index = p.collective "
            "WHERE p.step >= 0 GROUP BY ALL"
        )

    def members_of(self, instances: pd.DataFrame) -> pd.DataFrame:
        """Members of the given instances: c, s, k, rank, index, comm, a and e (aligned start and end), alone."""
        self._db.register("given_instances", instances[["c", "s", "k"]])
        return self._frame(
            "SELECT c, s, k, rank, index, comm, a, e, alone FROM matched SEMI JOIN given_instances USING (c, s, k)"
        )

    def points(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The collectives of the given ranks: rank, index, c, s, k, step, a, e, ready_segment, end_segment, gates,
        queued_ns (from ready to start), layer, phase; and of those that are matched arrival, late_rank and sort of all
        ranks.
        """
        points = self._frame(
            "SELECT m.rank, m.index, m.c, m.s, m.k, m.step, m.a, m.e, x.ready_segment, x.end_segment, x.gates, "
            "x.start_ns - x.ready_ns AS queued_ns, x.layer, x.phase, i.arrival, i.late_rank, i.sort "
            "FROM matched AS m JOIN collectives AS x USING (rank, index) LEFT JOIN matches AS i USING (c, s, k) "
            f"WHERE m.rank IN ({', '.join(map(str, ranks))}) ORDER BY m.rank, m.index"
        )
        self._check_filled("collectives", points.drop(columns=["arrival", "late_rank", "sort"]))
        # causes look rows up by it
        if (points["index"] != points.groupby("rank", sort=False).cumcount()).any():
            raise CaptureError(f"{self._folder}: collectives.index does not count from 0 without gaps; map again")
        return points

    def segments(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The segments of the given ranks, by rank and segment."""
        segments = self._frame(
            f"SELECT * FROM segments WHERE rank IN ({', '.join(map(str, ranks))}) ORDER BY rank, segment"
        )
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

        columns = {"compute_ns": "median_ns", "idle_ns": "idle_ns", "comm_ns": "comm_ns", "ops": "ops"}
        medians = ", ".join(
            f"round(quantile_cont({name}, 0.5))::BIGINT AS {column}" for name, column in columns.items()
        )
        in_steps = "step >= 0" if self._value("SELECT bool_or(step >= 0) FROM layers") else "true"
        ranks = sorted(self.ranks["rank"].tolist())
        # in parts: DuckDB's memory limit does not hold for the values of which it finds the median
        parts = [
            self._frame(
                f"SELECT rank, layer, phase, {medians}, count(*) AS steps FROM layers "
                f"WHERE {in_steps} AND rank BETWEEN {batch[0]} AND {batch[-1]} GROUP BY rank, layer, phase"
            )
            for batch in (ranks[low : low + _AT_ONCE] for low in range(0, len(ranks), _AT_ONCE))
        ]
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

        kinds = {
            "compute": "compute_ns",
            "copy": "copy_ns",
            "host": "idle_ns - loading_ns",
            "data_loading": "loading_ns",
        }
        tables = [
            self._frame(
                f"WITH time AS (SELECT step, rank, layer, phase, {ns} AS ns, ops FROM layers WHERE step >= 0), "
                "usual AS (SELECT step, layer, phase, quantile_disc(ns, 0.5) AS median_ns, "
                "quantile_disc(ops, 0.5) AS median_ops FROM time GROUP BY step, layer, phase) "
                f"SELECT step, rank, '{kind}' AS kind, layer, phase, ns - median_ns AS excess_ns, "
                "ops > median_ops AS more_ops FROM time JOIN usual USING (step, layer, phase) "
                f"WHERE ns - median_ns > greatest({least_ns}, {least_share} * median_ns)"
            )
            for kind, ns in kinds.items()
        ]
        return pd.concat(tables, ignore_index=True)

    def host_excesses(self, column: str, least_ns: int) -> pd.DataFrame:
        """Excess host time in a step over the median of the ranks: step, rank, excess_ns.

        Args:
            column: The column to compare: loading_ns or gc_ns.
            least_ns: Minimum excess.
        """
        return self._frame(
            f"SELECT step, rank, {column} - usual AS excess_ns FROM steps JOIN "
            f"(SELECT step, quantile_disc({column}, 0.5) AS usual FROM steps GROUP BY step) USING (step) "
            f"WHERE {column} - usual > {least_ns}"
        )

    def step_ranges(self) -> pd.DataFrame:
        """The steps of each rank: rank, first, last, steps, and shared, the number that another rank has too."""
        return self._frame(
            "SELECT rank, min(step) AS first, max(step) AS last, count(*) AS steps, "
            "count(*) FILTER (WHERE n > 1) AS shared FROM (SELECT DISTINCT rank, step FROM steps) JOIN "
            "(SELECT step, count(DISTINCT rank) AS n FROM steps GROUP BY step) USING (step) GROUP BY rank ORDER BY rank"
        )

    def step_lengths(self) -> pd.DataFrame:
        """Steps: step, median_ns over ranks, ranks, and warm_up (true if it is warm-up on any rank)."""
        return self._frame(
            "SELECT step, quantile_disc(end_ns - start_ns, 0.5) AS median_ns, count(*) AS ranks, "
            "bool_or(warm_up) AS warm_up FROM steps GROUP BY step ORDER BY step"
        )

    def matched_steps(self) -> pd.DataFrame:
        """Steps in which each rank has collectives: step, rank, and whether any of them is matched. All are taken for
        matched in a large job.
        """
        if self.rows()[0] > FEW:
            return self._frame("SELECT DISTINCT step, rank, true AS matched FROM steps")
        return self._frame(
            "SELECT step, rank, bool_or(n IS NOT NULL) AS matched FROM matched LEFT JOIN "
            "(SELECT c, s, k, n FROM matches) USING (c, s, k) WHERE step >= 0 GROUP BY step, rank"
        )

    def rank_steps(self) -> pd.DataFrame:
        """Step by rank: step, rank, length_ns, compute_ns, idle_ns, and wait_ns in matched collectives."""
        return self._frame(
            "WITH work AS (SELECT rank, step, sum(compute_ns)::BIGINT AS compute_ns, sum(idle_ns)::BIGINT AS idle_ns "
            "FROM layers GROUP BY rank, step), "
            "waits AS (SELECT rank, step, sum(wait_ns)::BIGINT AS wait_ns FROM waiting GROUP BY rank, step) "
            "SELECT step, rank, end_ns - start_ns AS length_ns, coalesce(compute_ns, 0) AS compute_ns, "
            "coalesce(idle_ns, 0) AS idle_ns, coalesce(wait_ns, 0) AS wait_ns "
            "FROM steps LEFT JOIN work USING (rank, step) LEFT JOIN waits USING (rank, step) ORDER BY step, rank"
        )

    def _refuse(self, fault: str) -> None:
        self.close()
        raise CaptureError(fault)

    def _value(self, query: str) -> Any:
        return self._query(query, "fetchall")[0][0]

    def _frame(self, query: str) -> pd.DataFrame:
        frame: pd.DataFrame = self._query(query, "df")
        return frame

    def _query(self, query: str, fetch: str = "") -> Any:
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
