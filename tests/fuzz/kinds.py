"""The kinds of inputs that are broken: their seeds, the verbs that read them, and the ways to break them."""

import gzip
import json
import lzma
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.data import DATA, unpacked

from fuzz import mutate

Spot = tuple[str, str]
_FILE, _CAPTURE = "{file}", "{capture}"
Chance = Callable[[Path, Path, random.Random], None]
"""Changes a file at random: source, target, chance."""


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        seeds: What its inputs are made from.
        verbs: Words of the verbs; ``{file}`` and ``{capture}`` stand for paths.
        lay: Puts the files of a seed into a folder and returns the one that is to be broken.
        chance: Changes that file at random.
        spots: The columns or keys of that file.
        change: Changes one of them: source, target, spot, way.
        names: The names by which an answer may tell of it.
        ways: The ways of `mutate.COLUMN_WAYS` in which these are changed.
        balanced: Whether every nanosecond must be in the rows of ``layers``.
    """

    seeds: tuple[str, ...]
    verbs: tuple[tuple[str, ...], ...]
    lay: Callable[[str, Path], Path]
    chance: Chance
    spots: Callable[[Path], list[Spot]] = lambda _: []
    change: Callable[[Path, Path, Spot, str], object] = lambda *_: None
    names: Callable[[Spot], tuple[str, ...]] = lambda spot: (spot[1], spot[0].rpartition(".")[2])
    ways: tuple[str, ...] = mutate.COLUMN_WAYS
    balanced: bool = False

    def words(self, verb: tuple[str, ...], folder: Path, file: Path) -> list[str]:
        """The command line of a verb."""
        capture = next((path for path in sorted(folder.iterdir()) if path.suffix == ".sqlite"), file)
        paths = {_FILE: file, _CAPTURE: capture}
        return [str(paths.get(word, word)) for word in verb]


def _mostly(usual: Chance, share: float = 0.8) -> Chance:
    """Changes bytes in the other cases."""

    def change(source: Path, target: Path, chance: random.Random) -> None:
        (usual if chance.random() < share else mutate.random_bytes)(source, target, chance)

    return change


_EVENTS = 2500
"""Events that a trace is cut to, for speed."""

_TIMERS = "".join(
    f"[RANK {rank}] {stage}, start=17161826{call}{rank}.28219{rank}, end=17161826{call}{rank}.98300{call}, "
    f"cpu_dur=0.7{call}0809s, cuda_dur={'nan' if stage == 'data' else f'{700 + call}.512'}ms\n"
    for rank in range(3)
    for call in range(5)
    for stage in ("data", "forward", "backward_allreduce")
)


@cache
def _first_events(seed: str) -> str:
    whole = json.loads(lzma.decompress((DATA / f"{seed}.json.xz").read_bytes()))
    timed = sorted((event for event in whole["traceEvents"] if "ts" in event), key=lambda event: float(event["ts"]))
    return json.dumps(whole | {"traceEvents": timed[:_EVENTS]})


def _lay_trace(seed: str, folder: Path) -> Path:
    (folder / "run.json").write_text(_first_events(seed))
    return folder / "run.json"


def _lay_timers(_: str, folder: Path) -> Path:
    (folder / "timer_rank0.log").write_text(_TIMERS)
    return folder / "timer_rank0.log"


def _holders(whole: Any, path: str) -> list[dict[str, Any]]:
    """The dicts at a path of keys; a list on the way stands for all its items."""
    values = [whole]
    for key in [*path.split("."), ""] if path else [""]:
        while any(isinstance(value, list) for value in values):
            values = [item for value in values for item in (value if isinstance(value, list) else [value])]
        values = [value[key] for value in values if isinstance(value, dict) and key in value] if key else values
    return [value for value in values if isinstance(value, dict)]


def _keys(whole: Any, path: str = "") -> Iterator[Spot]:
    names = {key for holder in _holders(whole, path) for key in holder}
    for name in sorted(names):
        yield path, name
        inner = f"{path}.{name}" if path else name
        if name and "." not in name and len(names) < 40 and _holders(whole, inner):
            yield from _keys(whole, inner)


_NEWER_KEYS = {"user_metadata", "frames", "nvprof_kit_stretches", "external_annotations", "is_expandable"} | {
    "segment_pool_id", "requested_size", "time_us"
}  # fmt: skip
"""Keys of a snapshot that some versions of PyTorch do not write."""


def _loaded(path: Path) -> Any:
    return (pickle if path.suffix == ".pickle" else json).loads(path.read_bytes())


def _written(whole: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(whole, protocol=4) if path.suffix == ".pickle" else json.dumps(whole).encode())


def _random_nodes(source: Path, target: Path, chance: random.Random) -> None:
    _written(mutate.random_nodes(_loaded(source), chance), target)


def _change_values(source: Path, target: Path, spot: Spot, way: str) -> None:
    whole = _loaded(source)
    holders = {id(holder): holder for holder in _holders(whole, spot[0])}  # a pickle shares frames
    for holder in holders.values():
        mutate.change_value(holder, spot[1], way)
    _written(whole, target)


def _random_values(source: Path, target: Path, chance: random.Random) -> None:
    way = chance.random()
    if way < 0.15:
        mutate.random_bytes(source, target, chance)
    elif way < 0.3:
        mutate.random_text(source, target, chance)
    else:
        _random_nodes(source, target, chance)


def _lay_counts(seed: str, folder: Path) -> Path:
    unpacked(f"flops/{seed}.sqlite.xz", folder / "run.sqlite")
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
    unpacked(f"foreign/{seed}-2024.2.sqlite.xz", folder / "run.sqlite")
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


def _table(*words: str) -> tuple[str, ...]:
    return (*words, _FILE, "--format", "csv")


_READING = (
    _table("layers", "--steps", "all"),
    _table("breakdown", "--view", "idle"),
    _table("summary", "--view", "operator"),
    ("advise", _FILE),
)
KINDS = {
    "nsys": Kind(
        ("graph-2023.4", "eager-2024.2", "ddp-first.rank0-2024.2", "memory/caching-2024.2", "graph-whole-2024.2"),
        (
            *_READING,
            _table("breakdown", "--view", "steps"),
            _table("summary", "--view", "kernel"),
            *((verb, _FILE) for verb in ("doctor", "breakdown", "export")),
        ),
        lambda seed, folder: unpacked(f"{seed}.sqlite.xz", folder / "run.sqlite"),
        _mostly(mutate.random_cells),
        mutate.columns,
        lambda source, target, spot, way: mutate.change_column(source, target, *spot, way),
        lambda spot: (spot[1],),
        balanced=True,
    ),
    "kineto": Kind(
        ("kineto/ddp.rank0", "profiler/video", "foreign/kineto-modules"),
        (*_READING, ("summary", _FILE)),
        _lay_trace,
        _mostly(_random_nodes, 0.9),
        lambda path: mutate.keys(_loaded(path)["traceEvents"]),
        lambda source, target, spot, way: _written(mutate.change_key(_loaded(source), *spot, way), target),
        lambda spot: (spot[1].rpartition(".")[2],),
        balanced=True,
    ),
    "snapshot": Kind(
        ("snapshots/step-2.11", "snapshots/run-2.11", "snapshots/oom_oom-2.11"),
        (_table("memory"), _table("memory", "--by", "stack"), ("memory", _FILE)),
        lambda seed, folder: unpacked(f"{seed}.pickle.xz", folder / "run.pickle"),
        _mostly(_random_nodes, 0.9),
        lambda path: [spot for spot in _keys(_loaded(path)) if spot[1] not in _NEWER_KEYS],
        _change_values,
    ),
    "ncu": Kind(
        ("ncu/own-2025.3", "ncu/range-2025.3", "ncu/communication-2025.3", "ncu/roofline-details-2025.3"),
        (_table("ncu", "layers"), ("ncu", "layers", _FILE)),
        lambda seed, folder: unpacked(f"{seed}.csv.xz", folder / "run.csv"),
        _mostly(mutate.random_text),
        mutate.csv_columns,
        lambda source, target, spot, way: mutate.change_csv_column(source, target, int(spot[0]), way),
        lambda spot: (spot[1].partition(":PL_")[0],),
    ),
    "timers": Kind(("timers",), (_table("timers"), ("timers", _FILE)), _lay_timers, _mostly(mutate.random_text)),
    "counts": Kind(
        ("llama12-2024.2", "checkpoint-2024.2"),
        (("flops", _CAPTURE, "--format", "csv"), ("flops", _CAPTURE, "--counts", _FILE), ("advise", _CAPTURE)),
        _lay_counts,
        _random_values,
        lambda path: [spot for spot in _keys(_loaded(path)) if spot != ("ranges", "inside")],  # None is the top
        _change_values,
    ),
    "rules": Kind(
        ("plain-nvtx", "torch-nvtx", "emit-nvtx"),
        (_table("layers", _CAPTURE, "--rules"), _table("summary", _CAPTURE, "--view", "model", "--rules")),
        _lay_rules,
        _mostly(mutate.random_text),
        _rule_spots,
        _change_rule,
        ways=("rename", "retype"),
    ),
    "packed": Kind(
        ("eager-2024.2.sqlite.xz", "profiler/video.json.xz", "profiler/video.json.gz"),
        (_table("layers"), ("advise", _FILE)),
        _lay_packed,
        _random_packed,
    ),
}
