"""Ways to break an input: single columns and keys one after the other, and bytes, cells and lines at random."""

import pickle
import random
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

COLUMN_WAYS = ("drop", "rename", "null", "retype")
_ODD_NUMBERS = (None, -1, 0, 2**63, -(2**63), 1.5, "abc", "")
_ODD = (*_ODD_NUMBERS, 1, 2**31, 2**53 + 1, 2**63 - 1, -0.5, 1e300, "=1+1", "\x1b[31m", b"\xff\x00")
_ODD_JSON = (*_ODD_NUMBERS, 2**70, 1e308, "12.5", [], {}, [[]], True, "\x1b]0;x\x07", "\ud800")


def columns(path: Path) -> list[tuple[str, str]]:
    """Every column of every table with rows, but for the tables that only list names of codes."""
    with closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [
            (table, row[1])
            for table in tables
            if not table.startswith(("ENUM_", "sqlite_")) and db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()
            for row in db.execute(f'PRAGMA table_info("{table}")')
        ]


def change_column(source: Path, target: Path, table: str, column: str, way: str) -> None:
    """A copy of a file in which one column is dropped, renamed, empty, or of another type."""
    shutil.copyfile(source, target)
    with closing(sqlite3.connect(target)) as db, db:
        retyped = "CASE typeof({0}) WHEN 'text' THEN 7 WHEN 'null' THEN NULL ELSE {0} || '' END AS {0}"
        changes = {"rename": f'{{0}} AS "{column}_of_2031"', "null": "NULL AS {0}", "retype": retyped}
        names = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
        kept = [name for name in names if name != column or way != "drop"]
        items = [changes[way].format(f'"{name}"') if name == column else f'"{name}"' for name in kept]
        db.execute(f'CREATE TABLE changed AS SELECT {", ".join(items) or "NULL AS nothing"} FROM "{table}"')
        db.execute(f'DROP TABLE "{table}"')
        db.execute(f'ALTER TABLE changed RENAME TO "{table}"')


def random_cells(source: Path, target: Path, chance: random.Random) -> None:
    """A copy with some cells of the tables changed to odd values, rows doubled or gone."""
    shutil.copyfile(source, target)
    there = columns(target)
    with closing(sqlite3.connect(target)) as db, db:
        for _ in range(chance.randint(1, 4)):
            table, column = chance.choice(there)
            limit, offset = chance.choice((1, 3, 50)), chance.randint(0, 60)
            rowids = f'SELECT rowid FROM "{table}" ORDER BY rowid LIMIT {limit} OFFSET {offset}'
            what = chance.random()
            try:
                if what < 0.7:
                    db.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid IN ({rowids})', (chance.choice(_ODD),))
                elif what < 0.8:
                    db.execute(f'DELETE FROM "{table}" WHERE rowid IN ({rowids})')
                elif what < 0.9:
                    db.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE rowid IN ({rowids})')
                else:
                    db.execute(f'UPDATE "{table}" SET "{column}" = "{column}" * ?', (chance.choice((-1, 10**6, 0.5)),))
            except (sqlite3.Error, OverflowError):  # 2**63 is no value of SQLite
                continue


def random_bytes(source: Path, target: Path, chance: random.Random) -> None:
    """A copy with bytes changed, a stretch of zeros, or its end cut off."""
    data = bytearray(source.read_bytes())
    way = chance.random()
    if way < 0.2:
        del data[chance.randrange(len(data)) :]
    elif way < 0.4:
        start = chance.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    else:
        for _ in range(chance.choice((1, 5, 50))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    target.write_bytes(bytes(data))


def keys(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every key that complete events of a category have, those of the arguments as ``args.…``."""
    found: set[tuple[str, str]] = set()
    for event in events:
        if event.get("ph") == "X":
            found |= {(event["cat"], key) for key in event}
            found |= {(event["cat"], f"args.{key}") for key in event.get("args", {})}
    return sorted(found)


def change_key(whole: dict[str, Any], category: str, key: str, way: str) -> dict[str, Any]:
    """A copy of a trace in which one key of a category's events is dropped, renamed, null, or of another type."""
    head, _, tail = key.rpartition(".")

    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("cat") != category or event.get("ph") != "X":
            return event
        return event | {"args": changed(event.get("args", {}), tail)} if head else changed(event, tail)

    def changed(holder: dict[str, Any], name: str) -> dict[str, Any]:
        holder = dict(holder)
        change_value(holder, name, way)
        return holder

    return whole | {"traceEvents": [change(event) for event in whole["traceEvents"]]}


def change_value(holder: dict[str, Any], name: str, way: str) -> None:
    """Drop, rename, empty or retype one value of a dict, if it has it."""
    if name not in holder:
        return
    value = holder.pop(name)
    if way == "rename":
        holder[f"{name}_of_2031"] = value
    elif way == "null":
        holder[name] = None
    elif way == "retype":
        holder[name] = 7 if isinstance(value, str) else [7] if isinstance(value, dict) else "seven"


def random_nodes(whole: Any, chance: random.Random) -> Any:
    """The same data with some of its values, at any depth, changed, gone, or put one for another."""
    whole = pickle.loads(pickle.dumps(whole))
    for _ in range(chance.randint(1, 5)):
        holder, key = _random_place(whole, chance)
        if holder is None:
            return chance.choice(_ODD_JSON)
        way = chance.random()
        if way < 0.25:
            del holder[key]
        elif way < 0.85:
            holder[key] = chance.choice(_ODD_JSON)
        else:
            other, place = _random_place(whole, chance)
            if other is not None:
                holder[key] = pickle.loads(pickle.dumps(other[place]))
    return whole


def _random_place(whole: Any, chance: random.Random) -> tuple[Any, Any]:
    holder, key = None, None
    at = whole
    while isinstance(at, (dict, list)) and at and (holder is None or chance.random() < 0.85):
        holder, key = at, chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
        at = holder[key]
    return holder, key


def random_text(source: Path, target: Path, chance: random.Random) -> None:
    """A copy of a text with numbers, marks and lines changed."""
    lines = source.read_text(encoding="utf-8").splitlines()
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(lines))
        numbers = list(re.finditer(r"\d+(\.\d+)?", lines[place]))
        way = chance.random()
        if way < 0.5 and numbers:
            spot = chance.choice(numbers)
            odd = chance.choice(("-1", "nan", "inf", "1e999", "9" * 12, "9" * 40, "", "1.5.5", "٣", "abc"))
            lines[place] = lines[place][: spot.start()] + odd + lines[place][spot.end() :]
        elif way < 0.6:
            lines.insert(place, lines[place])
        elif way < 0.7 and len(lines) > 1:
            del lines[place]
        elif lines[place]:
            spot_at = chance.randrange(len(lines[place]))
            odd = chance.choice((",", '"', "\x1b[2J", "\x00", "\x9b1m", "=", "\udcff", "\r", "  ", "a" * 3000))
            lines[place] = lines[place][:spot_at] + odd + lines[place][spot_at + 1 :]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


def csv_columns(source: Path) -> list[tuple[str, str]]:
    """Number and name of the first 14 columns of a page of ncu."""
    line = next(line for line in source.read_text().splitlines() if line.startswith('"ID"'))
    return [(str(number), name) for number, name in enumerate(line.strip('"').split('","')[:14])]


def change_csv_column(source: Path, target: Path, column: int, way: str) -> None:
    """A copy of a page of ncu with one of its columns changed."""
    lines = source.read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith('"ID"'))
    for place in range(first, len(lines)):
        cells = lines[place].strip('"').split('","')
        if len(cells) <= column:
            continue
        if way == "drop":
            del cells[column]
        elif way == "rename":
            cells[column] = f"{cells[column]} of 2031" if place == first else cells[column]
        elif place > first:
            cells[column] = "" if way == "null" else "seven"
        lines[place] = '"' + '","'.join(cells) + '"'
    target.write_text("\n".join(lines) + "\n")
