"""The memory traffic and the operations that count_flops counted of a step, beside what ncu measured of it.

    python tests/bench/limits_beside_ncu.py [--folder tests/data/ncu/limits] [--docs]

The folder has of one program (`tests/gpu/programs/limits.py`), whose tensors are larger than the L2: ``run.sqlite.xz``
(nsys), ``run.flops.json`` (count_flops), and as raw pages of ncu ``dram.csv.xz`` (bytes of DRAM) and ``tensor.csv.xz``
(operations of the tensor cores), each in one pass with the caches as in the program. Copies within the GPU are no
kernels and add twice their bytes from the capture. With --docs the table is written into docs/flops.md. Exit 1 if a
layer's traffic is less than counted by more than the L2 can hold, or that of a layer limited by memory is above 1.6
times the count (but for the embedding's gradient), or the operations of a product are not those of its whole tiles.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path

import pandas as pd

import nvprof_kit

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "flops.md"
BEGIN, END = "<!-- begin of the table beside ncu -->", "<!-- end of the table beside ncu -->"
BY_OPERATIONS, EMBEDDING = "products limited by operations", "embedding"
KINDS = {
    BY_OPERATIONS: r"_proj$|lm_head$|plain\.[13]$",
    "products limited by memory": r"thin\.|few_rows$",
    "RMSNorm of five operators": r"layernorm$|model\.norm$",
    "norms of one operator": r"plain\.[04]$|groups$",
    "SiLU, GELU": r"act_fn$|plain\.[26]$",
    "softmax": r"plain\.5$",
    EMBEDDING: r"embed_tokens$",
    "AdamW in one kernel": r"^\(none\)$",
}
"""Kinds of layers by the path."""
LARGE = 200e6
"""Layers with less traffic are not compared."""
ROWS, WIDTH = 16384, 4096
WEIGHTS = {
    r"[qo]_proj": (WIDTH, WIDTH),
    r"[kv]_proj": (WIDTH, WIDTH // 4),
    r"(gate|up)_proj": (WIDTH, 11008),
    r"down_proj": (11008, WIDTH),
    r"lm_head|few_rows": (WIDTH, 32000),
    r"plain\.1": (WIDTH, 2 * WIDTH),
    r"plain\.3": (2 * WIDTH, WIDTH),
    r"thin\.0": (WIDTH, 16),
    r"thin\.1": (16, WIDTH),
}
"""Inputs and outputs of the linear layers."""


def beside(folder: Path) -> tuple[pd.DataFrame, int]:
    """The layers with their kind, bytes counted and measured, operations and their time; and the bytes of the L2."""
    capture = nvprof_kit.open(folder / "run.sqlite.xz")
    flops = capture.flops(folder / "run.flops.json")
    counted, peaks = flops.rows.set_index(["layer", "phase"]), flops.peaks
    assert peaks is not None
    dram, tensor = (nvprof_kit.open_ncu(folder / f"{name}.csv.xz").layers() for name in ("dram", "tensor"))
    of_dram, of_tensor = (table.to_frame().set_index(["layer", "phase"]) for table in (dram, tensor))
    copies = capture.breakdown("copies").to_frame()  # by the copy engines, which ncu does not measure
    copies = copies[copies["copy"] == "memcpy DtoD"].groupby(["layer", "phase"])["bytes"].sum()
    table = pd.DataFrame(
        {
            "counted": counted["dram_bytes"],
            "fused": (counted["fused_limit_ns"] * peaks.bandwidth / 1e9).where(counted["flops"] == 0),
            "measured": of_dram["dram_bytes"].add(2 * copies, fill_value=0.0),
            "bandwidth": of_dram["dram_bytes"] / of_dram["gpu_ns"] / (peaks.bandwidth / 1e9),
            "operations": of_tensor["tensor_flop"] / counted["flops"].where(counted["flops"] > 0),
            "in_tiles": pd.Series(in_whole_tiles(tensor.kernels)),
        }
    ).rename_axis(["layer", "phase"]).reset_index()  # fmt: skip
    table["kind"] = None
    for kind, pattern in KINDS.items():
        table.loc[table["layer"].str.contains(pattern, regex=True), "kind"] = kind
    l2_bytes = json.loads((folder / "run.flops.json").read_text())["l2_bytes"]
    return table[table["kind"].notna() & (table["counted"] > LARGE)], int(l2_bytes)


def in_whole_tiles(kernels: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Of each layer and phase with kernels of cuBLAS: their operations over those of whole tiles, the worst of them.

    The kernel's name has its tile, and how many of them are computed together: nvjet_sm90_tst_192x192_64x4_2x1_v.
    """
    ratios: dict[tuple[str, str], float] = {}
    for kernel in kernels[kernels["tensor_flop"] > 0].itertuples():
        names = re.search(r"_(\d+)x(\d+)_(\d+)x\d+_(\d)x(\d)_", kernel.kernel)
        weight = next((weight for path, weight in WEIGHTS.items() if re.search(f"({path})$", kernel.layer)), None)
        if names is None or weight is None:
            continue
        width, height, depth, across, down = map(int, names.groups())
        tile = (width * across, height * down, depth)
        all_tiles = [
            2 * prod(ceil(length / step) * step for length, step in zip(shape, tile, strict=True))
            for shape in shapes(kernel.layer, kernel.phase, *weight)
        ]
        ratio = min(
            (kernel.tensor_flop / kernel.launches / flop for flop in all_tiles), key=lambda ratio: abs(ratio - 1)
        )
        key = kernel.layer, kernel.phase
        ratios[key] = max(ratios.get(key, 1.0), ratio, key=lambda ratio: abs(ratio - 1))
    return ratios


def shapes(layer: str, phase: str, inputs: int, outputs: int) -> Iterator[tuple[int, int, int]]:
    """Columns, rows and depth of a linear layer's products."""
    rows = 64 if layer == "few_rows" else ROWS
    if phase == "forward":
        yield outputs, rows, inputs
    else:
        yield inputs, rows, outputs
        yield inputs, outputs, rows


def span(values: pd.Series[float], form: str = ".2f") -> str:
    """The least and the largest of the known values."""
    known = sorted({format(value, form) for value in values.dropna()}, key=float)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def lines(table: pd.DataFrame) -> list[str]:
    """The table in Markdown."""
    columns = (
        "layers", "phase", "how many", "GB measured", "/ counted", "/ fused", "% of the bandwidth",
        "tensor cores' operations / counted", "/ in whole tiles",
    )  # fmt: skip
    cells = [columns, ["---"] * len(columns)]
    for (kind, phase), part in table.groupby(["kind", "phase"], sort=False):
        ratios = [span(part["measured"] / part[name]) for name in ("counted", "fused")]
        total = f"{part['measured'].sum() / 1e9:.1f}"
        operations = [span(part[name], ".3f") for name in ("operations", "in_tiles")]
        cells.append((kind, phase, str(len(part)), total, *ratios, span(100 * part["bandwidth"], ".0f"), *operations))
    return [f"| {' | '.join(row)} |" for row in cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "tests" / "data" / "ncu" / "limits")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    table, l2_bytes = beside(options.folder)
    text = "\n".join(lines(table))
    print(text)
    if options.docs:
        page = re.sub(
            f"{BEGIN}.*{END}", f"{BEGIN}\n\n{text}\n\n{END}", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        PAGE.write_text(page, encoding="utf-8")
    by_memory = (table["kind"] != BY_OPERATIONS) & ((table["kind"] != EMBEDDING) | (table["phase"] == "forward"))
    wrong = {
        "less traffic than counted": table["measured"] + l2_bytes < table["counted"],
        "more than 1.6 times the counted traffic": by_memory & (table["measured"] > 1.6 * table["counted"]),
        "other operations than those of whole tiles": (table["in_tiles"] - 1).abs() > 0.001,
        "no product of cuBLAS": (table["kind"] == BY_OPERATIONS) & table["in_tiles"].isna(),
    }
    for reason, is_wrong in wrong.items():
        for row in table[is_wrong].itertuples():
            print(f"{row.layer} {row.phase}: {reason}", file=sys.stderr)
    return int(any(is_wrong.any() for is_wrong in wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
