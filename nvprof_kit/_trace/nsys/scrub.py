"""Private data in an nsys export (beyond the program's performance), and a copy without it.

An export contains all environment variables of the program (including tokens and passwords), its command line and
folder, the host name, the names of all processes on the host, the program's output, and nsys's logs.
"""

from __future__ import annotations

import fcntl
import lzma
import os
import re
import shutil
import signal
import sqlite3
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from nvprof_kit._trace.files.database import Database
from nvprof_kit._trace.files.packed import UNREADABLE, unpack
from nvprof_kit._trace.files.sqlite import integer_list, text_columns
from nvprof_kit.errors import CaptureError, UsageError

GONE = "(scrubbed)"
_PREFIX, _SUFFIX = ".nvprof-kit-", ".partial"
_YOUNG_S = 60
"""A partial copy changed this recently may belong to a scrub that has not locked it yet."""
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)

_VARIABLE = "ENVIRONMENT_VARIABLE"
_VARIABLES = f"name LIKE '%{_VARIABLE}%'"
_OWNER = (
    "name LIKE '%:ARGUMENT\\_%' ESCAPE '\\' OR name LIKE '%:COMMAND' OR name LIKE '%:WORKING_DIR' "
    "OR name LIKE '%:USER_NAME' OR name IN ('DEVICE_DISPLAY_NAME', 'DEVICE_ID')"
)
_EXPORT = "name LIKE '%PATH%' OR name LIKE '%\\_FILE' ESCAPE '\\' OR name IN ('EXPORT_HOST', 'EXPORT_USER')"
_MACHINE = "name IN ('DeviceEnvironment', 'Hostname', 'NicInfo')"
_SECRET = re.compile(
    r"(?<!tik)token(?!iz)|secret|passw|credential|api_?key|private_?key|access_?key|auth(?!or)", re.IGNORECASE
)
_PATH = re.compile(r"(?<![\w/.:])/\w.*", re.DOTALL)
_CAPTURE_TABLES = ("META_DATA_CAPTURE", "CAPTURE_META_DATA")
_SPOOL = re.compile(r"/.*/nsight_systems/\S*", re.DOTALL)
_SPOOL_COLUMNS = (
    ("StringIds", "value"),
    ("TARGET_INFO_SYSTEM_ENV", "value"),
    ("DIAGNOSTIC_EVENT", "text"),
    ("ANALYSIS_FILE", "filename"),
)
_HOME = re.compile(r"(\\?/|\\{1,4})(home|Users)\1(?!\(scrubbed\))[^/\\:;,'\"\0]+")
"""Separators also as json and nested json escape them."""
_HOMES = [f"%{path}%" for name in ("home", "Users") for path in (f"/{name}/", f"/{name}\\/", f"\\{name}\\")]
_HOME_LIKE = " OR ".join(f"[{{0}}] LIKE '{like}'" for like in _HOMES)
_HOME_VARIABLE = re.compile(r"(?:^|[;\0\n])(?:HOME|USERPROFILE)=\"?([^;\0\n\"]+)")
_NAMED = ("TARGET_INFO_SYSTEM_ENV", "META_DATA_EXPORT", "EXPORT_META_DATA", *_CAPTURE_TABLES)
"""Tables in which the private values are found by their names."""


def environment_names(db: Database) -> list[str]:
    """Names of the environment variables in an export, never their values."""
    names: set[str] = set()
    for table in _CAPTURE_TABLES:
        if db.has(table, "name", "value"):
            entries = db.rows(table, ("name", "value"))
            names.update(str(value).partition("=")[0] for name, value in entries if _VARIABLE in str(name).upper())
    if db.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        for name, text in db.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")):
            if name == "DeviceEnvironment":
                names.update(entry.partition("=")[0] for entry in re.split("[;\0\n]", str(text or "")) if "=" in entry)
    if db.has("StringIds", "value"):
        for (text,) in db.rows("StringIds", ("value",)):
            if "\0" in str(text):
                names.update(entry.partition("=")[0] for entry in str(text).split("\0") if "=" in entry)
    return sorted(name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name))


def home_folders(db: Database) -> list[str]:
    """The home folders in an export's strings and metadata, sorted."""
    return sorted({match[0] for text in db.texts_like(*_HOMES) for match in _HOME.finditer(text)})


def secret_names(names: list[str]) -> list[str]:
    """The names that look like secrets."""
    return [name for name in names if _SECRET.search(name)]


@dataclass(frozen=True)
class ScrubOptions:
    """What to remove in addition to the defaults.

    Attributes:
        also: A regular expression; each text with a match is replaced completely.
    """

    also: str | None = None


def scrub(source: Path, target: Path, options: ScrubOptions = ScrubOptions()) -> dict[str, int]:
    """Write a copy of an export without environment, command line, host name, output and other processes.

    Times, kernels, ranges and all other data used by verbs are unchanged. Removed data is also erased from the file's
    free pages. The copy gets its final name only when complete.

    Args:
        source: An ``.sqlite`` export, or one compressed as ``.xz``; never written to.
        target: The copy; compressed if its name ends in ``.xz``.
        options: What else to remove.

    Returns:
        The number of removed values by kind.

    Raises:
        CaptureError: The source is not a complete SQLite file.
        UsageError: The copy cannot be written, or the regular expression is invalid.
    """
    try:
        pattern = None if options.also is None else re.compile(options.also)
    except re.error as error:
        raise UsageError(f"--also {options.also!r} is not a regular expression: {error}") from None
    _refuse_journal(source)
    try:
        with _partial(source, target) as partial:
            _unpack(source, partial)
            with closing(sqlite3.connect(partial)) as db:
                db.execute("PRAGMA journal_mode = MEMORY")  # no journal file that a kill could leave behind
                with db:
                    removed = _take_out(db, pattern, source)
                db.execute("VACUUM")
            if target.suffix == ".xz":
                with _partial(source, target) as packed:
                    _pack(partial, packed)
                    packed.replace(target)
            else:
                partial.replace(target)
    except sqlite3.Error as error:
        raise CaptureError(f"{source}: not a whole SQLite export ({error}); export the .nsys-rep again") from None
    except UNREADABLE as error:
        raise UsageError(f"{source}: cannot be copied to {target}: {error}") from None
    return removed


def _refuse_journal(source: Path) -> None:
    """Reject a file with pending changes in a log next to it: a copy of the file alone would lack them.

    Raises:
        CaptureError: There is a non-empty write-ahead log or journal.
    """
    for end in ("-wal", "-journal"):
        journal = source.with_name(source.name + end)
        if journal.exists() and journal.stat().st_size:
            raise CaptureError(
                f"{source}: {journal.name} beside it holds changes that are not in it yet; let the program that writes "
                f"it end, or merge them: sqlite3 {source.name} 'PRAGMA wal_checkpoint(TRUNCATE)'"
            )


@contextmanager
def _partial(source: Path, target: Path) -> Iterator[Path]:
    """A private temporary file next to the target, with an unpredictable name and at most the source's mode. It is
    removed afterwards, also on a signal, unless it became the target.
    """
    _remove_left(target.parent)
    number, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=target.parent)  # O_EXCL, mode 0600
    partial = Path(name)
    with suppress(OSError):  # the file system may lack locks
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    before = (
        {signal_number: signal.getsignal(signal_number) for signal_number in _ENDINGS}
        if current_thread() is main_thread()
        else {}
    )

    def end(number: int, _: object) -> None:
        partial.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    try:
        for signal_number in before:
            signal.signal(signal_number, end)
        os.fchmod(number, stat.S_IMODE(source.stat().st_mode) & 0o666)
        yield partial
    finally:
        os.close(number)
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
        partial.unlink(missing_ok=True)


def _remove_left(folder: Path) -> None:
    """Remove partial copies of killed scrubs, which still contain private data. A running scrub holds a lock on its
    copy.
    """
    for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if left.is_symlink() or not left.is_file() or time.time() - left.stat().st_mtime < _YOUNG_S:
                continue
            with left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _unpack(source: Path, target: Path) -> None:
    if source.suffix == ".xz":
        unpack(source, target)
        return
    with source.open("rb") as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def _pack(source: Path, target: Path) -> None:
    with source.open("rb") as file, lzma.open(target, "wb") as archive:
        shutil.copyfileobj(file, archive, 1 << 20)


def _take_out(db: sqlite3.Connection, pattern: re.Pattern[str] | None, source: Path) -> dict[str, int]:
    columns = {
        table: {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')}
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    }
    _refuse_unknown(source, columns)
    homes = _outer_homes(db, columns)
    removed: Counter[str] = Counter()
    for table in _CAPTURE_TABLES:
        if {"name", "value"} <= columns.get(table, set()):
            removed["environment variables"] += db.execute(f"DELETE FROM {table} WHERE {_VARIABLES}").rowcount
            removed["command line and folder"] += db.execute(
                f"UPDATE {table} SET value = '{GONE}' WHERE {_OWNER}"
            ).rowcount
    if {"name", "value"} <= columns.get("TARGET_INFO_SYSTEM_ENV", set()):
        removed["facts of the machine"] += db.execute(
            f"UPDATE TARGET_INFO_SYSTEM_ENV SET value = '{GONE}' WHERE {_MACHINE}"
        ).rowcount
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        if {"name", "value"} <= columns.get(table, set()):
            removed["facts of the export"] += db.execute(
                f"UPDATE {table} SET value = '{GONE}' WHERE {_EXPORT}"
            ).rowcount
    removed["paths in messages of nsys"] += _truncate_messages(db, columns.get("DIAGNOSTIC_EVENT", set()))
    removed["logs of nsys"] += _logs(db, columns.get("ANALYSIS_FILE", set()))
    if "ProcessStreams" in columns:
        removed["printed output"] += db.execute(
            f"UPDATE StringIds SET value = '{GONE}' WHERE id IN "
            "(SELECT contentId FROM ProcessStreams UNION SELECT filenameId FROM ProcessStreams)"
        ).rowcount
    removed["names of other processes"] += _other_processes(db, columns)
    removed["names with an environment behind them"] += _overlong_names(db)
    removed["paths of nsys's own files"] += _spools(db, columns)
    removed["names of home folders"] += _homes(db, columns, homes)
    if pattern is not None:
        removed["texts that --also matches"] += _matching(db, columns, pattern)
    return dict(removed)


def _spools(db: sqlite3.Connection, columns: dict[str, set[str]]) -> int:
    """Remove the paths of nsys's temporary files, next to the report in a user's folder."""
    count = 0
    db.create_function(
        "spoolless", 1, lambda text: _SPOOL.sub(GONE, text) if isinstance(text, str) else text, deterministic=True
    )
    for table, column in _SPOOL_COLUMNS:
        if column in columns.get(table, set()):
            count += db.execute(
                f"UPDATE {table} SET {column} = spoolless({column}) WHERE {column} LIKE '%/nsight_systems/%'"
            ).rowcount
    return count


def _refuse_unknown(source: Path, columns: dict[str, set[str]]) -> None:
    """Reject an export in which private values cannot be found by name.

    Raises:
        CaptureError: A table with such values has other columns than in all known releases.
    """
    for table in _NAMED:
        if missing := {"name", "value"} - columns.get(table, {"name", "value"}):
            raise CaptureError(
                f"{source}: the table {table} has no column {min(missing)}, so private data in it would stay; export "
                "the report with a release of nsys that nvprof-kit knows (2021 to 2026)"
            )


def _outer_homes(db: sqlite3.Connection, columns: dict[str, set[str]]) -> list[str]:
    """The home folders of the program's environment, if they are not in /home or /Users."""
    texts = [
        str(value)
        for table in _NAMED
        if table in columns
        for (value,) in db.execute(f"SELECT value FROM {table} WHERE value LIKE '%HOME=%' OR value LIKE '%PROFILE=%'")
    ]
    homes = {match.rstrip("/\\") for text in texts for match in _HOME_VARIABLE.findall(text)}
    return sorted(path for path in homes if len(re.split(r"[/\\]", path)) > 2 and not _HOME.search(path))


def _homes(db: sqlite3.Connection, columns: dict[str, set[str]], outer: Collection[str]) -> int:
    """Remove the names of home folders from all paths in the export."""
    count = 0
    named = []
    for home in outer:
        nameless = re.sub(r"[^/\\]+$", GONE, home).replace("\\", r"\\")
        named.append((re.compile(rf"{re.escape(home)}(?![\w.-])"), nameless))

    def homeless(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        for pattern, nameless in named:
            text = pattern.sub(nameless, text)
        return _HOME.sub(lambda match: f"{match[1]}{match[2]}{match[1]}{GONE}", text)

    db.create_function("homeless", 1, homeless, deterministic=True)
    for table, column in text_columns(lambda sql: db.execute(sql).fetchall(), columns):
        where = f"{_HOME_LIKE.format(column)}{''.join(f' OR instr([{column}], ?)' for _ in outer)}"
        count += db.execute(f'UPDATE "{table}" SET "{column}" = homeless("{column}") WHERE {where}', [*outer]).rowcount
    return count


def _truncate_messages(db: sqlite3.Connection, columns: set[str]) -> int:
    """Truncate nsys's messages at a path, such as the folder of the captured output."""
    if "text" not in columns:
        return 0
    texts = [text for (text,) in db.execute("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE typeof(text) = 'text'")]
    cut = [(_PATH.sub(GONE, text), text) for text in texts if _PATH.search(text)]
    return sum(db.execute("UPDATE DIAGNOSTIC_EVENT SET text = ? WHERE text = ?", path).rowcount for path in cut)


def _logs(db: sqlite3.Connection, columns: set[str]) -> int:
    """Remove files that nsys added to the report (2024.2 and newer), which include the environment."""
    count = 0
    if "content" in columns:
        count += db.execute(f"UPDATE ANALYSIS_FILE SET content = '{GONE}'").rowcount
    if "contentId" in columns:
        count += db.execute(
            f"UPDATE StringIds SET value = '{GONE}' WHERE id IN (SELECT contentId FROM ANALYSIS_FILE)"
        ).rowcount
    return count


def _other_processes(db: sqlite3.Connection, columns: dict[str, set[str]]) -> int:
    """Remove the processes without events in the capture."""
    if not {"globalPid", "name"} <= columns.get("PROCESSES", set()):
        return 0
    events = [table for table, names in columns.items() if "globalTid" in names and table not in ("ThreadNames",)]
    # a globalTid is the globalPid with the thread id in its low 24 bits
    taking_part = " UNION ".join(f'SELECT globalTid & ~16777215 FROM "{table}"' for table in events)
    if not taking_part:
        return 0
    named: set[int] = set()
    if {"nameId", "globalTid"} <= columns.get("ThreadNames", set()):
        strangers = f"globalTid & ~16777215 NOT IN ({taking_part})"
        named = {row[0] for row in db.execute(f"SELECT nameId FROM ThreadNames WHERE {strangers}")}
        db.execute(f"DELETE FROM ThreadNames WHERE {strangers}")
    removed = db.execute(f"DELETE FROM PROCESSES WHERE globalPid NOT IN ({taking_part})").rowcount
    _forget(db, columns, named)
    return removed


def _forget(db: sqlite3.Connection, columns: dict[str, set[str]], strings: Collection[int]) -> None:
    """Remove the given strings if nothing refers to them."""
    id_list = integer_list(strings)
    used: set[int] = set()
    for table, names in columns.items():
        for name in names if table != "StringIds" else ():
            if name.endswith(("Id", "Name")) or name in ("symbol", "module"):
                referenced = db.execute(f'SELECT DISTINCT "{name}" FROM "{table}" WHERE "{name}" IN ({id_list})')
                used.update(row[0] for row in referenced)
    db.execute(f"UPDATE StringIds SET value = '{GONE}' WHERE id IN ({integer_list(set(strings) - used)})")


def _overlong_names(db: sqlite3.Connection) -> int:
    """Truncate process names: nsys reads past their end, into the environment of the process."""
    texts = db.execute("SELECT id, value FROM StringIds WHERE typeof(value) = 'text'").fetchall()
    names = [(key, text.partition("\0")[0]) for key, text in texts if "\0" in text]
    cut = [(GONE if re.match(r"\w+=", name) else name, key) for key, name in names]
    db.executemany("UPDATE StringIds SET value = ? WHERE id = ?", cut)
    return len(cut)


def _matching(db: sqlite3.Connection, columns: dict[str, set[str]], pattern: re.Pattern[str]) -> int:
    """Replace all texts with a match of the pattern, in all tables."""
    db.create_function("found", 1, lambda text: isinstance(text, str) and pattern.search(text) is not None)
    count = 0
    for table, names in columns.items():
        for name in sorted(names):
            count += db.execute(f'UPDATE "{table}" SET "{name}" = \'{GONE}\' WHERE found("{name}")').rowcount
    return count
