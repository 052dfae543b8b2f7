"""Operations with the names of their layers and phases as categorical columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from nvprof_kit._analysis.attribution.attribution import HOW, Attribution, attribute
from nvprof_kit._analysis.attribution.nesting import NONE, Integers
from nvprof_kit._analysis.attribution.ranges import Ranges
from nvprof_kit._analysis.kernels.classes import CLASSES, KernelClasses, Rule, classify
from nvprof_kit._trace.schema import Column, Trace
from nvprof_kit.names import NO_LAYER, NO_PHASE

if TYPE_CHECKING:
    import pandas as pd


OWNER_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "layer": Column("category", "module path of the layer, `(none)` outside layers"),
        "phase": Column(
            "category",
            "`forward`, `backward` or `recompute`; outside layers the phase of the loop (`optimizer`, …) or `other`",
        ),
        "step": Column("Int64", "step number, NA outside steps"),
        "kernel_class": Column("category", "kernel class: `gemm`, `attention`, `norm`, …"),
        "how": Column(
            "category",
            "how it was attributed: by its `launch`, by the creation of its `graph node`, by the phase open on an "
            "`other thread`, by the `structure` of the order of kernels, or `none`",
        ),
    }
)
"""The columns that `attributed` adds to those of `nvprof_kit._trace.schema.OPS`."""


class Operations:
    """The operations of a capture.

    Args:
        trace: The capture, with the operations' names.
        own_rules: The user's rules for kernel classes, tried before the built-in ones.
        known: The same operations, to reuse their attribution and classes across several reports.
    """

    def __init__(self, trace: Trace, own_rules: Sequence[Rule] = (), known: Operations | None = None) -> None:
        self.trace, self._own_rules, self._known = trace, own_rules, known

    @cached_property
    def attribution(self) -> Attribution:
        """The owner of each operation."""
        return attribute(self.trace) if self._known is None else self._known.attribution

    @cached_property
    def classes(self) -> KernelClasses:
        """The class of each operation."""
        return classify(self.trace.ops, self._own_rules) if self._known is None else self._known.classes


def layer_column(ranges: Ranges, layer_range: Integers) -> pd.Categorical:
    """The layer of each of these ranges, `NO_LAYER` for `NONE`."""
    texts = [named.text for named in ranges.names]
    name = np.append(ranges.name, len(texts))[layer_range]
    return _categorical(name, [*texts, NO_LAYER])


def op_owners(attribution: Attribution) -> tuple[pd.Categorical, pd.Categorical]:
    """Layer and phase of each operation."""
    return layer_column(attribution.ranges, attribution.layer_range), _categorical(
        attribution.phase, attribution.phases
    )


def range_owners(ranges: Ranges) -> tuple[pd.Categorical, pd.Categorical]:
    """Layer and phase of each range, with those of range `NONE` appended."""
    import pandas as pd

    layer = np.append(ranges.layer_range, NONE)
    phase = np.where(layer >= 0, layer, np.append(ranges.phase_range, NONE))
    code, phases = pd.factorize(np.append(ranges.phase, NO_PHASE).astype(object))  # np.unique would sort each range's
    return layer_column(ranges, layer), _categorical(code[phase], [str(text) or NO_PHASE for text in phases])


def _categorical(codes: Any, names: Any) -> pd.Categorical:
    """A categorical column from codes into names that can contain duplicates."""
    from nvprof_kit._trace.frames import labels

    categories: pd.Categorical = labels(np.asarray(codes), list(names))
    return categories


def attributed(operations: Operations, ops: pd.DataFrame) -> pd.DataFrame:
    """Add the owners to a table of operations.

    Args:
        operations: The operations and their attribution.
        ops: Their table, in the same order.

    Returns:
        The table with the additional columns `OWNER_COLUMNS`.
    """
    import pandas as pd

    owners = operations.attribution
    layer, phase = op_owners(owners)
    step = np.append(owners.ranges.steps, 0)[owners.step]
    table: pd.DataFrame = ops.assign(
        layer=layer,
        phase=phase,
        step=pd.arrays.IntegerArray(step.astype(np.int64), owners.step == NONE),
        kernel_class=_categorical(operations.classes.code.astype(np.int64), list(CLASSES)),
        how=_categorical(owners.how.astype(np.int64), list(HOW)),
    )
    return table
