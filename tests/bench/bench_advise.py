"""How well `nvprof-kit advise` tells known faults: precision and recall by rule.

    python tests/bench/bench_advise.py [--programs 120] [--verbose]

On committed captures of which the faults are known (`tests/support/brute_force/advise_truth.py`), and on programs made
up by chance with faults planted in them (`tests/support/captures/advise_programs.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.brute_force.advise_truth import Judged, by_rule, made_up, real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    shown("committed captures", list(real()), options.verbose)
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(options.first, options.first + options.programs)
        shown("made-up programs", list(made_up(Path(folder), seeds)), options.verbose)


def shown(title: str, judged: list[Judged], verbose: bool) -> None:
    rules = by_rule(judged)
    print(f"{title}: {len(judged)}")
    print(f"{'rule':22}{'right':>7}{'missed':>8}{'wrong':>7}{'precision':>11}{'recall':>8}")
    rules["all"] = tuple(sum(column) for column in zip(*rules.values(), strict=True))  # type: ignore[assignment]
    for rule, (right, missed, wrong) in rules.items():
        precision, recall = (f"{right / of:.2f}" if of else "" for of in (right + wrong, right + missed))
        print(f"{rule:22}{right:7}{missed:8}{wrong:7}{precision:>11}{recall:>8}")
    for one in judged if verbose else ():
        if one.missed or one.wrong:
            print(f"  {one.name}: missed {sorted(one.missed)}, wrong {sorted(one.wrong)}")


if __name__ == "__main__":
    main()
