"""Which measured launches represent which kernels of a capture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from nvprof_kit._analysis.kernels.signatures import Kernels, Owner, Signature, role_of
from nvprof_kit._analysis.layers.tree import parents_of
from nvprof_kit._analysis.ncu.plan import size_text
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit.issues import Issue
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES, Category, RangeName, parse_range

if TYPE_CHECKING:
    import pandas as pd

_SUFFIX_CATEGORIES = (Category.BACKWARD, Category.RECOMPUTE)
"""Categories that a range's name marks with a suffix."""


@dataclass(frozen=True)
class KernelLayers:
    """The layers and phases of measured kernels.

    Attributes:
        owners: (layer, phase) of each kernel.
        parents: For every layer that a range of the report names the layer that holds it, '' at the top.
        warnings: Sentences on what had to be guessed.
    """

    owners: tuple[Owner, ...]
    parents: Mapping[str, str]
    warnings: tuple[Issue, ...] = ()


def layers_of_kernels(kernels: pd.DataFrame) -> KernelLayers:
    """The owner of each measured kernel: the innermost layer's range, else the innermost phase's.

    A layer is inside the layer whose forward range most often holds its own; in a report without forward ranges, its
    backward and recompute ranges count. ncu records no categories, so a backward range is recognized by its suffix. In
    a program whose ranges have none, a thread that never has a phase's range open, while another one does, is
    autograd's, and its layers are backward.

    Args:
        kernels: The kernels of a report, columns pid, tid and stack.
    """
    stacks = [tuple(parse_range(text) for text in stack) for stack in kernels["stack"]]
    threads = [*zip(kernels["pid"].tolist(), kernels["tid"].tolist(), strict=True)]
    has_suffix = any(range_name.category in _SUFFIX_CATEGORIES for stack in stacks for range_name in stack)
    threads_with_phase = {
        thread
        for thread, stack in zip(threads, stacks, strict=True)
        if any(range_name.category in PHASE_CATEGORIES for range_name in stack)
    }
    autograd_threads = set()
    if threads_with_phase and not has_suffix:
        autograd_threads = {thread for thread in threads if thread[1] >= 0} - threads_with_phase
    owners = []
    guessed_count = 0
    for thread, stack in zip(threads, stacks, strict=True):
        layer, phase = _owner(stack)
        if thread in autograd_threads and phase == Category.FORWARD.value and layer != NO_LAYER:
            phase = Category.BACKWARD.value
            guessed_count += 1
        owners.append((layer, phase))
    layers = [[range_name for range_name in stack if range_name.category in LAYER_CATEGORIES] for stack in stacks]
    forward = [stack for stack in layers if all(range_name.category is Category.FORWARD for range_name in stack)]
    pairs = Counter(
        pair
        for stack in (forward if any(forward) else layers)
        for pair in pairwise([*(range_name.text for range_name in reversed(stack)), ""])
    )
    parents = parents_of(
        dict.fromkeys(range_name.text for stack in layers for range_name in stack),
        ((inner, outer, count) for (inner, outer), count in pairs.items()),
    )
    warnings = []
    if guessed_count:
        warnings.append(Issue.of("guessed-backward", count=guessed_count))
    if not any(stacks):
        warnings.append(Issue.of("no-ranges:ncu"))
    return KernelLayers(tuple(owners), parents, tuple(warnings))


def _owner(stack: tuple[RangeName, ...]) -> Owner:
    """Layer and phase of a kernel launched inside these ranges, the outermost first."""
    layer = next((range_name for range_name in reversed(stack) if range_name.category in LAYER_CATEGORIES), None)
    if layer is not None:
        in_backward = any(range_name.category is Category.BACKWARD for range_name in stack)
        is_recompute = layer.category is Category.FORWARD and in_backward
        return layer.text, (Category.RECOMPUTE if is_recompute else layer.category).value
    phase = next((range_name for range_name in reversed(stack) if range_name.category in PHASE_CATEGORIES), None)
    return NO_LAYER, NO_PHASE if phase is None else phase.text


_REGISTERS = "launch__registers_per_thread"
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
_SPACES = re.compile(r"\s+")
_NAMESPACES = re.compile(r"(?:\w+|<unnamed>)::")
_CASTS = re.compile(r"\((?:unsigned )?(?:bool|char|short|int|long|long long)\)(?=-?\d)")


def measured_signatures(report: NcuReport, kernels: Kernels) -> list[list[int]]:
    """The results of a report that match each signature of a capture.

    Name, grid and block must be the same; of several such signatures that differ only in registers or shared memory, a
    result represents those it agrees with. If a launch does different work in different roles, its number identifies
    the role, provided the report has the numbers or all launches of a step; otherwise the ranges around it identify
    the role; and a report with neither represents all roles.

    Returns:
        For each signature the positions of its results, none where it was not measured.
    """
    by_launch: dict[tuple[str, str, str], list[int]] = {}
    for result, launch in enumerate(zip(*(report.kernels[name] for name in ("kernel", "grid", "block")), strict=True)):
        by_launch.setdefault((_plain(launch[0]), launch[1], launch[2]), []).append(result)
    measured = report.metrics.reindex(columns=[_REGISTERS, *_SHARED])
    shared_bytes = measured[[*_SHARED]].sum(axis="columns", skipna=False)
    resources = [*zip(measured[_REGISTERS].fillna(-1), shared_bytes.fillna(-1), strict=True)]
    has_ranges = any(report.kernels["stack"])
    roles = [role_of(owner) for owner in layers_of_kernels(report.kernels).owners] if has_ranges else None
    results_of: list[list[int]] = []
    divided: dict[Signature, tuple[list[int], list[int]]] = {}
    for kind, signature in enumerate(kernels.signatures):
        results = by_launch.get((_plain(signature.name), size_text(signature.grid), size_text(signature.block)), [])
        same = signature.registers, signature.shared_bytes
        results = [result for result in results if resources[result] == same] or results
        if signature.roles:
            divided.setdefault(replace(signature, roles=frozenset()), (results, []))[1].append(kind)
        if signature.roles and roles:
            results = [result for result in results if roles[result] in signature.roles]
        results_of.append(results)
    for results, kinds in divided.values():
        # the results are in launch order; ncu measured all launches of a step, or those whose numbers are in the report
        early = kernels.launches[kernels.launches["is_early"] & kernels.launches["signature"].isin(kinds)]
        kind_of = dict(zip(early["invocation"], early["signature"], strict=True))
        planned = [number for number in sorted(report.invocations) if number in kind_of]
        for numbers in (sorted(kind_of), planned):
            if numbers and len(numbers) == len(results):
                result_of = [*zip(results, (kind_of[number] for number in numbers), strict=True)]
                for kind in kinds:
                    results_of[kind] = [result for result, its_kind in result_of if its_kind == kind]
    return results_of


def _plain(name: str) -> str:
    """A kernel's name in a form common to nsys and ncu: without namespaces and casts of template arguments.

    When ncu prints a report, it omits some of these (``--rename-kernels``, the default since 2024.2).
    """
    plain = _SPACES.sub(" ", name).replace("(anonymous namespace)", "<unnamed>").strip()
    return _NAMESPACES.sub("", _CASTS.sub("", plain))
