"""How well `nvprof-kit advise` tells known faults: precision and recall by rule.

    python tests/bench/bench_advise.py [--programs 120] [--verbose]
    python tests/gpu/programs/faults.py --out FOLDER
    python tests/bench/bench_advise.py --faults FOLDER [FOLDER ...] [--docs]

On committed captures of which the faults are known (`tests/support/brute_force/advise_truth.py`), and on programs made
up by chance with faults planted in them (`tests/support/captures/advise_programs.py`).

With ``--faults``, on the captures ``BASE+FAULT.sqlite.xz`` of folders that `faults.py` left, beside a ``meta.jsonl``.
A fault is found if a rule that knows it has a finding at its place. What the rule says of equal layers without the
fault is subtracted; of several findings, the one that then saves most is judged. A saving is known to 1.57 of its
spread over the root of the pairs. Where that, or by how much ``near_ms`` is another time, is more than 30 % of it, it
cannot be told whether an estimate is within 0.7 to 1.3; nor where a step took a fifth less in the capture. A fault
whose removal saved nothing is left out. ``--docs`` writes docs/advise.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.brute_force.advise_truth import Judged, by_rule, made_up, real
from support.data import DATA, ROOT

import nvprof_kit
from nvprof_kit._findings import Finding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--faults", type=Path, nargs="+")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if options.faults:
        table = "\n".join(planted(options.faults))
        print(table)
        if options.docs:
            before, _, rest = PAGE.read_text().partition(BEGIN)
            _, _, after = rest.partition(END)
            PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
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


def place_of(finding: Finding) -> tuple[str, str]:
    """Equal for findings of a rule in equal layers of different blocks; of chains, those with one title."""
    rule = finding.title if finding.rule == "unfused-chains" else finding.rule
    return rule, re.sub(r"\d+", "*", finding.layer)


def usual_ms(
    of_base: list[tuple[Finding, float]], finding: Finding, place: str, findings: Sequence[Finding] = ()
) -> float:
    """What its rule says of equal layers without the fault; a rule that sums up all layers may name another. What is
    said of another title and stays so among the findings is not subtracted.
    """
    stay = {(other.title, *place_of(other)) for other in findings if other.title != finding.title}
    of_base = [(other, ms) for other, ms in of_base if (other.title, *place_of(other)) not in stay]
    same = [ms for other, ms in of_base if place_of(other) == place_of(finding)]
    alike = (
        ms for other, ms in of_base if other.rule == finding.rule and re.search(place, f"{other.layer} {other.phase}")
    )
    return same[0] if same else 0.0 if finding.rule == "unfused-chains" else sum(alike)


def planted(folders: list[Path]) -> list[str]:
    """The table of planted faults, each with its finding, then what programs without one get, as Markdown."""
    programs = [
        (folder, json.loads(line)) for folder in folders for line in (folder / "meta.jsonl").read_text().splitlines()
    ]
    rows, judged, clean = [], Counter[str](), []
    of_base: dict[tuple[Any, ...], list[tuple[Finding, float]]] = {}
    for folder, program in sorted(programs, key=lambda pair: str(pair[1]["name"])):
        name, measured, times = program["name"], program["saving_ms"] or 0.0, program.get("steps")
        if not (folder / f"{name}.sqlite.xz").exists() or measured < 0:
            continue
        uncertain = 1.57 * (program.get("saving_spread_ms") or 0.0) / max(len(program.get("faulty_ms") or ()), 1) ** 0.5
        base, _, fault = name.partition("+")
        with nvprof_kit.open(folder / f"{name}.sqlite.xz") as capture:
            advice, steps, parts = capture.advise(), len(capture.steps), capture.breakdown().steps
        scale = (steps or 1) / (times or steps or 1) / 1e6  # of a step that advise sees, in ms of one of the program
        if not fault:
            shown = parts[parts["step"].notna()] if steps else parts
            busy_ms = float((shown["wall_ns"] - shown["idle_ns"]).sum() / max(steps, 1)) * scale
            clean.append((base, advice, statistics.median(program["clean_ms"]), busy_ms, scale))
            of_base[folder, base] = [(finding, finding.saves_ns * scale) for finding in advice.findings]
            continue
        rules, place = PLANTED.get(f"{folder.name} {name}") or PLANTED.get(name) or PLANTED[fault]
        ranked = [
            (finding.saves_ns * scale - usual_ms(of_base[folder, base], finding, place, advice.findings), rank, finding)
            for rank, finding in enumerate(advice.findings, 1)
            if finding.rule in rules.split() and re.search(place, f"{finding.layer} {finding.phase}")
        ]
        saves, rank, finding = max(ranked, key=lambda of: (of[0], -of[1]), default=(0.0, 0, None))
        # a program that a profiler makes faster was captured on another host than it was measured on
        captured_ms, faulty_ms = advice.wall_ns * scale, program.get("median_faulty_ms") or 0.0
        other_ms = max(abs(ms - faulty_ms) for ms in program.get("near_ms") or [faulty_ms])
        judges = max(uncertain, other_ms) < 0.3 * measured and not 0 < captured_ms < 0.8 * faulty_ms
        ratio = saves / measured if finding and judges else 0.0
        judged += Counter(faults=1, found=bool(ranked), first_three=1 <= rank <= 3, measured=judges)
        judged["saving within 0.7 to 1.3"] += 0.7 <= ratio <= 1.3
        if ranked and not judges:
            judged["of unknown saving, not listed"] += 1
            continue
        figures = f"{saves:.2f} | {measured:.2f}"
        figures += f"{f' ± {uncertain:.2f}' if uncertain else ''} | {f'{ratio:.2f}' if ratio else ''}"
        cells = f"`{finding.rule}` in {finding.layer} {finding.phase} | {rank}" if finding else "not found | "
        rows.append(f"| {base}, {fault} | {cells} | {figures} |")
    heading = "|program, fault|finding|rank|saves, ms a step|measured|ratio|\n|---|---|---:|---:|---:|---:|"
    sums = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in judged.items())
    lines = [heading, *rows, "", f"{sums[:1].upper()}{sums[1:]}.", ""]
    lines += ["|program without a fault|ms a step|GPU idle|findings above `low`, ms a step|\n|---|---:|---:|---|"]
    for base, advice, quiet_ms, busy_ms, scale in clean:
        ms = [(finding, finding.saves_ns * scale) for finding in advice.findings if finding.confidence != "low"]
        findings = ", ".join(f"`{finding.rule}` {saves:.2f} {finding.confidence}" for finding, saves in ms)
        lines.append(f"| {base} | {quiet_ms:.2f} | {max(quiet_ms - busy_ms, 0):.2f} | {findings} |")
    return [re.sub(r" ?\| ?", "|", line) for line in lines]  # for the docs' count of words


PAGE = ROOT / "docs" / "advise.md"
BEGIN, END = "<!-- begin of the planted faults -->", "<!-- end of the planted faults -->"
PLANTED = {
    name: (rules, place)
    for line in (DATA / "faults" / "planted.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for set_, fault, rules, place in [line.split("\t")]
    for name in (fault, f"{set_} {fault}")
}
"""The rules, one of which knows a fault, a program with it, or that of a set, and a pattern of its layer and phase."""


if __name__ == "__main__":
    main()
