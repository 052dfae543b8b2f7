"""Inputs of several files, one of which is broken: maps of ranks, files of counts and of rules beside their captures,
and packed captures.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import mutate
from nvprof_kit import open_job

DATA = Path(__file__).parents[1] / "data"

Spot = tuple[str, str]
_FOLDER, _FILE, _CAPTURE = "{folder}", "{file}", "{capture}"


@dataclass(frozen=True)
class Kind:
    """A kind of input that is a folder.

    Attributes:
        seeds: What its folders are made from.
        verbs: Words of the verbs; ``{folder}``, ``{file}`` and ``{capture}`` stand for paths.
        lay: Puts the files of a seed into a folder and returns the one that is to be broken.
        spots: The columns or keys of that file.
        ways: The ways of `mutate.COLUMN_WAYS` in which these are changed.
        change: Changes one of them: source, target, spot, way.
        chance: Changes the file at random.
    """

    seeds: tuple[str, ...]
    verbs: tuple[tuple[str, ...], ...]
    lay: Callable[[str, Path], Path]
    chance: Callable[[Path, Path, random.Random], None]
    spots: Callable[[Path], list[Spot]] = lambda _: []
    change: Callable[[Path, Path, Spot, str], None] = lambda *_: None
    ways: tuple[str, ...] = mutate.COLUMN_WAYS

    def words(self, verb: tuple[str, ...], folder: Path, file: Path) -> list[str]:
        """The command line of a verb."""
        capture = next((path for path in sorted(folder.iterdir()) if path.suffix == ".sqlite"), file)
        paths = {_FOLDER: folder, _FILE: file, _CAPTURE: capture}
        return [str(paths.get(word, word)) for word in verb]


def _unpacked(name: str, target: Path) -> Path:
    target.write_bytes(lzma.decompress((DATA / f"{name}.xz").read_bytes()))
    return target


# ---------------------------------------------------------------- maps of ranks


@cache
def _maps(job: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="nvprof-kit-fuzz-maps-"))
    for rank in (0, 1):
        _unpacked(f"ranks/{job}.rank{rank}-2024.2.sqlite", made / f"run.rank{rank}.sqlite")
    open_job(sorted(made.iterdir()), maps=made / "maps", workers=1).answer(1)
    return made / "maps"


def _lay_maps(seed: str, folder: Path) -> Path:
    job, _, table = seed.partition(":")
    shutil.copytree(_maps(job), folder, dirs_exist_ok=True)
    return sorted((folder / table).iterdir())[1]


def _parquet_spots(path: Path) -> list[Spot]:
    import pyarrow.parquet as pq

    return [(path.parent.name, name) for name in pq.read_schema(path).names]


def _change_parquet(source: Path, target: Path, spot: Spot, way: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    place, column = table.schema.get_field_index(spot[1]), table.column(spot[1])
    if way == "drop":
        table = table.remove_column(place)
    elif way == "rename":
        table = table.rename_columns([f"{name}_of_2031" if name == spot[1] else name for name in table.schema.names])
    else:
        text = not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type))
        odd = pa.nulls(len(column), column.type) if way == "null" else pa.array([7 if text else "7"] * len(column))
        table = table.set_column(place, spot[1], odd)
    pq.write_table(table, target)
    _sum_up(target)


def _sum_up(file: Path) -> None:
    """Make the checksum right, as another writer would: it cannot say that this package checked the columns."""
    sums = file.parents[1] / "sums" / f"{file.name}.json"
    told = json.loads(sums.read_bytes())
    sums.write_text(json.dumps(told | {file.parent.name: zlib.crc32(file.read_bytes()), "checked": 0}))


def _random_parquet(source: Path, target: Path, chance: random.Random) -> None:
    import pyarrow.parquet as pq

    if chance.random() < 0.2:
        mutate.random_bytes(source, target, chance)
        return
    rows = pq.read_table(source).to_pandas(strings_to_categorical=False)
    rows = rows.astype({name: object for name in rows.columns if str(rows[name].dtype) == "category"})
    for _ in range(chance.randint(1, 4)):
        if not len(rows):
            break
        name, place = chance.choice(list(rows.columns)), chance.randrange(len(rows))
        way = chance.random()
        if way < 0.7:
            odd = chance.choice(_odd_cells(str(rows[name].dtype)))
            rows.loc[rows.index[place : place + chance.choice((1, 3, 50))], name] = odd
        elif way < 0.85:
            rows = rows.drop(index=rows.index[place])
        else:
            rows = rows.loc[[*rows.index, rows.index[place]]].reset_index(drop=True)
    rows.to_parquet(target, index=False)
    _sum_up(target)


def _odd_cells(dtype: str) -> list[Any]:
    if dtype == "int64":
        return [-1, -2, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]
    return [True, False] if dtype == "bool" else ["", "abc", "\x1b[31m", "=1+1", "a" * 3000, "(none)"]


# ---------------------------------------------------------------- values in JSON


def _values(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _holders(whole: Any, path: str) -> list[dict[str, Any]]:
    """The dicts at a path of keys; a list on the way stands for all its items."""
    found = [whole]
    for key in [*path.split("."), ""] if path else [""]:
        found = [item for one in found for item in (one if isinstance(one, list) else [one])]
        found = [one[key] for one in found if isinstance(one, dict) and key in one] if key else found
    return [one for one in found if isinstance(one, dict)]


def _keys(whole: Any, path: str = "") -> Iterator[Spot]:
    names = {key for holder in _holders(whole, path) for key in holder}
    for name in sorted(names):
        yield path, name
        inner = f"{path}.{name}" if path else name
        if name and "." not in name and len(names) < 40 and _holders(whole, inner):
            yield from _keys(whole, inner)


def _value_spots(path: Path) -> list[Spot]:
    return [spot for spot in _keys(_values(path)) if spot != ("ranges", "inside")]  # its null is a range at the top


def _change_values(source: Path, target: Path, spot: Spot, way: str) -> None:
    whole = _values(source)
    for holder in _holders(whole, spot[0]):
        if spot[1] not in holder:
            continue
        value = holder.pop(spot[1])
        if way == "rename":
            holder[f"{spot[1]}_of_2031"] = value
        elif way != "drop":
            holder[spot[1]] = None if way == "null" else 7 if isinstance(value, str) else "seven"
    mutate.as_json(whole, target)


def _random_values(source: Path, target: Path, chance: random.Random) -> None:
    way = chance.random()
    if way < 0.15:
        mutate.random_bytes(source, target, chance)
    elif way < 0.3:
        mutate.random_text(source, target, chance)
    else:
        mutate.as_json(mutate.random_nodes(_values(source), chance), target)


# ---------------------------------------------------------------- files beside a capture


def _lay_counts(seed: str, folder: Path) -> Path:
    _unpacked(f"flops/{seed}.sqlite", folder / "run.sqlite")
    return Path(shutil.copyfile(DATA / "flops" / f"{seed}.flops.json", folder / "run.flops.json"))


_OWN_RULES = """\
title = "a trainer of one's own"
domain = "train"
include = ["torch-nvtx"]
otherwise = "layer"

[[rule]]
match = "step-(?P<step>[0-9]+)"

[[rule]]
match = "block(?P<number>[0-9]+)(?P<part>/[a-z]+)?"
layer = "layers.{number}{part}"
phase = "forward"
"""


def _lay_rules(seed: str, folder: Path) -> Path:
    _unpacked(f"foreign/{seed}-2024.2.sqlite", folder / "run.sqlite")
    presets = DATA.parents[1] / "nvprof_kit" / "_analysis" / "foreign" / "presets"
    made = folder / "rules.toml"
    made.write_text(_OWN_RULES if seed == "plain-nvtx" else (presets / f"{seed}.toml").read_text())
    return made


def _rule_spots(path: Path) -> list[Spot]:
    lines = enumerate(path.read_text().splitlines())
    return [(str(place), found[1]) for place, line in lines if (found := re.match(r"(\w+) = .*[^\[]$", line))]


def _change_rule(source: Path, target: Path, spot: Spot, way: str) -> None:
    lines = source.read_text().splitlines()
    place = int(spot[0])
    key, _, value = lines[place].partition(" = ")
    lines[place] = f"{key}_of_2031 = {value}" if way == "rename" else f"{key} = 7"
    target.write_text("\n".join(lines) + "\n")


def _random_text(source: Path, target: Path, chance: random.Random) -> None:
    (mutate.random_text if chance.random() < 0.8 else mutate.random_bytes)(source, target, chance)


# ---------------------------------------------------------------- packed captures


def _lay_packed(seed: str, folder: Path) -> Path:
    name, _, packing = seed.rpartition(".")
    whole = folder / f"run{Path(name).suffix}.{packing}"
    data = (DATA / f"{name}.xz").read_bytes()
    whole.write_bytes(data if packing == "xz" else gzip.compress(lzma.decompress(data), compresslevel=1))
    return whole


def _random_packed(source: Path, target: Path, chance: random.Random) -> None:
    data = source.read_bytes()
    way = chance.random()
    if way < 0.6:
        mutate.random_bytes(source, target, chance)
    elif way < 0.8:  # what follows the end: another member, zeros, or something else
        target.write_bytes(data + chance.choice((data, bytes(512), b"\n", b"not packed", data[:300])))
    else:
        target.write_bytes(chance.choice((gzip.compress(data, 1), lzma.compress(data, preset=0), data[:20], b"")))


def _csv(*words: str) -> tuple[str, ...]:
    return (*words, "--format", "csv")


_RANKS = tuple(
    _csv("ranks", _FOLDER, "--workers", "1", "--view", view) for view in ("waits", "charges", "layers", "groups")
)

KINDS = {
    "maps": Kind(
        tuple(f"ddp-layer:{table}" for table in ("ranks", "collectives", "segments", "layers", "steps")),
        (*_RANKS, ("ranks", _FOLDER)),
        _lay_maps,
        _random_parquet,
        _parquet_spots,
        _change_parquet,
    ),
    "counts": Kind(
        ("llama12-2024.2", "checkpoint-2024.2"),
        (_csv("flops", _CAPTURE), ("flops", _CAPTURE, "--counts", _FILE), ("advise", _CAPTURE)),
        _lay_counts,
        _random_values,
        _value_spots,
        _change_values,
    ),
    "rules": Kind(
        ("plain-nvtx", "torch-nvtx", "emit-nvtx"),
        (_csv("layers", _CAPTURE, "--rules", _FILE), _csv("summary", _CAPTURE, "--rules", _FILE, "--view", "model")),
        _lay_rules,
        _random_text,
        _rule_spots,
        _change_rule,
        ("rename", "retype"),
    ),
    "packed": Kind(
        ("eager-2024.2.sqlite.xz", "profiler/video.json.xz", "profiler/video.json.gz"),
        (_csv("layers", _FILE), ("advise", _FILE)),
        _lay_packed,
        _random_packed,
    ),
}
