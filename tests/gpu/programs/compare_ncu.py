"""How far the table spread from a few measured launches is from that of every launch measured one by one.

python compare_ncu.py FULL.csv PLAN.csv RUN.sqlite

FULL.csv is ncu's page of every launch, PLAN.csv that of the plan made for the nsys capture RUN.sqlite. Prints, for each
percentage, the median and the largest difference over the rows of the blocks (model.layers.3) and over those of every
module, relative to the full measurement. Two comparisons: against FULL as it is, weighted by ncu's times, and against
FULL spread over the same capture, where only the choice of launches differs. Layers that FULL itself covers by less
than 90 % of their time, since it was ended early, are left out.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pandas as pd

METRICS = ("compute_pct", "memory_pct", "dram_pct", "l2_pct", "l1_pct", "tensor_pct", "occupancy_pct")
BLOCK = re.compile(r".*\.\d+")
LEAST_SHARE = 0.005
LEAST_PERCENT = 1.0
"""Rows of less GPU time, and values below this, are too small to compare."""


def layers(*arguments: str) -> pd.DataFrame:
    """The table of `nvprof-kit ncu layers`, a row per (layer, phase)."""
    command = [sys.executable, "-m", "nvprof_kit", "ncu", "layers", *arguments, "--format", "csv"]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return pd.read_csv(io.StringIO(text)).set_index(["layer", "phase"])


def differences(full: pd.DataFrame, plan: pd.DataFrame) -> pd.DataFrame:
    """Relative differences in percent, a row per (layer, phase) that both have, a column per metric."""
    both = full.index.intersection(plan.index)
    full, plan = full.loc[both], plan.loc[both]
    worth = plan["gpu_ns"] > LEAST_SHARE * plan["gpu_ns"].groupby(level="phase").transform("max").max()
    there = [name for name in METRICS if full[name].notna().any() and plan[name].notna().any()]
    known = full[there].where(full[there] >= LEAST_PERCENT)
    return 100 * (plan[there] / known - 1)[worth]


def show(title: str, found: pd.DataFrame) -> None:
    print(f"\n{title}: {len(found)} rows")
    print(f"{'metric':<14} {'median':>8} {'largest':>8}   in")
    for name in found:
        values = found[name].dropna()
        if len(values):
            worst = values.abs().idxmax()
            print(f"{name:<14} {values.abs().median():>6.1f} % {values[worst]:>+6.1f} %   {' '.join(worst)}")


def main() -> None:
    full_csv, plan_csv, run = sys.argv[1:]
    plan = layers(plan_csv, "--capture", run)
    blocks = plan[[bool(BLOCK.fullmatch(layer)) for layer, _ in plan.index]]
    print(
        f"{len(blocks)} rows of blocks, covered by time: {blocks['covered'].min():.1%} to {blocks['covered'].max():.1%}"
    )
    spread = layers(full_csv, "--capture", run)
    whole = spread.index[spread["covered"] >= 0.9]
    print(f"{len(whole)} of {len(plan)} rows are covered by every launch as well")
    tables = {"every launch as measured": layers(full_csv), "every launch, by the capture's times": spread}
    for title, full in tables.items():
        found = differences(full.loc[full.index.intersection(whole)], plan)
        is_block = [bool(BLOCK.fullmatch(layer)) for layer, _ in found.index]
        show(f"{title}, blocks", found[is_block])
        show(f"{title}, every module", found)


if __name__ == "__main__":
    main()
