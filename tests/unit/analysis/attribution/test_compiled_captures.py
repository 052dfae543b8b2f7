"""Captures of an H200 with ranges inside what torch.compile compiled: the same kernels, and each block its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

import nvprof_kit
from nvprof_kit._trace.open import open_capture

DATA = Path(__file__).parents[3] / "data"


def kernels(name: str) -> Counter[str]:
    ops = open_capture(DATA / f"{name}-2024.2.sqlite.xz", optional=("name",)).ops
    return Counter(ops["name"].astype(str))


@pytest.mark.parametrize("program", ["compile-model", "compile-blocks"])
def test_the_kernels_are_those_of_the_program_without_ranges_inside(program: str) -> None:
    assert kernels(f"{program}-parts") == kernels(program)


def tree(name: str) -> tuple[pd.DataFrame, int]:
    result = nvprof_kit.open(DATA / f"{name}-2024.2.sqlite.xz").layers()
    return result.tree.set_index("layer"), result.summary.steps


def test_the_parts_of_a_block_compiled_alone_add_up_to_it() -> None:
    parts, _ = tree("compile-blocks-parts")
    block = parts.loc["model.layers.1"]
    inside = parts[parts["parent"] == "model.layers.1"]
    assert set(inside.index) >= {f"model.layers.1.{part}" for part in ("input_layernorm", "self_attn", "mlp")}
    assert inside["total_ns"].sum() <= block["total_ns"]
