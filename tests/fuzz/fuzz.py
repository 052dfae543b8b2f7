"""Break the captures of ``tests/data`` in many ways and judge every verb by `tests.fuzz.cases`.

    python -m fuzz.fuzz [--cases 12000] [--seed 0] [--jobs 2] [--only KIND]

One part of the cases is systematic: each column and key of each seed is dropped, renamed, emptied and retyped. The
rest is random, and the same for the same seed. Every broken case prints the words that repeat it.
"""

import argparse
import multiprocessing
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

from fuzz import cases
from fuzz.kinds import KINDS

MOST_BYTES = 3 << 30
"""No case may take more memory than that."""


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
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="nvprof-kit-fuzz-"))


def _emptied(name: str) -> Path:
    folder = _folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@cache
def _whole(kind: str, seed: str, verb: tuple[str, ...]) -> cases.Outcome:
    """What the verb says of the seed as it is, under the name that the broken ones get."""
    return _run(kind, verb, KINDS[kind].lay(seed, _emptied("input")))


def _run(kind: str, verb: tuple[str, ...], target: Path) -> cases.Outcome:
    folder = _folder() / "input"
    return cases.run(KINDS[kind].words(verb, folder, target), folder)


def judge(case: Case) -> str:
    """What is wrong with what a verb does with a broken input, '' for nothing."""
    kind = KINDS[case.kind]
    whole = _whole(case.kind, case.seed, case.verb)
    if whole.status or whole.broken:
        return f"the seed itself: {whole.said or whole.broken}"
    target = kind.lay(case.seed, _emptied("input"))
    source = Path(shutil.copy(target, _emptied("whole")))
    if case.way == "random":
        kind.chance(source, target, random.Random(f"{case.seed} {case.number}"))
    else:
        kind.change(source, target, case.spot, case.way)
    outcome = _run(case.kind, case.verb, target)
    is_counted = kind.balanced and case.verb[0] == "layers" and not outcome.broken
    if is_counted and (lost := cases.unbalanced(outcome, target)):
        return lost
    if case.way != "random":
        return cases.judged(outcome, whole, kind.names(case.spot))
    if not outcome.broken and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES:
        return "it took more memory than any case may"
    return outcome.broken


def systematic(name: str) -> Iterator[Case]:
    """Every column and key of every seed in every way, for the verbs that answer with a table."""
    kind = KINDS[name]
    verbs = [verb for verb in kind.verbs if "csv" in verb][:4]
    for seed in kind.seeds:
        for spot in kind.spots(kind.lay(seed, _emptied("input"))):
            for way in kind.ways:
                yield from (Case(name, seed, verb, way, spot) for verb in verbs)


def randoms(kind: str, count: int, seed: int) -> list[Case]:
    """Random cases, the same for the same seed."""
    chance, seeds, verbs = random.Random(seed), KINDS[kind].seeds, KINDS[kind].verbs
    often = (*verbs, *verbs[:1] * len(verbs))  # the first as often as all: every other reads what it reads
    numbers = range(seed * 1_000_000, seed * 1_000_000 + count)
    return [Case(kind, chance.choice(seeds), chance.choice(often), number=number) for number in numbers]


def chosen(count: int, seed: int, only: str = "") -> list[Case]:
    """So many cases of all kinds: systematic ones for at most half of them, the rest random."""
    kinds = [kind for kind in KINDS if only in ("", kind)]
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
    parser.add_argument("--only", default="", choices=["", *KINDS])
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
