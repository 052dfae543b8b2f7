"""Inputs of several files, one of which is broken: files of counts and of rules beside their captures, and packed
captures.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import mutate

DATA = Path(__file__).parents[1] / "data"
Spot = tuple[str, str]
_FOLDER, _FILE, _CAPTURE = "{folder}", "{file}", "{capture}"


@dataclass(frozen=True)
class Kind:
    """A kind of input that is a folder: what its folders are made from, the words of the verbs, in which ``{folder}``,
    ``{file}`` and ``{capture}`` stand for paths, and how the file that is to be broken is laid and changed.
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


# ---------------------------------------------------------------- values in JSON


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
    return [
        spot for spot in _keys(json.loads(path.read_bytes())) if spot != ("ranges", "inside")
    ]  # its null is a range at the top


def _change_values(source: Path, target: Path, spot: Spot, way: str) -> None:
    whole = json.loads(source.read_bytes())
    for holder in _holders(whole, spot[0]):
        mutate.change_value(holder, spot[1], way)
    mutate.as_json(whole, target)


def _random_values(source: Path, target: Path, chance: random.Random) -> None:
    way = chance.random()
    if way < 0.15:
        mutate.random_bytes(source, target, chance)
    elif way < 0.3:
        mutate.random_text(source, target, chance)
    else:
        mutate.as_json(mutate.random_nodes(json.loads(source.read_bytes()), chance), target)


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


KINDS = {
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
