"""How often `nvprof-kit diff` finds what is there, and how often a gate fails on identical programs: a simulation.

    python tests/bench/bench_diff.py [--trials 2000] [--layers 24] [--steps 5] [--step-noise 1]
    python tests/bench/bench_diff.py --runs FOLDER

A program of equal layers, forward and backward, is drawn: each run has a level of its own, and its steps vary about it.
The first step of each run is left out, as the verb does. Errors are on the logarithm: normal, or by another law of
`LAWS` with the same standard deviation.

With ``--runs``, on a folder with runs of a program, ``noise-N.sqlite.xz``, and of one with a slower MLP in its layer 3,
``wide-N.sqlite.xz``: pairs and halves of the same program, and subsets of five runs of each, drawn by chance.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

import nvprof_kit
from nvprof_kit._analysis.diff.effects import effects
from nvprof_kit._analysis.diff.gates import corrected

FLOOR = 0.0075
LEVEL = 0.05

Floats = npt.NDArray[np.float64]


Law = Callable[[np.random.Generator, int, int], Floats]
"""Draws the noise of steps, in standard deviations, by row and step."""


def normal(random: np.random.Generator, rows: int, steps: int) -> Floats:
    """Independent errors."""
    return random.normal(size=(rows, steps))


def heavy(random: np.random.Generator, rows: int, steps: int) -> Floats:
    """Student's t with three degrees of freedom."""
    return random.standard_t(3, size=(rows, steps)) / np.sqrt(3)


def alike(random: np.random.Generator, rows: int, steps: int) -> Floats:
    """All rows of a step are off by the same, as when the clock changes."""
    return np.repeat(random.normal(size=(1, steps)), rows, axis=0)


def autocorrelated(rho: float) -> Law:
    """Each error is `rho` times the one before, and the rest new (AR(1))."""

    def draw(random: np.random.Generator, rows: int, steps: int) -> Floats:
        errors = random.normal(size=(rows, steps))
        for step in range(1, steps):
            errors[:, step] = rho * errors[:, step - 1] + np.sqrt(1 - rho**2) * errors[:, step]
        return errors

    return draw


def drifting(random: np.random.Generator, rows: int, steps: int) -> Floats:
    """All rows become slower from the first step to the last, by six standard deviations, as while a GPU warms up."""
    return random.normal(size=(rows, steps)) + 3 * np.linspace(-1, 1, steps)


def stalling(share: float, size: float, of_runs: float = 1.0) -> Law:
    """In a part of the runs, a share of the rows takes `size` standard deviations more in one step."""

    def draw(random: np.random.Generator, rows: int, steps: int) -> Floats:
        errors = random.normal(size=(rows, steps))
        hit = random.random(rows) < share
        if random.random() < of_runs:
            errors[hit, random.integers(steps)] += size
        return errors

    return draw


LAWS: dict[str, Law] = {
    "heavy tails (t, 3 degrees)": heavy,
    "steps autocorrelated by 0.6": autocorrelated(0.6),
    "steps autocorrelated by 0.9": autocorrelated(0.9),
    "all rows of a step alike": alike,
    "one step of each run + 30 %": stalling(1.0, 30),
    "one step of each fifth run + 30 %": stalling(1.0, 30, 0.2),
    "one step of each run + 10 %": stalling(1.0, 10),
    "a tenth of the rows + 30 % in one step": stalling(0.1, 30),
    "drift of 6 % within each run": drifting,
}
"""Other laws of the noise of steps; sizes are for a standard deviation of 1 %."""


class Program(NamedTuple):
    """What is drawn: layers in two phases, steps that are compared, and the noise of steps and of runs."""

    layers: int = 24
    steps: int = 4
    step_noise: float = 0.01
    run_noise: float = FLOOR
    common: float = 0.0  # part of the variance from run to run that all layers share
    law: Law = normal


class Rates(NamedTuple):
    """Parts of the trials."""

    found: float
    wrong: float
    fails_slower: float
    fails_undecided: float


def run(random: np.random.Generator, program: Program, slow: float) -> Floats:
    """The times of one run by row and step; the first row takes ``slow`` times longer."""
    rows = 2 * program.layers
    shared = np.sqrt(program.common) * random.normal()
    own = np.sqrt(1 - program.common) * random.normal(size=(rows, 1))
    steps = program.step_noise * program.law(random, rows, program.steps)
    level = np.where(np.arange(rows) == 0, slow, 1.0)[:, None]
    return np.asarray(1e6 * level * np.exp(program.run_noise * (shared + own) + steps))


def rates(
    trials: int, program: Program, slow: float = 1.0, limit: float = 0.1, runs: Sequence[int] = (1, 1), seed: int = 0
) -> Rates:
    """How often the slow row is found, another one is called changed, and a gate on all rows fails.

    Args:
        trials: Number of comparisons drawn.
        program: What is drawn.
        slow: What the first row of NEW takes, 1.0 for identical programs.
        limit: Limit of the gate.
        runs: Number of runs of BASE and of NEW.
        seed: Of the random numbers.
    """
    random = np.random.default_rng(seed)
    equals = np.repeat(np.arange(2), program.layers)
    seen = np.zeros((trials, 4), dtype=bool)
    for trial in range(trials):
        base = [run(random, program, 1.0) for _ in range(runs[0])]
        new = [run(random, program, slow) for _ in range(runs[1])]
        found = effects(base, new, equals, FLOOR)
        told = (corrected(found.rows["p"].to_numpy()) < LEVEL) & (found.rows["change"].abs().to_numpy() >= 0.01)
        slower = bool((told & (found.rows["change"].to_numpy() >= limit)).any())
        undecided = not slower and bool((found.rows["at_most"].to_numpy() >= limit).any())
        seen[trial] = (told[0] and found.rows["change"][0] > 0, told[1:].any(), slower, undecided)
    return Rates(*(float(part) for part in seen.mean(axis=0)))


def resampled(folder: Path, draws: int = 100) -> None:
    """Print how often runs of one program are called different, and how often the wider layer is found."""
    draw = random.Random(3)
    base, wider = (
        [nvprof_kit.open(path) for path in sorted(folder.glob(pattern))]
        for pattern in ("noise-[0-9]*.sqlite.xz", "wide-*.sqlite.xz")
    )

    def changed(side: Sequence[nvprof_kit.Capture], other: Sequence[nvprof_kit.Capture]) -> pd.DataFrame:
        rows = side[0].diff(other, base=side[1:]).to_frame()
        return rows[rows["verdict"].isin(["slower", "faster"]) & (rows["level"] != "layer class")]

    pairs = [pair for runs in (base, wider) for pair in permutations(runs, 2)]
    alarms = [len(changed([first], [second])) for first, second in draw.sample(pairs, min(draws, len(pairs)))]
    print(f"pairs of one program: {sum(map(bool, alarms))} of {len(alarms)} with something changed")
    halves = [half for half in combinations(base, len(base) // 2) if base[0] in half]
    alarms = [len(changed(half, [run for run in base if run not in half])) for half in halves]
    print(f"halves of one program: {sum(map(bool, alarms))} of {len(alarms)} with something changed")
    found = []
    for _ in range(draws):
        rows = changed(draw.sample(base, 5), draw.sample(wider, 5))
        found.append(rows["layer"].astype(str).str.contains("layers.3.mlp", regex=False).any())
    print(f"five runs a side: the wider layer is found in {sum(found)} of {len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--step-noise", type=float, default=1.0, help="in %%")
    parser.add_argument("--runs", type=Path)
    options = parser.parse_args()
    if options.runs:
        resampled(options.runs)
        return
    program = Program(options.layers, options.steps - 1, options.step_noise / 100)
    one = program._replace(layers=1)
    cases = [
        ("+10 % in one layer, gate *:+5%", program, 1.1, 0.05, (1, 1)),
        ("+10 % in one layer, gate *:+5%, 3 and 2 runs", program, 1.1, 0.05, (3, 2)),
        ("identical, gate *:+10%", program, 1.0, 0.1, (1, 1)),
        ("identical, gate *:+5%, 3 and 2 runs", program, 1.0, 0.05, (3, 2)),
        ("identical, gate *:+10%, run noise of two floors", program._replace(run_noise=2 * FLOOR), 1.0, 0.1, (1, 1)),
        ("identical, gate *:+10%, run noise of four floors", program._replace(run_noise=4 * FLOOR), 1.0, 0.1, (1, 1)),
        ("identical, gate *:+10%, shared run noise", program._replace(common=1.0), 1.0, 0.1, (1, 1)),
        ("identical, gate of two rows:+5%", one, 1.0, 0.05, (1, 1)),
        ("identical, gate of two rows:+5%, 2 and 2 runs", one, 1.0, 0.05, (2, 2)),
    ]
    for name, law in LAWS.items():
        of_law = program._replace(law=law)
        cases += [
            (f"+10 %, gate *:+5%: {name}", of_law, 1.1, 0.05, (1, 1)),
            (f"+10 %, gate *:+5%, 3 and 2 runs: {name}", of_law, 1.1, 0.05, (3, 2)),
            (f"identical, gate *:+10%: {name}", of_law, 1.0, 0.1, (1, 1)),
        ]
    print(f"{'case':76s} {'found':>7s} {'wrong':>7s} {'slower':>7s} {'undecided':>9s}")
    for name, drawn, slow, limit, runs in cases:
        told = rates(options.trials, drawn, slow, limit, runs)
        print(f"{name:76s} " + " ".join(f"{100 * part:6.1f}%" for part in told))


if __name__ == "__main__":
    main()
