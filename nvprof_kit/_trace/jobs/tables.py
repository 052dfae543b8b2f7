"""The maps of a job's ranks as one DuckDB database over the Parquet files, which can exceed memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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

_SYMMETRIC = str(SYMMETRIC)
_PEER = "('Send', 'Recv', 'SendRecv')"

_MEMBERS = """
    SELECT rank, index, kind, bytes, size, start_ns, end_ns, step, alone_ns, {comm} AS comm,
        CASE WHEN {operation} >= 0 AND comm LIKE 'stream %' THEN 0 ELSE {c} END AS c,
        CASE WHEN {operation} >= 0 OR {sequence} >= 0 THEN -2 ELSE step END AS s,
        CASE WHEN {operation} >= 0 THEN {operation} WHEN {sequence} >= 0 THEN sequence ELSE number END AS k,
        CASE WHEN kind IN {peer} THEN 'SendRecv' ELSE kind END AS sort
    FROM collectives {join}
"""
"""The collectives with the keys that match them across ranks: communicator, step and number."""

_DAMAGE = ("BinderException", "ConversionException", "InvalidInputException", "IOException", "OutOfRangeException")
"""Errors of DuckDB that damaged files raise: a missing column, another type, pages that cannot be read."""

_SORTS = (*SYMMETRIC, "SendRecv", "Broadcast", "Reduce")
_CODE = " ".join(f"WHEN '{sort}' THEN {code}" for code, sort in enumerate(_SORTS, 1))

_INSTANCES = f"""
    SELECT * EXCLUDE (late, low, high, sum_alone, late_alone), (late >> 32)::INTEGER AS late_rank,
        (late & 4294967295)::INTEGER AS late_index, coalesce({list(_SORTS)}[low], '') AS sort, low <> high AS unlike,
        sum_alone::BIGINT - late_alone AS alone_ns
    FROM (
        SELECT c, s, k, count(*)::INTEGER AS n, max(a) AS arrival, arg_max((rank << 32) | index, a) AS late,
            sum(a) AS sum_a, max(e) AS ended, arg_min(e, a) AS first_end, {{step}} AS step, min(sort) AS low,
            max(sort) AS high, max(bytes) AS bytes, max(size)::INTEGER AS size, sum(alone::DOUBLE) AS sum_alone,
            arg_max(alone, a) AS late_alone
        FROM (SELECT * REPLACE (CASE sort {_CODE} ELSE 0 END::UTINYINT AS sort) FROM matched)
        GROUP BY c, s, k HAVING count(*) > 1
    )
"""
"""One row per matched collective. There are millions of groups, so each has few bytes: rank and index are packed into
one integer, kinds are codes, and sums of what is far below 2^53 are floating-point numbers, which are exact there.
"""

_LAYER_KEYS = ("rank", "step", "layer", "phase")
_PHASES_OF_RANKS = (
    "SELECT count(DISTINCT phases) FROM (SELECT string_agg(DISTINCT phase, ' ' ORDER BY phase) AS phases "
    "FROM ({layers}) WHERE compute_ns > 0 GROUP BY rank)"
)
"""How many sets of phases the ranks compute in."""

_STEP = "coalesce(min(step) FILTER (WHERE step >= 0), -1)"
"""The step of a matched collective, where it is not among the keys."""

_CLIPPED = f"""
    SELECT c, s, k, sum(least(i.arrival - m.a, greatest(m.e - m.a, 0)))::BIGINT AS clipped_ns
    FROM matched AS m JOIN instances AS i USING (c, s, k) WHERE i.sort NOT IN {_SYMMETRIC} GROUP BY c, s, k
"""
"""Wait time in collectives that some ranks can finish before others arrive: at most until the rank's own end."""

_WAITED = "n * arrival::HUGEINT - sum_a"
_WAITS = f"""(
    SELECT i.*, CAST(
        CASE WHEN sort NOT IN {_SYMMETRIC} THEN clipped_ns
        WHEN n = 2 THEN least({_WAITED}, greatest(first_end - (sum_a - arrival), 0)) ELSE {_WAITED} END AS BIGINT
    ) AS wait_ns FROM instances AS i LEFT JOIN clipped USING (c, s, k) WHERE NOT unlike
)"""
"""The matched collectives with the wait time of their ranks."""


_LEAST_BYTES = 12
"""No Parquet file is shorter: it begins and ends with a mark of four bytes, and tells the length of its footer."""


def is_maps(folder: Path) -> bool:
    """Whether a folder contains maps."""
    return all((folder / table).is_dir() for table in TABLES)


def fault_of(folder: Path, names: Sequence[str] | None = None) -> str:
    """Which file of maps is not there, or was not written to its end; '' if all are whole.

    Args:
        folder: The folder of maps.
        names: The required maps; None for all maps in the folder.
    """
    if names is None:
        names = sorted({file.name for table in TABLES for file in (folder / table).glob("*.parquet")})
    for file in (folder / table / name for table in TABLES for name in names):
        try:
            with file.open("rb") as opened:
                opened.seek(-min(_LEAST_BYTES, os.fstat(opened.fileno()).st_size), os.SEEK_END)
                tail = opened.read()
        except FileNotFoundError:
            return f"{file}: no such file, and the map is not whole without it; map again"
        except OSError as error:
            return f"{file}: {error.strerror}; map again"
        if len(tail) < _LEAST_BYTES or not tail.endswith(b"PAR1"):
            return f"{file}: a damaged map (it is cut short); map again"
    return ""


class JobTables:
    """Queries over the maps of a job.

    Args:
        maps: The maps, or the folder of their files.
        names: The files that belong to the job; None for all.

    Raises:
        CaptureError: There is no map, or a map is incomplete or has another version.
    """

    def __init__(self, maps: Path | Sequence[RankMap], names: Sequence[str] | None = None) -> None:
        import duckdb
        import pyarrow as pa

        self._folder = maps if isinstance(maps, Path) else None
        if self._folder and (fault := fault_of(self._folder, names)):
            raise CaptureError(fault)
        if self._folder and names is None and not any((self._folder / "ranks").glob("*.parquet")):
            command = f"nvprof-kit ranks map -o {maps} CAPTURE..."
            raise CaptureError(f"{maps}: no map in it; make some with {command}")
        self._spill = tempfile.TemporaryDirectory(prefix="nvprof-kit-ranks-")
        config = {"memory_limit": MEMORY, "temp_directory": self._spill.name, "preserve_insertion_order": False}
        self._db: Any = duckdb.connect(config=config)
        without_progress_bar(self._db)
        with suppress(duckdb.Error):  # not in every build: return free memory to the system soon
            self._db.execute("SET allocator_background_threads = true")
        self._db.execute("SET parquet_metadata_cache = true")  # each of 10,000 files is opened several times
        self._names = names
        self._places: dict[int, str] = {}
        self._gathered: set[str] = set()
        if not isinstance(maps, Path):
            for table in TABLES:
                parts = [to_arrow(getattr(rank_map, table), table) for rank_map in maps]
                self._db.register(f"maps_{table}", pa.concat_tables(parts).unify_dictionaries())
        self._without: dict[str, str] = {}
        self._merge("ranks")
        other_version = self._one(f"SELECT max(version) FROM ranks WHERE version <> {VERSION}")[0]
        if other_version is not None:
            fault = f"{self._folder}: maps of version {other_version}, this release reads {VERSION}; map again"
            self._refuse(fault)
        if self._one("SELECT count(DISTINCT evidence) FROM ranks")[0] > 1:
            has_unlike_phases = self._one(_PHASES_OF_RANKS.format(layers=self._read("layers")))[0] > 1
            self._without = {"layer": NO_LAYER} | ({"phase": NO_PHASE} if has_unlike_phases else {})
        self._query(f"CREATE VIEW collectives AS {self._read('collectives')}")
        self._query(f"CREATE VIEW segments AS {self._read('segments')}")
        self._merge("layers")
        self._merge("steps")
        present = self._one("SELECT bool_and(named), bool_or(named), bool_and(numbered) FROM ranks")
        # if only some ranks have communicator ids, match by stream, which all ranks have
        self._comm = "comm" if present[0] or not present[1] else "'stream ' || stream"
        self._sequence = "sequence" if present[2] else "-1"
        with_operation = self._one("SELECT count(*) FROM collectives WHERE operation >= 0")[0]  # by the footers
        all_have_operations = (
            [with_operation]
            if not with_operation
            else self._one(
                "SELECT bool_and(known) FROM (SELECT bool_or(operation >= 0) AS known FROM collectives GROUP BY rank)"
            )
        )
        self._operation = "operation" if all_have_operations[0] else "-1"
        # whether the step is among the keys of all members
        self._by_step = self._operation == self._sequence == "-1"
        self._show(self._members(f"hash({self._comm})"))

    def _show(self, members: str) -> None:
        """Set the query for the job's collectives."""
        self._queried = members
        self._query(f"CREATE OR REPLACE VIEW members AS {members}")
        self._gathered.discard("tallies")

    def _read(self, table: str, names: Sequence[str] | None = None) -> str:
        """A query over a table of the maps, or of some of them."""
        source, columns = f"maps_{table}", {name: f'"{name}"' for name in TABLES[table]}
        if self._folder is not None:
            folder, names = self._folder / table, self._names if names is None else names
            files = [folder / "*.parquet"] if names is None else [folder / name for name in names]
            quoted = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
            source = f"read_parquet([{quoted}], filename = true)"
            columns |= {"filename": "filename"} if table == "ranks" else {}
        if table != "ranks":
            columns |= {name: f"'{text}' AS {name}" for name, text in self._without.items() if name in columns}
        grouped = ""
        if table == "layers" and self._without:
            sums = [name for name in columns if name not in _LAYER_KEYS]
            columns |= {name: f'sum("{name}")::BIGINT AS "{name}"' for name in sums}
            grouped = "GROUP BY ALL"
        return f"SELECT {', '.join(columns.values())} FROM {source} {grouped}"

    @property
    def has_unlike_layers(self) -> bool:
        """Whether ranks have their layers from different evidence: a module of one and an operator of another are no
        equals, so ranks are compared without layers, and by phase only if all compute in the same phases.
        """
        return bool(self._without)

    @property
    def has_unlike_phases(self) -> bool:
        """Whether such ranks compute in different phases too."""
        return "phase" in self._without

    def _files_of(self, ranks: Iterable[int]) -> list[str] | None:
        """The names of the maps of some ranks; None for all, if they are many, or none is."""
        if self._folder is None:
            return None
        if not self._places:
            rows = self._query("SELECT rank, filename FROM ranks_and_files", "fetchall")
            self._places = {int(rank): Path(file).name for rank, file in rows}
        names = sorted({self._places[rank] for rank in ranks if rank in self._places})
        return names if 0 < 2 * len(names) <= len(set(self._places.values())) else None

    @contextmanager
    def _only(self, ranks: Iterable[int]) -> Iterator[None]:
        """Read only the maps of some ranks: of 10,000 files, opening those of others takes most of the time."""
        names = self._files_of(ranks)
        if names is None:
            yield
            return
        self._query(f"CREATE OR REPLACE VIEW collectives AS {self._read('collectives', names)}")
        try:
            yield
        finally:
            self._query(f"CREATE OR REPLACE VIEW collectives AS {self._read('collectives')}")

    def _merge(self, table: str) -> None:
        """Merge a small table of all ranks into one file, because opening 10,000 files takes seconds."""
        source = f"({self._read(table)})"
        if self._folder is not None:
            file = str(Path(self._spill.name) / f"{table}.parquet").replace("'", "''")
            self._query(f"COPY {source} TO '{file}' (FORMAT parquet)")
            source = f"read_parquet('{file}')"
        self._query(f"CREATE VIEW {table}_and_files AS SELECT * FROM {source}")
        columns = ", ".join(f'"{name}"' for name in TABLES[table])
        self._query(f"CREATE VIEW {table} AS SELECT {columns} FROM {table}_and_files")

    def _refuse(self, fault: str) -> None:
        self.close()
        raise CaptureError(fault)

    def _tallies(self) -> str:
        """Name of the table with the number of collectives of each rank: c, comm, s, rank, n."""
        if "tallies" not in self._gathered:
            self._query(
                "CREATE OR REPLACE TABLE tallies AS "
                "SELECT c, comm, s, rank, count(*) AS n FROM members GROUP BY c, comm, s, rank"
            )
            self._gathered.add("tallies")
        return "tallies"

    def _members(self, c: str, join: str = "") -> str:
        ids = {"operation": self._operation, "sequence": self._sequence}  # -1 unless all ranks have them
        return _MEMBERS.format(c=c, join=join, comm=self._comm, peer=_PEER, **ids)

    def close(self) -> None:
        """Release memory and temporary files."""
        self._db.close()
        self._spill.cleanup()

    def table(self, name: str) -> pd.DataFrame:
        """A complete table of the maps."""
        return self._frame(f"SELECT * FROM {name}")

    def world_size(self) -> int:
        """World size according to the captures; -1 if unknown."""
        return int(self._one("SELECT coalesce(max(world_size), -1) FROM ranks")[0])

    def rows(self) -> tuple[int, int]:
        """Number of collectives of all ranks, and the maximum of one rank."""
        counts = self._one(
            "SELECT coalesce(sum(n), 0), coalesce(max(n), 0) FROM "
            f"(SELECT rank, sum(n) AS n FROM {self._tallies()} GROUP BY rank)"
        )
        return int(counts[0]), int(counts[1])

    def ends(self, keep_every: int) -> pd.DataFrame:
        """End times of collectives for clock alignment, a sample of one in `keep_every`: c, s, k, rank, end_ns,
        took_ns, symmetric.
        """
        chosen = "" if keep_every <= 1 else f"WHERE hash(s, k) % {keep_every} = 0"
        return self._frame(
            f"SELECT c, s, k, rank, end_ns, end_ns - start_ns AS took_ns, sort IN {_SYMMETRIC} AS symmetric "
            f"FROM members {chosen}"
        )

    def listed_groups(self) -> dict[int, str]:
        """By rank, the process groups that its mark lists."""
        rows = self._query("SELECT rank, groups FROM ranks WHERE groups <> ''", "fetchall")
        return {int(rank): str(text) for rank, text in rows}

    def has_streams(self) -> bool:
        """Whether communicators are known only by stream."""
        return bool(self._one(f"SELECT count(*) FROM (FROM collectives WHERE {self._comm} LIKE 'stream %' LIMIT 1)")[0])

    def stream_members(self) -> pd.DataFrame:
        """The ranks of the communicators known only by stream: comm, rank."""
        return self._frame(
            "SELECT DISTINCT comm, rank FROM members WHERE comm LIKE 'stream %' AND s >= -1 ORDER BY ALL"
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

    def split(self, parts: pd.DataFrame) -> None:
        """Split communicators that share a name.

        Args:
            parts: comm, rank, and the part of the communicator that the rank belongs to.
        """
        self._db.register("given", parts)
        self._query("CREATE OR REPLACE TABLE parts AS SELECT * FROM given")
        join = f"LEFT JOIN (SELECT comm AS of, rank, part FROM parts) AS p ON p.of = {self._comm} AND p.rank = x.rank"
        members = self._members(f"hash({self._comm}, coalesce(part, 0))", f"AS x {join}")
        self._show(members.replace("SELECT rank,", "SELECT x.rank,", 1))

    def messages(self) -> pd.DataFrame:
        """Sends and receives identified only by stream and order: rank, index, kind, step, bytes, end_ns."""
        return self._frame(
            "SELECT rank, index, kind, step, bytes, start_ns, end_ns FROM members "
            "WHERE sort = 'SendRecv' AND s <> -2 AND comm LIKE 'stream %' ORDER BY rank, index"
        )

    def renumber(self, messages: pd.DataFrame) -> None:
        """Replace the communicators and numbers of sends and receives: rank, index, label, k."""
        self._db.register("given", messages)
        self._query("CREATE OR REPLACE TABLE messages AS SELECT * FROM given")
        self._by_step = False
        self._show(
            "SELECT m.* REPLACE (CASE WHEN t.label IS NULL THEN m.c ELSE hash(t.label) END AS c, "
            "CASE WHEN t.label IS NULL THEN m.s ELSE -2 END AS s, coalesce(t.k, m.k) AS k) "
            f"FROM ({self._queried}) AS m "
            "LEFT JOIN messages AS t ON t.rank = m.rank AND t.index = m.index"
        )

    def odd_steps(self) -> pd.DataFrame:
        """Communicators and steps with different numbers of order-matched collectives on their ranks: c, s."""
        return self._frame(
            f"SELECT c, s FROM (SELECT c, s, rank, sum(n) AS n FROM {self._tallies()} WHERE s <> -2 "
            "GROUP BY c, s, rank) GROUP BY c, s HAVING min(n) <> max(n)"
        )

    def members_of_steps(self, steps: pd.DataFrame) -> pd.DataFrame:
        """The members of the given communicators and steps: rank, index, c, s, sort, start_ns, end_ns."""
        self._db.register("wanted_steps", steps)
        return self._frame(
            "SELECT rank, index, c, s, sort, start_ns, end_ns FROM members SEMI JOIN wanted_steps USING (c, s)"
        )

    def match(self, clocks: pd.DataFrame, renumbered: pd.DataFrame) -> None:
        """Align the collectives to a common clock and match them.

        Args:
            clocks: The clocks: rank, at_ns, offset_ns, drift (a fraction).
            renumbered: Members with numbers that differ from their order: rank, index, c, s, k.
        """
        for name, frame in (("clocks", clocks), ("renumbered", renumbered)):
            self._db.register("given", frame)
            self._query(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM given")
        number, join = "m.k", ""
        if len(renumbered):
            number, join = "coalesce(r.k, m.k)", "LEFT JOIN renumbered AS r USING (rank, index, c, s)"
        aligned = "m.{0} + t.offset_ns + CAST(round(t.drift * (m.{0} - t.at_ns)) AS BIGINT)"
        self._matched = (
            f"SELECT m.rank, m.index, m.c, m.s, {number} AS k, m.step, m.sort, "
            f"m.bytes, m.size, m.comm, m.alone_ns AS alone, {aligned.format('start_ns')} AS a, "
            f"{aligned.format('end_ns')} AS e FROM {{}} AS m JOIN clocks AS t USING (rank) {join}"
        )
        # without renumbering, members can be filtered before clock alignment
        self._chosen_first = not join
        self._query(f"CREATE OR REPLACE VIEW matched AS {self._matched.format('members')}")
        step = "s" if self._by_step and self._chosen_first else _STEP
        self._query(f"CREATE OR REPLACE TABLE instances AS {_INSTANCES.format(step=step)}")
        self._query(f"CREATE OR REPLACE TABLE clipped AS {_CLIPPED}")

    def instances(self, least_ns: int = -1, limit: int = 0) -> pd.DataFrame:
        """Matched collectives: c, s, k, n, step, sort, bytes, size, arrival, late_rank, late_index, ended, wait_ns
        summed over all ranks, and alone_ns, the exposed time summed over all ranks but the late one.

        Args:
            least_ns: Only those with a longer average wait per rank.
            limit: Maximum number, longest waits first; 0 for all.
        """
        order = f"ORDER BY wait_ns DESC LIMIT {limit}" if limit else ""
        columns = "c, s, k, n, step, sort, bytes, size, arrival, late_rank, late_index, ended, wait_ns, alone_ns"
        return self._frame(f"SELECT {columns} FROM {_WAITS} WHERE wait_ns > {least_ns} * (n - 1) {order}")

    def matrix(self, without: Sequence[int] = ()) -> pd.DataFrame:
        """Wait time by pair of ranks: waiting_rank, late_rank, wait_ns.

        Args:
            without: Steps to leave out.
        """
        wait, clips = "i.arrival - m.a", f"i.n = 2 OR i.sort NOT IN {_SYMMETRIC}"
        condition = f"AND m.step NOT IN ({', '.join(map(str, without))}) " if len(without) else ""
        return self._frame(
            "SELECT m.rank AS waiting_rank, i.late_rank, sum("
            f"CASE WHEN {clips} THEN least({wait}, greatest(m.e - m.a, 0)) ELSE {wait} END)::BIGINT AS wait_ns "
            "FROM matched AS m JOIN instances AS i USING (c, s, k) WHERE NOT i.unlike AND m.rank <> i.late_rank "
            f"{condition}GROUP BY m.rank, i.late_rank ORDER BY waiting_rank, late_rank"
        )

    def count(self) -> int:
        """Number of matched collectives."""
        return int(self._one("SELECT count(*) FROM instances WHERE NOT unlike")[0])

    def unlike(self) -> int:
        """Number of matched collectives with different kinds on their ranks."""
        return int(self._one("SELECT count(*) FROM instances WHERE unlike")[0])

    def unmatched(self) -> int:
        """Number of collectives without a match on another rank."""
        among = f"SELECT coalesce(sum(n), 0) FROM {self._tallies()}"
        return int(self._one(f"SELECT ({among}) - (SELECT coalesce(sum(n), 0) FROM instances)")[0])

    def span(self) -> int:
        """From the first arrival to the last end of the matched collectives, in ns."""
        return int(
            self._one(
                "SELECT coalesce(max(e) - min(a), 0) FROM matched SEMI JOIN "
                "(SELECT c, s, k FROM instances WHERE NOT unlike) USING (c, s, k)"
            )[0]
        )

    def total_wait(self) -> int:
        """Total wait time of all ranks, in ns."""
        return int(self._one(f"SELECT coalesce(sum(wait_ns), 0) FROM {_WAITS}")[0])

    def by_late_rank(self) -> pd.DataFrame:
        """Wait time by step, communicator and last rank: step, c, late_rank, n, wait_ns, exposed_ns (approximately the
        part of it without concurrent work).
        """
        return self._frame(
            "SELECT step, c, late_rank, max(n) AS n, sum(wait_ns)::BIGINT AS wait_ns, "
            "sum(least(wait_ns, alone_ns))::BIGINT AS exposed_ns "
            f"FROM {_WAITS} GROUP BY step, c, late_rank"
        )

    def transfers(self) -> pd.DataFrame:
        """Transfer times by communicator, kind and size: c, sort, bytes, n (ranks of the communicator; if unknown, only
        those present), count, median_ns, steps.
        """
        return self._frame(
            "SELECT c, sort, bytes, greatest(max(n), max(size)) AS n, count(*) AS count, "
            "count(DISTINCT step) AS steps, quantile_cont(ended - arrival, 0.5) AS median_ns "
            "FROM instances WHERE NOT unlike GROUP BY c, sort, bytes"
        )

    def communicators(self) -> pd.DataFrame:
        """Communicators and their ranks: c, comm, rank."""
        return self._frame(f"SELECT DISTINCT c, comm, rank FROM {self._tallies()} ORDER BY c, rank")

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
            "SELECT m.c, m.s, m.k, m.rank, x.kind, m.step, m.a, m.e, m.alone FROM matched AS m "
            "JOIN collectives AS x USING (rank, index) SEMI JOIN instances AS i USING (c, s, k) "
            "WHERE m.sort = 'SendRecv' AND m.step >= 0"
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
        self._db.register("wanted_instances", instances[["c", "s", "k"]])
        chosen = "SELECT * FROM {} SEMI JOIN wanted_instances USING (c, s, k)"
        if self._chosen_first:
            of = self._matched.format("(" + chosen.format("members") + ")")
        else:
            of = chosen.format("matched")
        rows = self._query(
            f"SELECT DISTINCT rank FROM {self._tallies()} SEMI JOIN wanted_instances USING (c)", "fetchall"
        )
        with self._only(rank for (rank,) in rows):
            return self._frame(f"SELECT c, s, k, rank, index, comm, a, e, alone FROM ({of})")

    def points(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The collectives of the given ranks: rank, index, c, s, k, a, e, ready_segment, end_segment, gates, queued_ns
        (from ready to start), layer, phase.
        """
        self._want(ranks)
        with self._only(ranks):
            points = self._frame(
                "SELECT m.rank, m.index, m.c, m.s, m.k, m.a, m.e, x.ready_segment, x.end_segment, x.gates, "
                "x.start_ns - x.ready_ns AS queued_ns, x.layer, x.phase FROM matched AS m "
                "JOIN collectives AS x USING (rank, index) SEMI JOIN wanted_ranks USING (rank) ORDER BY m.rank, m.index"
            )
        self._check_filled("collectives", points)
        # causes look rows up by it
        if (points["index"] != points.groupby("rank", sort=False).cumcount()).any():
            raise CaptureError(f"{self._folder}: collectives.index does not count from 0 without gaps; map again")
        return points

    def _check_filled(self, table: str, rows: pd.DataFrame) -> None:
        """Check rows that are read from maps: NULL would become NaN or another row's value."""
        lacking = rows.isna().sum()
        for name, count in lacking[lacking > 0].items():
            self._refuse(f"{self._folder}: {table}.{name} lacks {count} values; map again")

    def segments(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The segments of the given ranks, by rank and segment."""
        self._want(ranks)
        of = self._read("segments", self._files_of(ranks))
        segments = self._frame(f"SELECT * FROM ({of}) SEMI JOIN wanted_ranks USING (rank) ORDER BY rank, segment")
        self._check_filled("segments", segments)
        return segments

    def layer_medians(self) -> pd.DataFrame:
        """Layer x phase x rank, as medians over the rank's steps: rank, layer, phase, median_ns, idle_ns, comm_ns, ops,
        steps. Without steps, values of the whole capture.
        """
        import pandas as pd

        medians = ", ".join(
            f"round(quantile_cont({name}, 0.5))::BIGINT AS {column}"
            for name, column in (
                ("compute_ns", "median_ns"),
                ("idle_ns", "idle_ns"),
                ("comm_ns", "comm_ns"),
                ("ops", "ops"),
            )
        )
        in_steps = "step >= 0" if self._one("SELECT bool_or(step >= 0) FROM layers")[0] else "true"
        ranks = [row[0] for row in self._query("SELECT DISTINCT rank FROM layers ORDER BY rank", "fetchall")] or [0]
        # in parts: DuckDB's memory limit does not hold for the values of which it finds the median
        parts = [ranks[low : low + _AT_ONCE] for low in range(0, len(ranks), _AT_ONCE)]
        tables = [
            self._frame(
                f"SELECT rank, layer, phase, {medians}, count(*) AS steps FROM layers "
                f"WHERE {in_steps} AND rank BETWEEN {batch[0]} AND {batch[-1]} GROUP BY rank, layer, phase"
            )
            for batch in parts
        ]
        column: pd.DataFrame = pd.concat(tables, ignore_index=True)
        return column

    def excesses(self, least_ns: int, least_share: float) -> pd.DataFrame:
        """Excess time of ranks over the median of the ranks with the same layer, phase and step.

        Args:
            least_ns: Minimum excess.
            least_share: Minimum excess as a share of the median.

        Returns:
            step, rank, kind (compute, copy, host, data_loading), layer, phase, excess_ns, more_ops.
        """
        kinds = {
            "compute": "compute_ns",
            "copy": "copy_ns",
            "host": "idle_ns - loading_ns",
            "data_loading": "loading_ns",
        }
        parts = [
            f"SELECT step, rank, '{kind}' AS kind, layer, phase, {ns} AS ns, ops FROM layers WHERE step >= 0"
            for kind, ns in kinds.items()
        ]
        tables = [
            self._frame(
                f"WITH spent AS ({query}), usual AS (SELECT step, layer, phase, quantile_disc(ns, 0.5) AS median_ns, "
                "quantile_disc(ops, 0.5) AS median_ops FROM spent GROUP BY step, layer, phase) "
                "SELECT step, rank, kind, layer, phase, ns - median_ns AS excess_ns, ops > median_ops AS more_ops "
                "FROM spent JOIN usual USING (step, layer, phase) "
                f"WHERE ns - median_ns > greatest({least_ns}, {least_share} * median_ns)"
            )
            for query in parts
        ]
        import pandas as pd

        excesses: pd.DataFrame = pd.concat(tables, ignore_index=True)
        return excesses

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
            "WITH had AS (SELECT DISTINCT rank, step FROM steps), "
            "every AS (SELECT step, count(*) AS n FROM had GROUP BY step) "
            "SELECT rank, min(step) AS first, max(step) AS last, count(*) AS steps, "
            "count(*) FILTER (WHERE n > 1) AS shared FROM had JOIN every USING (step) GROUP BY rank ORDER BY rank"
        )

    def step_lengths(self) -> pd.DataFrame:
        """Steps: step, median_ns over ranks, ranks, and warm_up (true if it is warm-up on any rank)."""
        return self._frame(
            "SELECT step, quantile_disc(end_ns - start_ns, 0.5) AS median_ns, count(*) AS ranks, "
            "bool_or(warm_up) AS warm_up FROM steps "
            "GROUP BY step ORDER BY step"
        )

    def present(self) -> pd.DataFrame:
        """Steps in which each rank has matched collectives; of a large job, those that it recorded: step, rank."""
        if self.rows()[0] > FEW:
            return self._frame("SELECT DISTINCT step, rank FROM steps")
        return self._frame(
            "SELECT DISTINCT m.step, m.rank FROM matched AS m SEMI JOIN instances USING (c, s, k) WHERE m.step >= 0"
        )

    def without_match(self) -> pd.DataFrame:
        """Steps in which a rank recorded collectives but none is matched, while others have matches, of ranks with
        matches in other steps: rank, first, last, steps. Empty for a large job.
        """
        is_small = str(self.rows()[0] <= FEW)
        return self._frame(
            "WITH present AS (SELECT DISTINCT m.step, m.rank FROM matched AS m SEMI JOIN instances USING (c, s, k) "
            f"WHERE m.step >= 0 AND {is_small}), "
            f"had AS (SELECT DISTINCT step, rank FROM members WHERE step >= 0 AND {is_small}) "
            "SELECT rank, min(step) AS first, max(step) AS last, count(*) AS steps FROM had "
            "ANTI JOIN present USING (step, rank) WHERE step IN (SELECT step FROM present) "
            "AND rank IN (SELECT rank FROM present) GROUP BY rank ORDER BY rank"
        )

    def placed(self, ranks: Sequence[int]) -> pd.DataFrame:
        """The columns of `points` for the given ranks, plus those of the matched collective: arrival, late_rank, sort,
        bytes, step.
        """
        self._want(ranks)
        with self._only(ranks):
            return self._frame(
                "SELECT m.rank, m.index, m.step, m.a, m.e, x.ready_segment, x.end_segment, x.gates, "
                "x.start_ns - x.ready_ns AS queued_ns, x.layer, x.phase, i.arrival, i.late_rank, i.sort, i.bytes "
                "FROM matched AS m JOIN collectives AS x USING (rank, index) JOIN instances AS i USING (c, s, k) "
                "SEMI JOIN wanted_ranks ON m.rank = wanted_ranks.rank ORDER BY m.rank, m.index"
            )

    def rank_steps(self) -> pd.DataFrame:
        """Step by rank: step, rank, length_ns, compute_ns, idle_ns, and wait_ns in matched collectives."""
        clips = f"i.n = 2 OR i.sort NOT IN {_SYMMETRIC}"
        return self._frame(
            "WITH spent AS (SELECT rank, step, sum(compute_ns)::BIGINT AS compute_ns, sum(idle_ns)::BIGINT AS idle_ns "
            "FROM layers GROUP BY rank, step), waited AS (SELECT m.rank, m.step, sum(CASE WHEN "
            f"{clips} THEN least(i.arrival - m.a, greatest(m.e - m.a, 0)) ELSE i.arrival - m.a END)::BIGINT AS wait_ns "
            "FROM matched AS m JOIN instances AS i USING (c, s, k) WHERE NOT i.unlike GROUP BY m.rank, m.step) "
            "SELECT step, rank, end_ns - start_ns AS length_ns, coalesce(compute_ns, 0) AS compute_ns, "
            "coalesce(idle_ns, 0) AS idle_ns, coalesce(wait_ns, 0) AS wait_ns "
            "FROM steps LEFT JOIN spent USING (rank, step) LEFT JOIN waited USING (rank, step) ORDER BY step, rank"
        )

    def _want(self, ranks: Sequence[int]) -> None:
        import pandas as pd

        self._db.register("wanted_ranks", pd.DataFrame({"rank": np.asarray(ranks, dtype=np.int64)}))

    def _one(self, query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self._query(query, "fetchall")[0]
        return row

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
