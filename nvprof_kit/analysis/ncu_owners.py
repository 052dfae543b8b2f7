"""Which layer and phase each measured kernel belongs to, from the NVTX ranges that were open where it was launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nvprof_kit.analysis.layer_order import parents_of
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES, Category, RangeName, parse_range

if TYPE_CHECKING:
    import pandas as pd

Owner = tuple[str, str]
"""Layer and phase."""

_SUFFIXED = (Category.BACKWARD, Category.RECOMPUTE)


@dataclass(frozen=True)
class Owned:
    """The owners of measured kernels.

    Attributes:
        owners: (layer, phase) of each kernel.
        parents: For every layer that a range of the report names the layer that holds it, '' at the top.
        doubts: Sentences on what had to be guessed.
    """

    owners: tuple[Owner, ...]
    parents: Mapping[str, str]
    doubts: tuple[str, ...] = ()


def own_layers(kernels: pd.DataFrame) -> Owned:
    """The owner of each measured kernel: the innermost layer's range, else the innermost phase's.

    ncu gives no categories, so a backward range tells itself by its suffix. In a program whose ranges have none, a
    thread that never has a phase's range open, while another has, is autograd's, and its layers are backward.

    Args:
        kernels: The kernels of a report, columns pid, tid and stack.
    """
    stacks = [tuple(parse_range(text) for text in stack) for stack in kernels["stack"]]
    autograd = _autograd_threads(kernels, stacks)
    owners = []
    guessed = 0
    for thread, stack in zip(_threads(kernels), stacks, strict=True):
        layer, phase = _owner(stack)
        if thread in autograd and phase == Category.FORWARD.value and layer != NO_LAYER:
            phase = Category.BACKWARD.value
            guessed += 1
        owners.append((layer, phase))
    parents = _parents(stacks)
    doubts = [
        f"{guessed} kernels are taken for backward: their ranges do not say so, but their thread has no phase while "
        "another has"
    ]
    outside = sum(not stack for stack in stacks)
    if outside == len(stacks):
        doubts.append(
            "no kernel has a range of the domain: measure with --nvtx, call nvprof_kit.annotate_model(model), or name "
            "another with --domain; with --with CAPTURE the layers come from the capture"
        )
    return Owned(tuple(owners), parents, tuple(doubts if guessed else doubts[1:]))


def _parents(stacks: list[tuple[RangeName, ...]]) -> dict[str, str]:
    """The layer that holds each layer, by the forward ranges; of a report of backward alone by its own."""
    layers = [[named for named in stack if named.category in LAYER_CATEGORIES] for stack in stacks]
    forward = [stack for stack in layers if all(named.category is Category.FORWARD for named in stack)]
    pairs = Counter(
        pair
        for stack in (forward if any(forward) else layers)
        for pair in pairwise([*(named.text for named in reversed(stack)), ""])
    )
    known = dict.fromkeys(named.text for stack in layers for named in stack)
    return parents_of(known, ((inner, outer, count) for (inner, outer), count in pairs.items()))


def _owner(stack: tuple[RangeName, ...]) -> Owner:
    layer = next((named for named in reversed(stack) if named.category in LAYER_CATEGORIES), None)
    if layer is not None:
        in_backward = any(named.category is Category.BACKWARD for named in stack)
        again = layer.category is Category.FORWARD and in_backward
        return layer.text, (Category.RECOMPUTE if again else layer.category).value
    phase = next((named.text for named in reversed(stack) if named.category in PHASE_CATEGORIES), NO_PHASE)
    return NO_LAYER, phase


def _threads(kernels: pd.DataFrame) -> list[tuple[Any, Any]]:
    return list(zip(kernels["pid"].tolist(), kernels["tid"].tolist(), strict=True))


def _autograd_threads(kernels: pd.DataFrame, stacks: list[tuple[RangeName, ...]]) -> set[tuple[Any, Any]]:
    """Threads on which no phase's range is ever open, where no range has a suffix and another thread has phases."""
    if any(named.category in _SUFFIXED for stack in stacks for named in stack):
        return set()
    threads = _threads(kernels)
    with_phase = {
        thread
        for thread, stack in zip(threads, stacks, strict=True)
        if any(named.category in PHASE_CATEGORIES for named in stack)
    }
    return {thread for thread in threads if thread[1] >= 0} - with_phase if with_phase else set()
