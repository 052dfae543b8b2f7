"""How long comparing the ranks of a large job takes, what mapping costs, and whether planted faults are found.

    python tests/bench/bench_ranks.py [--ranks 1000 10000] [--ranks-per-file 100 1] [--copies 100 400] [--jobs 200]
        [--keep FOLDER]

First some captures, repeated along the time axis to some 200,000 and a million operations, are mapped, beside their
table of layers. The jobs are synthetic (`support.captures.synthetic_job`): 10 steps of 500 collectives for each rank, a
layer of one rank planted slow, clocks up to 10 s apart that drift by up to 50 ppm; with 100 ranks a file, and with one,
as `ranks map` writes them. Each comparison is a process of its own; its peak memory is told. Then random small jobs,
each with one fault or none: what is judged wrongly is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.bench_reading import amplify, of_repository, used
from support.captures.synthetic_job import MS, Fault, SyntheticJob, misjudged, odd_job, random_job, write_maps

DATA = Path(__file__).parents[1] / "data"
MAPPED = ("hooks-ddp-2024.2", "fsdp.rank0-2024.2", "tensor.rank0-2024.2")
COMPARE = """
import resource, sys, time
began = time.time()
from nvprof_kit import open_job
job = open_job(sys.argv[1])
clocks, verdict = job.clocks(), job.verdict
peak = resource.getrusage(resource.RUSAGE_SELF)
cpu = peak.ru_utime + peak.ru_stime
print(f"{time.time() - began:.1f} s, {cpu:.1f} s of processor, {peak.ru_maxrss / 1024:,.0f} MB: {verdict.sentence}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first random job")
    parser.add_argument("--odd-jobs", type=int, default=0, help="jobs of odd worlds, with more collectives lost")
    parser.add_argument("--ranks-per-file", type=int, nargs="*", default=[100, 1])
    parser.add_argument("--copies", type=int, nargs="*", default=[100, 400], help="how often a capture is repeated")
    parser.add_argument("--keep", type=Path, help="where the maps of large jobs are kept and found again")
    options = parser.parse_args()
    for copies in options.copies:
        for name in MAPPED:
            mapping(name, copies)
    for per_file in options.ranks_per_file:
        took = []
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                took.append(compare(ranks, per_file, (options.keep or Path(folder)) / f"{ranks}-{per_file}"))
        if len(took) > 1:
            print(f"growth, {per_file} a file: {took[-1] / took[0]:.1f} times", flush=True)
    random_jobs(options.jobs, options.seed)
    random_jobs(options.odd_jobs, options.seed, odd_job)


def mapping(capture: str, copies: int) -> None:
    """The map of a capture beside its table of layers, each in a process of its own, medians of three."""
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "run.rank0.sqlite"
        rows = amplify(DATA / f"{capture}.sqlite.xz", large, copies)
        verb = [sys.executable, "-m", "nvprof_kit"]
        layers = [used([*verb, "layers", str(large), "--format", "csv"], of_repository()) for _ in range(3)]
        targets = [str(Path(folder) / f"maps{turn}") for turn in range(3)]
        maps = [used([*verb, "ranks", "map", str(large), "-o", target], of_repository()) for target in targets]
    for place, what in enumerate(("elapsed", "of processor")):  # what else the machine does changes the first more
        one, other = (sorted(run[place] for run in runs)[1] for runs in (layers, maps))
        print(
            f"{capture} x {copies}, {sum(rows.values()):,} rows, {what}: "
            f"layers {one:.2f} s, map {other:.2f} s, {other / one:.2f} times",
            flush=True,
        )


def compare(ranks: int, ranks_per_file: int, folder: Path) -> float:
    """Print how a job is compared; returns the seconds that it takes."""
    if not (folder / "ranks").is_dir():
        fault = Fault("slow_layer", ranks // 3, 5)
        job = SyntheticJob(ranks // 8, 8, 10, 500, 24, fault, seed=1, work_ns=0.2 * MS)
        write_maps(job, folder, ranks_per_file, os.cpu_count() or 1)
    said = subprocess.check_output([sys.executable, "-c", COMPARE, str(folder)], env=of_repository(), text=True).strip()
    print(f"{ranks:,} ranks x 10 steps x 500 collectives, {ranks_per_file} a file: {said}", flush=True)
    return float(said.split()[0])


def random_jobs(count: int, first: int, make: Callable[[int], SyntheticJob] = random_job) -> None:
    from nvprof_kit import open_job

    wrong = 0
    for seed in range(first, first + count):
        job = make(seed)
        with tempfile.TemporaryDirectory() as folder:
            write_maps(job, Path(folder), job.ranks)
            said = misjudged(job, open_job(folder).verdict)
        wrong += bool(said)
        print(said, end="\n" if said else "", flush=True)
    if count:
        print(f"{count} random jobs ({make.__name__}), {wrong} judged wrongly")


if __name__ == "__main__":
    main()
