"""The memory traffic and the operations that count_flops counted of a step, beside what ncu measured of it.

    python tests/bench/limits_beside_ncu.py [--folder tests/data/ncu/limits] [--docs]

The folder has of one program (`tests/gpu/programs/limits.py`), whose tensors are larger than the L2: ``run.sqlite.xz``
(nsys), ``run.flops.json`` (count_flops), and as raw pages of ncu ``dram.csv.xz`` (bytes of DRAM) and ``tensor.csv.xz``
(operations of the tensor cores), each in one pass with the caches as in the program. Copies within the GPU are no
kernels and add twice their bytes from the capture. With --docs the table is written into docs/flops.md. Exit 1 if a
layer's traffic is less than counted by more than the L2 can hold, or the operations of a product are less than counted
or 4 % more.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pandas as pd

import nvprof_kit

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flops.md"
BEGIN, END = "<!-- begin of the table beside ncu -->", "<!-- end of the table beside ncu -->"
KINDS = {
    "products": r"_proj$|lm_head$|plain\.[13]$",
    "RMSNorm of five operators": r"layernorm$|model\.norm$",
    "norms in one kernel": r"plain\.[04]$",
    "SiLU, GELU": r"act_fn$|plain\.[26]$",
    "softmax": r"plain\.5$",
    "embedding": r"embed_tokens$",
    "AdamW in one kernel": r"^\(none\)$",
}
"""Kinds of layers by the path."""
L2_BYTES = 50 * 2**20
LARGE = 4 * L2_BYTES
"""Layers with less traffic are not compared."""


def beside(folder: Path) -> pd.DataFrame:
    """The layers with their kind: bytes and operations counted and measured."""
    capture = nvprof_kit.open(folder / "run.sqlite.xz")
    counted = capture.flops(folder / "run.flops.json").rows.set_index(["layer", "phase"])
    peaks = capture.flops(folder / "run.flops.json").peaks
    assert peaks is not None
    dram, tensor = (
        nvprof_kit.open_ncu(folder / f"{name}.csv.xz").layers().to_frame().set_index(["layer", "phase"])
        for name in ("dram", "tensor")
    )
    copies = capture.breakdown("copies").to_frame()  # by the copy engines, which ncu does not measure
    copies = copies[copies["copy"] == "memcpy DtoD"].groupby(["layer", "phase"])["bytes"].sum()
    table = pd.DataFrame(
        {
            "counted": counted["dram_bytes"],
            "fused": (counted["fused_limit_ns"] * peaks.bandwidth / 1e9).where(counted["flops"] == 0),
            "measured": dram["dram_bytes"].add(2 * copies, fill_value=0.0),
            "operations": tensor["tensor_flop"] / counted["flops"].where(counted["flops"] > 0),
        }
    ).reset_index()
    table["kind"] = None
    for kind, pattern in KINDS.items():
        table.loc[table["layer"].str.contains(pattern, regex=True), "kind"] = kind
    return table[table["kind"].notna() & (table["counted"] > LARGE)]


def span(values: pd.Series[float], form: str = ".2f") -> str:
    """The least and the largest of the known values."""
    known = sorted({format(value, form) for value in values.dropna()}, key=float)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def lines(table: pd.DataFrame) -> list[str]:
    """The table in Markdown."""
    columns = (
        "layers",
        "phase",
        "how many",
        "GB measured",
        "/ counted",
        "/ fused",
        "tensor cores' operations / counted",
    )
    cells = [columns, ["---"] * len(columns)]
    for (kind, phase), part in table.groupby(["kind", "phase"], sort=False):
        ratios = [span(part["measured"] / part[name]) for name in ("counted", "fused")]
        total = f"{part['measured'].sum() / 1e9:.1f}"
        cells.append((kind, phase, str(len(part)), total, *ratios, span(part["operations"], ".3f")))
    return [f"| {' | '.join(row)} |" for row in cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "tests" / "data" / "ncu" / "limits")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    table = beside(options.folder)
    text = "\n".join(lines(table))
    print(text)
    if options.docs:
        page = re.sub(
            f"{BEGIN}.*{END}", f"{BEGIN}\n\n{text}\n\n{END}", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        PAGE.write_text(page, encoding="utf-8")
    too_few = table[table["measured"] + L2_BYTES < table["counted"]]
    wrong = table[~table["operations"].fillna(1.0).between(0.999, 1.04)]  # kernels compute whole tiles
    for reason, rows in (("less traffic than counted", too_few), ("other operations than counted", wrong)):
        for row in rows.itertuples():
            print(f"{row.layer} {row.phase}: {reason}", file=sys.stderr)
    return int(len(too_few) + len(wrong) > 0)


if __name__ == "__main__":
    sys.exit(main())
