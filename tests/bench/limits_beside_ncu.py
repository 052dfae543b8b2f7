"""The memory traffic and the operations that count_flops counted of a step, beside what ncu measured of it.

    python tests/bench/limits_beside_ncu.py [--folder tests/data/ncu/limits] [--docs]

The folder has of one program (`tests/gpu/programs/limits.py`), whose inputs are larger than the L2: ``run.sqlite.xz``
(nsys), ``run.flops.json`` (count_flops), and as raw pages of ncu ``dram.csv.xz`` (bytes of DRAM) and ``tensor.csv.xz``
(operations of the tensor cores), each in one pass with the caches as in the program. Copies within the GPU are no
kernels and add twice their bytes from the capture. With --docs the table is written into docs/flops.md. Exit 1 if a
layer's traffic is less than counted by more than the L2 can hold, or above 1.6 times the bytes of its operators (but
for products of large weights, of which it must not be above 1.7 times what waves of tiles read, and the embedding's
gradient); or if the operations of a product are not those of its whole tiles.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import nvprof_kit

Shape = tuple[int, int, int]
"""Columns, rows and depth of a product."""

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "ncu" / "limits"
PAGE = ROOT / "docs" / "flops.md"
BEGIN, END = "<!-- begin of the table beside ncu -->", "<!-- end of the table beside ncu -->"
SMALL, WIDE, EMBEDDING = "products, weights up to 16 MB", "products, weights from 22 MB on", "embedding"
KINDS = {
    "products limited by memory": r"^thin\.|^few_rows$|modulation$",
    "experts": r"mlp\.experts$",
    "RMSNorm of five operators": r"(input|post_attention)_layernorm$|model\.norm$|[qk]_norm$",
    "norms of one operator": r"^plain\.[04]$|^groups$|norm[12]?$|layernorm_(before|after|embedding)$",
    "SiLU, GELU": r"act(ivation)?(_fn)?$|^plain\.[26]$",
    "softmax": r"^plain\.5$",
    EMBEDDING: r"embed_tokens$|embed_positions$",
    "AdamW in one kernel": r"^\(none\)$",
}
"""Kinds of layers by the path, the first that fits; all other linear layers are products of small or large weights."""
LARGE = 130e6
"""Layers with fewer bytes are not compared."""
SMS = 132
"""Of an H100 or H200 with SXM: so many tiles are computed at a time."""


class Linear(NamedTuple):
    """A linear layer's inputs, outputs and rows."""

    inputs: int
    outputs: int
    rows: int


LINEARS = {
    path: Linear(*map(int, sizes))
    for line in (FOLDER / "linears.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for path, *sizes in [line.split("\t")]
}
"""The linear layers of the program by the path."""


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
            "operators": counted["bytes"],
            "at_least": counted["dram_bytes"],
            "fused": (counted["fused_limit_ns"] * peaks.bandwidth / 1e9).where(counted["flops"] == 0),
            "measured": of_dram["dram_bytes"].add(2 * copies, fill_value=0.0),
            "bandwidth": of_dram["dram_bytes"] / of_dram["gpu_ns"] / (peaks.bandwidth / 1e9),
            "in_waves": of_tiles(dram.kernels, "dram_bytes", waves_bytes),
            "operations": of_tensor["tensor_flop"] / counted["flops"].where(counted["flops"] > 0),
            "in_tiles": of_tiles(tensor.kernels, "tensor_flop", tiles_flop),
        }
    ).rename_axis(["layer", "phase"]).reset_index()  # fmt: skip
    table["kind"] = [kind_of(layer) for layer in table["layer"]]
    table = table[(table["layer"] != "(none)") | (table["phase"] == "optimizer")]
    l2_bytes = json.loads((folder / "run.flops.json").read_text())["l2_bytes"]
    return table[table["kind"].notna() & (table["operators"] > LARGE)], int(l2_bytes)


def kind_of(layer: str) -> str | None:
    """The kind of a layer; None of one that is not compared."""
    kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, layer)), None)
    linear = linear_of(layer)
    return kind or (linear and (SMALL if 2 * linear.inputs * linear.outputs <= 2**24 else WIDE))


def linear_of(layer: str) -> Linear | None:
    """The linear layer at this path."""
    return next((linear for path, linear in LINEARS.items() if re.search(path, layer)), None)


def of_tiles(kernels: pd.DataFrame, name: str, expected: Callable[[Shape, Shape, Shape], float]) -> pd.Series[float]:
    """Of each layer and phase what ncu measured of its products over what is expected of their tiles.

    The name of cuBLAS's kernel has its tile, how many of them are computed together, and which operands it transposes,
    which tells the result from the two gradients: nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN.

    Args:
        kernels: What ncu measured.
        name: The column to compare.
        expected: Of a product's columns, rows and depth, of a tile's, and how many tiles are computed together.
    """
    rows = []
    for kernel in kernels.itertuples():
        names = re.search(r"_(\d+)x(\d+)_(\d+)x\d+_(\d)x(\d)_.*_([TN]{2})[TN]$", kernel.kernel)
        linear = linear_of(kernel.layer)
        if names is None or linear is None:
            continue
        width, height, depth, across, down = map(int, names.groups()[:5])
        shape = {
            "TN": (linear.outputs, linear.rows, linear.inputs),
            "NN": (linear.inputs, linear.rows, linear.outputs),
            "NT": (linear.inputs, linear.outputs, linear.rows),
        }[names[6]]
        amount = expected(shape, (width, height, depth), (across, down, 1))
        rows.append((kernel.layer, kernel.phase, getattr(kernel, name), kernel.launches * amount))
    sums = pd.DataFrame(rows, columns=["layer", "phase", "measured", "expected"]).groupby(["layer", "phase"]).sum()
    return sums["measured"] / sums["expected"]


def tiles_flop(shape: Shape, tile: Shape, together: Shape) -> float:
    """Operations of a product in whole tiles."""
    steps = [length * count for length, count in zip(tile, together, strict=True)]
    return 2.0 * prod(ceil(length / step) * step for length, step in zip(shape, steps, strict=True))


def waves_bytes(shape: Shape, tile: Shape, _: Shape) -> float:
    """Bytes of a product that reads, for each wave of tiles on all SMs, the operands of these tiles, and keeps none
    for the next wave; the tiles of a wave lie in the rectangle that needs the least.
    """
    columns, rows, depth = shape
    across, down = ceil(columns / tile[0]), ceil(rows / tile[1])
    reads = min(
        ceil(down / (SMS // count)) * columns * depth + ceil(across / count) * rows * depth
        for count in range(1, SMS + 1)
    )
    return 2.0 * (reads + columns * rows)


def span(values: pd.Series[float], form: str = ".2f") -> str:
    """The least and the largest of the known values."""
    known = sorted({format(value, form) for value in values.dropna()}, key=float)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def lines(table: pd.DataFrame) -> list[str]:
    """The table in Markdown."""
    columns = (
        "layers", "phase", "how many", "GB measured", "/ of its operators", "/ fused", "/ in waves of tiles",
        "% of the bandwidth", "tensor cores' operations / counted", "/ in whole tiles",
    )  # fmt: skip
    cells = [columns, ["---"] * len(columns)]
    for (kind, phase), part in table.groupby(["kind", "phase"], sort=False):
        ratios = [span(part["measured"] / part[name]) for name in ("operators", "fused")]
        total = f"{part['measured'].sum() / 1e9:.1f}"
        waves = span(part["in_waves"]) if kind in (SMALL, WIDE) else ""
        operations = [span(part[name], ".3f") for name in ("operations", "in_tiles")]
        bandwidth = span(100 * part["bandwidth"], ".0f")
        cells.append((kind, phase, str(len(part)), total, *ratios, waves, bandwidth, *operations))
    return [f"| {' | '.join(row)} |" for row in cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
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
    is_wide = table["kind"] == WIDE
    is_filled_first = (table["kind"] == EMBEDDING) & (table["phase"] == "backward")
    wrong = {
        "less traffic than counted": table["measured"] + l2_bytes < table["at_least"],
        "more than 1.6 times the bytes of its operators": (
            ~is_wide & ~is_filled_first & (table["measured"] > 1.6 * table["operators"])
        ),
        "more than 1.7 times what waves of tiles read": is_wide & (table["in_waves"] > 1.7),
        "other operations than those of whole tiles": (table["in_tiles"] - 1).abs() > 0.003,
        "no product of cuBLAS": is_wide & table["in_tiles"].isna(),
    }
    for reason, is_wrong in wrong.items():
        for row in table[is_wrong].itertuples():
            print(f"{row.layer} {row.phase}: {reason}", file=sys.stderr)
    return int(any(is_wrong.any() for is_wrong in wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
