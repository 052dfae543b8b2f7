"""Splits the time of each layer by kernel class, or by the phase of the loop, such as prefill and decode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.attribution import Attribution
from nvprof_kit._analysis.attribution.intervals import exact_sums
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array
from nvprof_kit._analysis.attribution.operations import op_owners
from nvprof_kit._analysis.kernels.classes import CLASSES, KernelClasses
from nvprof_kit._analysis.layers.tree import ModelTree
from nvprof_kit._result.column import Column, Columns
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd

SPLITS: Mapping[str, str] = MappingProxyType({"class": "class_", "phase": "during_"})
"""The ways to split time, and the prefixes of their column names."""

COLUMNS: Columns = {
    "class_NAME_ns": Column(
        "the part of `gpu_self_ns` in kernels of a class: `class_gemm_ns`, `class_attention_ns`, …, in ns "
        "(only with `--columns class`)",
        "ns",
    ),
    "during_NAME_ns": Column(
        "the part that ran during a phase of the loop: `during_prefill_ns`, `during_decode_ns`, …, or "
        "`during_other_ns`, in ns (only with `--columns phase`)",
        "ns",
    ),
}
"""The columns and what they mean."""


@dataclass(frozen=True)
class Parts:
    """The part that each operation belongs to.

    Attributes:
        columns: Column name of each part.
        code: Index into `columns`, shape ``(n,)``.
    """

    columns: tuple[str, ...]
    code: Int64Array


def parts_by_class(classes: KernelClasses) -> Parts:
    """Kernels by class; only classes that occur."""
    present, code = np.unique(classes.code.astype(np.int64), return_inverse=True)
    names = list(CLASSES)
    return Parts(
        tuple(f"{SPLITS['class']}{names[code_number]}_ns" for code_number in present.tolist()), code.astype(np.int64)
    )


def parts_by_phase(attribution: Attribution) -> Parts:
    """Operations by the phase range that encloses their layer's range, in the order in which the phases first ran."""
    ranges = attribution.ranges
    phase_range = np.append(ranges.phase_range, NONE)[attribution.layer_range]
    of_loop = np.append(np.asarray(ranges.phase, dtype=object), NO_PHASE)[phase_range]
    outside = np.asarray(attribution.phases, dtype=object)[attribution.phase]
    text = np.where(attribution.layer_range >= 0, of_loop, outside)
    names, first, code = np.unique(text.astype(str), return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.argsort(order, kind="stable")
    columns = tuple(
        f"{SPLITS['phase']}{re.sub(r'[^0-9A-Za-z]+', '_', str(names[code_number]))}_ns"
        for code_number in order.tolist()
    )
    return Parts(columns, rank[code].astype(np.int64))


def split_rows(
    rows: pd.DataFrame, duration: Int64Array, attribution: Attribution, parts: Parts, is_listed: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    """Add a column for each part to the rows, with self times.

    Args:
        rows: One row per layer and phase.
        duration: Duration of each operation, in ns.
        attribution: The owner of each operation.
        parts: The part of each operation.
        is_listed: The operations that the rows cover.
    """
    sums = _own(duration, attribution, parts, is_listed)
    nothing = np.zeros(len(parts.columns), dtype=np.int64)
    keys = zip(rows["layer"].tolist(), rows["phase"].tolist(), strict=True)
    values = np.array([sums.get(key, nothing) for key in keys], dtype=np.int64).reshape(-1, len(parts.columns))
    table: pd.DataFrame = rows.assign(**{name: values[:, index] for index, name in enumerate(parts.columns)})
    return table


def split_tree(
    tree: pd.DataFrame, duration: Int64Array, attribution: Attribution, parts: Parts, is_shown: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    """Add a column for each part to the tree, including submodules and summed over phases."""
    keys = list(zip(tree["layer"].tolist(), tree["phase"].tolist(), strict=True))
    line_of_key = {key if key[0] == NO_LAYER else (key[0], ""): number for number, key in enumerate(keys)}
    self_times = np.zeros((len(tree), len(parts.columns)), dtype=np.int64)
    for (layer, phase), sums in _own(duration, attribution, parts, is_shown).items():
        self_times[line_of_key[layer, phase if layer == NO_LAYER else ""]] += sums
    nested = ModelTree.of_rows(tree["layer"], tree["parent"]).with_nested(self_times)
    split: pd.DataFrame = tree.assign(**{name: nested[:, number] for number, name in enumerate(parts.columns)})
    return split


def _own(
    duration: Int64Array, attribution: Attribution, parts: Parts, is_wanted: npt.NDArray[np.bool_]
) -> dict[tuple[str, str], Int64Array]:
    """The time of each (layer, phase) by part; layers with the same name are added up."""
    layer, phase = op_owners(attribution)
    count, phases = len(parts.columns), len(phase.categories)
    codes = (layer.codes.astype(np.int64) * phases + phase.codes)[is_wanted]
    cell = codes * count + parts.code[is_wanted]
    table = exact_sums(cell, duration[is_wanted], len(layer.categories) * phases * count).reshape(-1, count)
    return {
        (str(layer.categories[code_number // phases]), str(phase.categories[code_number % phases])): table[code_number]
        for code_number in np.unique(codes).tolist()
    }
