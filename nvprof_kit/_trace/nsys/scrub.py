"""Private data in an nsys export (beyond the program's performance), and a copy without it.

An export contains all environment variables of the program (including tokens and passwords), its command line and
folder, the host name, the names of all processes on the host, the program's output, and nsys's logs.
"""

from __future__ import annotations

import lzma
import os
import re
import shlex
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from nvprof_kit._toml import read_toml
from nvprof_kit._trace.files.database import Database
from nvprof_kit._trace.files.packed import UNREADABLE, unpack
from nvprof_kit._trace.files.sqlite import integer_list, text_columns
from nvprof_kit.errors import CaptureError, UsageError

GONE = "(scrubbed)"
_GONE_TEXT = f"'{GONE}'"
_VARIABLE = "ENVIRONMENT_VARIABLE"
_SECRET = re.compile(
    r"(?<!tik)token(?!iz)|secret|passw|credential|api_?key|private_?key|access_?key|auth(?!or)", re.IGNORECASE
)
_PATH = re.compile(r"(?<![\w/.:])/\w.*", re.DOTALL)
_CAPTURE_TABLES = ("META_DATA_CAPTURE", "CAPTURE_META_DATA")
_SPOOL = re.compile(r"/.*/nsight_systems/\S*", re.DOTALL)
_HOME = re.compile(r"(\\?/|\\{1,4})(home|Users)\1(?!\(scrubbed\))[^/\\:;,'\"\0]+")
"""Separators also as json and nested json escape them."""
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
    return sorted({match[0] for text in db.texts() for match in _HOME.finditer(text)})


def secret_names(names: list[str]) -> list[str]:
    """The names that look like secrets."""
    return [name for name in names if _SECRET.search(name)]


def commands_to_scrub(capture: str | Path) -> str:
    """What to type for a scrubbed copy of a capture: a report is exported before, a folder's report too."""
    path = str(capture)
    if ".sqlite" in Path(path).name:
        return f"nvprof-kit scrub {shlex.quote(path)}"
    report = path if path.endswith(".nsys-rep") else "REPORT.nsys-rep"
    export = f"{report.removesuffix('.nsys-rep')}.sqlite"
    return f"nsys export -t sqlite {shlex.quote(report)} && nvprof-kit scrub {shlex.quote(export)}"


def scrub(source: Path, target: Path, also: str | None = None) -> dict[str, int]:
    """Write a copy of an export without environment, command line, host name, output and other processes.

    Times, kernels, ranges and all other data used by verbs are unchanged. Private data is removed in a nameless file,
    which is gone with the process; only what is left is written beside the target, which is replaced at the end.

    Args:
        source: An ``.sqlite`` export, or one compressed as ``.xz``; never written to.
        target: The copy; compressed if its name ends in ``.xz``.
        also: A regular expression; each text with a match is replaced completely.

    Returns:
        The number of removed values by kind.

    Raises:
        CaptureError: The source is not a complete SQLite file, or has changes in a log beside it.
        UsageError: The copy cannot be written, or the regular expression is invalid.
    """
    try:
        pattern = None if also is None else re.compile(also)
    except re.error as error:
        raise UsageError(f"--also {also!r} is not a regular expression: {error}") from None
    try:
        with closing(sqlite3.connect("")) as db:  # SQLite unlinks the file of such a database when it opens it
            _load(db, source)
            with db:
                removed = _take_out(db, pattern, source)
            with tempfile.TemporaryDirectory(prefix=".nvprof-kit-", dir=target.parent) as folder:
                clean = Path(folder) / "clean"
                db.execute("VACUUM INTO ?", (str(clean),))
                if target.suffix == ".xz":
                    with clean.open("rb") as file, lzma.open(Path(folder) / "packed", "wb") as archive:
                        shutil.copyfileobj(file, archive, 1 << 20)
                    clean = Path(folder) / "packed"
                clean.chmod(source.stat().st_mode & 0o666)
                clean.replace(target)
    except sqlite3.Error as error:
        raise CaptureError(f"{source}: not a whole SQLite export ({error}); export the .nsys-rep again") from None
    except UNREADABLE as error:
        raise UsageError(f"{source}: cannot be copied to {target}: {error}") from None
    return removed


def _load(db: sqlite3.Connection, source: Path) -> None:
    for end in ("-wal", "-journal"):
        journal = source.with_name(source.name + end)
        if journal.exists() and journal.stat().st_size:
            raise CaptureError.of("unmerged-journal", source=source, journal=journal.name, name=source.name)
    with tempfile.TemporaryDirectory(prefix="nvprof-kit-") as folder:
        plain = Path(folder) / "plain" if source.suffix == ".xz" else source
        if plain != source:
            unpack(source, plain)
        uri = f"file:{quote(os.fsencode(plain.resolve()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as original:
            original.backup(db)


def _take_out(db: sqlite3.Connection, pattern: re.Pattern[str] | None, source: Path) -> dict[str, int]:
    columns = {
        table: {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')}
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    }
    for table in _NAMED:
        if missing := {"name", "value"} - columns.get(table, {"name", "value"}):
            raise CaptureError.of("unknown-columns", source=source, table=table, column=min(missing))
    removed: Counter[str] = Counter()

    def rewrite(name: str, change: Callable[[str], str]) -> None:
        db.create_function(name, 1, lambda text: change(text) if isinstance(text, str) else text, deterministic=True)

    rewrite("homeless", _without_homes(db, [table for table in _NAMED if table in columns]))
    rewrite("pathless", lambda text: _PATH.sub(GONE, text))
    rewrite("spoolless", lambda text: _SPOOL.sub(GONE, text))
    rewrite("nameonly", lambda text: GONE if re.match(r"\w+=[^\0]*\0", text) else text.partition("\0")[0])
    for statement in read_toml("nvprof_kit._trace.nsys", "scrub.toml")["statement"]:
        for table in statement["tables"]:
            if statement["column"] in columns.get(table, ()):
                sql = statement["sql"].format(table=table, gone=_GONE_TEXT)
                removed[statement["kind"]] += db.execute(sql).rowcount
    removed["names of other processes"] += _other_processes(db, columns)
    for table, column in text_columns(db.execute, columns):
        sql = f'UPDATE "{table}" SET "{column}" = homeless("{column}") WHERE "{column}" <> homeless("{column}")'
        removed["names of home folders"] += db.execute(sql).rowcount
    if pattern is not None:
        db.create_function("matches", 1, lambda text: isinstance(text, str) and pattern.search(text) is not None)
        for table, names in columns.items():
            for name in sorted(names):
                sql = f'UPDATE "{table}" SET "{name}" = {_GONE_TEXT} WHERE matches("{name}")'
                removed["texts that --also matches"] += db.execute(sql).rowcount
    return dict(removed)


def _without_homes(db: sqlite3.Connection, tables: list[str]) -> Callable[[str], str]:
    """What takes the owners' names out of home folders in a text: of usual ones, and of those that variables in these
    tables name.
    """
    texts = [
        str(value)
        for table in tables
        for (value,) in db.execute(f"SELECT value FROM {table} WHERE value LIKE '%HOME=%' OR value LIKE '%PROFILE=%'")
    ]
    homes = {match.rstrip("/\\") for text in texts for match in _HOME_VARIABLE.findall(text)}
    outer_homes = sorted(path for path in homes if len(re.split(r"[/\\]", path)) > 2 and not _HOME.search(path))
    patterns = [re.compile(rf"{re.escape(home)}(?![\w.-])") for home in outer_homes]
    nameless = [re.sub(r"[^/\\]+$", GONE, home).replace("\\", r"\\") for home in outer_homes]

    def homeless(text: str) -> str:
        for home, replacement in zip(patterns, nameless, strict=True):
            text = home.sub(replacement, text)
        return _HOME.sub(lambda match: f"{match[1]}{match[2]}{match[1]}{GONE}", text)

    return homeless


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
    used: set[int] = set()
    for table, names in columns.items():
        for name in names if table != "StringIds" else ():
            if name.endswith(("Id", "Name")) or name in ("symbol", "module"):
                where = f'"{name}" IN ({integer_list(named)})'
                used.update(row[0] for row in db.execute(f'SELECT DISTINCT "{name}" FROM "{table}" WHERE {where}'))
    db.execute(f"UPDATE StringIds SET value = {_GONE_TEXT} WHERE id IN ({integer_list(named - used)})")
    return removed
