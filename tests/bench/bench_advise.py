"""How well `nvprof-kit advise` tells known faults: precision and recall by rule.

    python tests/bench/bench_advise.py [--programs 120] [--verbose]
    python tests/bench/bench_advise.py --faults FOLDER

On committed captures of which the faults are known (`tests/support/brute_force/advise_truth.py`), and on programs made
up by chance with faults planted in them (`tests/support/captures/advise_programs.py`).

With ``--faults``, on the captures of a folder named ``BASE+FAULT.sqlite.xz``, beside a ``steps.txt`` with lines such as
``STEP BASE+FAULT 12.3 ms``, the time of a step without a profiler. A fault is found if a rule that knows it has a
finding at its place; its saving is compared with what the step takes longer than that of its base. That is noise if
either step took longer without the profiler than with it: other programs disturbed the host. Every second fault has a
star: the rules were made with the others.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.brute_force.advise_truth import Judged, by_rule, made_up, real

import nvprof_kit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--faults", type=Path)
    options = parser.parse_args()
    if options.faults:
        planted(options.faults)
        return
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


def planted(folder: Path) -> None:
    """Print each planted fault with its finding, its half, and what programs without one get: see docs/advise.md."""
    lines = [line.split() for line in (folder / "steps.txt").read_text().splitlines()]
    steps = {name: float(ms) for _, name, ms, _ in lines}
    advice = {name: nvprof_kit.open(folder / f"{name}.sqlite.xz").advise() for name in sorted(steps)}
    disturbed = {name for name, result in advice.items() if steps[name] > result.wall_ns / 1e6}
    print("| program | finding | its rank | saves, ms a step | measured | ratio |\n|---|---|---:|---:|---:|---:|")
    halves: dict[str, Counter[str]] = {"": Counter(), " *": Counter()}
    for number, name in enumerate(name for name in advice if "+" in name):
        base, _, fault = name.partition("+")
        star = " *" if number % 2 else ""
        rules, place = PLANTED[fault]
        halves[star]["faults"] += 1
        ranked = [
            (rank, finding)
            for rank, finding in enumerate(advice[name].findings, 1)
            if finding.rule in rules and re.search(place, f"{finding.layer} {finding.phase}")
        ]
        if not ranked:
            print(f"| {base}, {fault}{star} | not found | | | | |")
            continue
        rank, finding = ranked[0]
        halves[star]["found"] += 1
        measured, ratio = steps[name] - steps[base], None
        if measured > 0 and not disturbed & {name, base}:
            ratio = finding.saves_ns / 1e6 / measured
            halves[star]["measured"] += 1
            halves[star]["within 0.7 to 1.3"] += 0.7 <= ratio <= 1.3
        figures = f"{measured:.2f} | {ratio:.2f}" if ratio else "noise | "
        print(f"| {base}, {fault}{star} | `{finding.rule}` | {rank} | {finding.saves_ns / 1e6:.2f} | {figures} |")
    for star, counts in halves.items():
        print(f"half{star}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    for name, result in advice.items():
        if "+" not in name:
            said = [f"{one.rule} {one.saves_ns / 1e6:.2f} {one.confidence}" for one in result.findings]
            print(f"{name}: step {steps[name]:.2f} ms; {', '.join(said)}")


PLANTED = {
    "pageable-input": ({"copies"}, "data|other"),
    "python-in-layer": ({"slow-host-layer"}, r"layers\.2\.mlp"),
    "grad-norms": ({"sync"}, r"\(none\)"),
    "item-in-layers": ({"sync"}, r"layers\.\d+\.mlp"),
    "logits-to-host": ({"sync", "copies"}, r"\(none\)"),
    "copies-in-layer": ({"outlier-layer"}, r"layers\.4"),
    "load-batch": ({"dataloader"}, "data"),
    "tokenize": ({"dataloader"}, "data"),
    "eager-attention": ({"unfused-attention"}, "self_attn"),
    "fp32-layer": ({"fp32-gemms", "outlier-layer"}, r"layers\.3\.mlp"),
    "optimizer-loop": ({"optimizer-loop"}, "optimizer"),
    "empty-cache": ({"allocation"}, ""),
    "small-kernels": ({"slow-host-layer"}, r"layers\.5\.mlp"),
    "all-logits": ({"logits"}, r"\(none\)|lm_head"),
    "offload": ({"copies"}, r"layers\.\d+\.mlp"),
}
"""The rules that know a planted fault, and a pattern of its layer and phase."""


if __name__ == "__main__":
    main()
