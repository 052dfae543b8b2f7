"""Break the captures of ``tests/data`` in many ways and judge every verb by `tests.fuzz.cases`.

    python -m fuzz.fuzz [--cases 12000] [--seed 0] [--jobs 2] [--only KIND]

One part of the cases is systematic: each column and key of each seed is dropped, renamed, emptied and retyped. The
rest is random, and the same for the same seed. Every broken case prints the words that repeat it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import cases, folders, mutate

DATA = Path(__file__).parents[1] / "data"
MOST_BYTES = 3 << 30
"""No case may take more memory than that."""

_TIMERS = "".join(
    f"[RANK {rank}] {stage}, start=17161826{call}{rank}.28219{rank}, end=17161826{call}{rank}.98300{call}, "
    f"cpu_dur=0.7{call}0809s, cuda_dur={'nan' if stage == 'data' else f'{700 + call}.512'}ms\n"
    for rank in range(3)
    for call in range(5)
    for stage in ("data", "forward", "backward_allreduce")
)

SEEDS = {
    "nsys": ("graph-2023.4", "eager-2024.2", "ddp-first.rank0-2024.2", "memory/caching-2024.2", "graph-whole-2024.2"),
    "kineto": ("kineto/ddp.rank0", "profiler/video", "foreign/kineto-modules"),
    "snapshot": ("snapshots/step-2.11", "snapshots/run-2.11", "snapshots/oom_oom-2.11"),
    "ncu": ("ncu/own-2025.3", "ncu/range-2025.3", "ncu/communication-2025.3", "ncu/roofline-details-2025.3"),
    "timers": ("timers",),
    **{kind: one.seeds for kind, one in folders.KINDS.items()},
}
_EVENTS = 2500
"""Events that a trace is cut to, for speed."""
_SUFFIX = {"nsys": ".sqlite", "kineto": ".json", "snapshot": ".pickle", "ncu": ".csv", "timers": ".log"}
_BALANCED = ("nsys", "kineto")
"""Kinds of which every nanosecond must be in the rows of ``layers``."""
_VERBS = {
    "nsys": (
        ("layers", "--steps", "all", "--format", "csv"),
        ("breakdown", "--format", "csv", "--view", "idle"),
        ("breakdown", "--format", "csv", "--view", "steps"),
        ("summary", "--format", "csv", "--view", "operator"),
        ("summary", "--format", "csv", "--view", "kernel"),
        ("doctor",),
        ("advise",),
        ("breakdown",),
        ("export",),
    ),
    "kineto": (
        ("layers", "--steps", "all", "--format", "csv"),
        ("breakdown", "--format", "csv", "--view", "idle"),
        ("summary", "--format", "csv", "--view", "operator"),
        ("summary",),
        ("advise",),
    ),
    "snapshot": (("memory", "--format", "csv"), ("memory", "--format", "csv", "--by", "stack"), ("memory",)),
    "ncu": (("ncu", "layers", "--format", "csv"), ("ncu", "layers")),
    "timers": (("timers", "--format", "csv"), ("timers",)),
    **{kind: one.verbs for kind, one in folders.KINDS.items()},
}


@dataclass(frozen=True)
class Case:
    """One broken input and the verb that reads it: its format, the file it is made from, the words before the file's
    name, what is done to it (a way of `mutate.COLUMN_WAYS`, or ``random``) and to which column or key.
    """

    kind: str
    seed: str
    verb: tuple[str, ...]
    way: str = "random"
    spot: tuple[str, str] = ("", "")
    number: int = 0


@cache
def _plain(kind: str, seed: str) -> Path:
    """The seed as a file of its own, unpacked, in a folder of this process."""
    target = _folder() / f"{seed.replace('/', '-')}{_SUFFIX[kind]}"
    if kind == "timers":
        target.write_text(_TIMERS)
    else:
        target.write_bytes(lzma.decompress((DATA / f"{seed}{_SUFFIX[kind]}.xz").read_bytes()))
    return target


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="nvprof-kit-fuzz-"))


@cache
def _data(kind: str, seed: str) -> Any:
    raw = _plain(kind, seed).read_bytes()
    if kind == "kineto":
        whole = json.loads(raw)
        timed = sorted((event for event in whole["traceEvents"] if "ts" in event), key=lambda event: float(event["ts"]))
        return whole | {"traceEvents": timed[:_EVENTS]}
    return pickle.loads(raw)


@cache
def _whole(kind: str, seed: str, verb: tuple[str, ...]) -> cases.Outcome:
    """What the verb says of the seed as it is, under the name that the broken ones get."""
    if kind in folders.KINDS:
        return _run(kind, verb, folders.KINDS[kind].lay(seed, _emptied("input")))
    target = _input(kind)
    if kind == "kineto":
        mutate.as_json(_data(kind, seed), target)
    else:
        target.write_bytes(_plain(kind, seed).read_bytes())
    return _run(kind, verb, target)


def _run(kind: str, verb: tuple[str, ...], target: Path) -> cases.Outcome:
    folder = _folder() / "input"
    words = folders.KINDS[kind].words(verb, folder, target) if kind in folders.KINDS else [*verb, str(target)]
    return cases.run(words, folder)


def _emptied(name: str) -> Path:
    folder = _folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _input(kind: str) -> Path:
    return _emptied("input") / f"{'timer_rank0' if kind == 'timers' else 'run'}{_SUFFIX[kind]}"


def judge(case: Case) -> str:
    """What is wrong with what a verb does with a broken input, '' for nothing."""
    whole = _whole(case.kind, case.seed, case.verb)
    if whole.status or whole.broken:
        return f"the seed itself: {whole.said or whole.broken}"
    target, names = _broken(case)
    outcome = _run(case.kind, case.verb, target)
    if (
        case.kind in _BALANCED
        and case.verb[0] == "layers"
        and not outcome.broken
        and (lost := cases.unbalanced(outcome, target))
    ):
        return lost
    if case.way != "random":
        return cases.judged(outcome, whole, names)
    if not outcome.broken and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES:
        return "it took more memory than any case may"
    return outcome.broken


def _broken(case: Case) -> tuple[Path, tuple[str, ...]]:
    """Write the broken input; returns it, and the names by which an answer may tell of it."""
    if case.kind not in folders.KINDS:
        target = _input(case.kind)
        return target, _break(case, target)
    kind = folders.KINDS[case.kind]
    target = kind.lay(case.seed, _emptied("input"))
    source = Path(shutil.copy(target, _emptied("whole")))
    if case.way == "random":
        kind.chance(source, target, random.Random(f"{case.seed} {case.number}"))
    else:
        kind.change(source, target, case.spot, case.way)
    return target, (case.spot[1], *case.spot[0].split(".")[-1:])


def _break(case: Case, target: Path) -> tuple[str, ...]:
    """Write the broken input of a single file; returns the names by which an answer may tell of it."""
    source, (holder, name) = _plain(case.kind, case.seed), case.spot
    chance = random.Random(f"{case.seed} {case.number}")
    systematic = case.way != "random"
    if case.kind == "nsys":
        if systematic:
            mutate.change_column(source, target, holder, name, case.way)
        else:
            (mutate.random_cells if chance.random() < 0.8 else mutate.random_bytes)(source, target, chance)
    elif case.kind == "ncu" and systematic:
        return (mutate.change_csv_column(source, target, int(name), case.way).partition(":PL_")[0],)
    elif case.kind in ("ncu", "timers"):
        (mutate.random_text if chance.random() < 0.8 else mutate.random_bytes)(source, target, chance)
    elif not systematic and chance.random() < 0.1:
        mutate.random_bytes(source, target, chance)
    else:
        data = _data(case.kind, case.seed)
        write = mutate.as_json if case.kind == "kineto" else mutate.as_pickle
        changed = mutate.change_key(data, holder, name, case.way) if systematic else mutate.random_nodes(data, chance)
        write(changed, target)
    return (name.rpartition(".")[2], holder)[:1]


def systematic(kind: str) -> Iterator[Case]:
    """Every column and key of every seed in every way, for the verbs that answer with a table."""
    verbs = [verb for verb in _VERBS[kind] if "csv" in verb][: 4 if kind == "nsys" else 3]
    for seed in SEEDS[kind]:
        for spot in _spots(kind, seed):
            for way in folders.KINDS[kind].ways if kind in folders.KINDS else mutate.COLUMN_WAYS:
                for verb in verbs:
                    yield Case(kind, seed, verb, way, spot)


def _spots(kind: str, seed: str) -> list[tuple[str, str]]:
    if kind in folders.KINDS:
        one = folders.KINDS[kind]
        return one.spots(one.lay(seed, _emptied("input")))
    if kind == "nsys":
        return mutate.columns(_plain(kind, seed))
    if kind == "kineto":
        return mutate.keys(_data(kind, seed)["traceEvents"])
    if kind == "ncu":
        return [("", str(number)) for number in range(min(mutate.csv_columns(_plain(kind, seed)), 14))]
    return []


def randoms(kind: str, count: int, seed: int) -> list[Case]:
    """Random cases, the same for the same seed."""
    chance = random.Random(seed)
    return [
        Case(kind, chance.choice(SEEDS[kind]), _verb(_VERBS[kind], chance), number=seed * 1_000_000 + number)
        for number in range(count)
    ]


def _verb(verbs: tuple[tuple[str, ...], ...], chance: random.Random) -> tuple[str, ...]:
    """One of the verbs, the first as often as all others: every other reads what it reads."""
    return verbs[0] if chance.random() < 0.5 else chance.choice(verbs)


def chosen(count: int, seed: int, only: str = "") -> list[Case]:
    """So many cases of all kinds: systematic ones for at most half of them, the rest random."""
    kinds = [kind for kind in SEEDS if only in ("", kind)]
    ordered = [case for kind in kinds for case in systematic(kind)]
    some = random.Random(seed).sample(ordered, min(count // 2, len(ordered)))
    share = -(-(count - len(some)) // len(kinds))
    found = (some + [case for kind in kinds for case in randoms(kind, share, seed)])[:count]
    random.Random(seed).shuffle(found)
    return found


def _judge(case: Case) -> tuple[Case, str]:
    try:
        return case, judge(case)
    except Exception:
        return case, f"the fuzzer itself: {traceback.format_exc()[-800:]}"


def main() -> int:
    """Run the cases and print what did not hold, and how many there were of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", choices=["", *SEEDS])
    asked = parser.parse_args()
    began = time.monotonic()
    tried: Counter[tuple[str, str]] = Counter()
    broken: Counter[str] = Counter()
    todo = chosen(asked.cases, asked.seed, asked.only)
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for case, wrong in pool.imap_unordered(_judge, todo, chunksize=8):
            tried[case.kind, "random" if case.way == "random" else "systematic"] += 1
            if wrong:
                broken[case.kind] += 1
                print(f"{case}\n    {wrong}", flush=True)
            if tried.total() % 500 == 0:
                print(f"{tried.total()} cases, {broken.total()} broken", dict(tried), file=sys.stderr, flush=True)
    for (kind, how), count in sorted(tried.items()):
        print(f"{kind:9} {how:10} {count:6}")
    print(f"{sum(tried.values())} cases, {sum(broken.values())} broken, {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
