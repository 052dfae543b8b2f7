"""Sums of what was counted, by layer and phase: a range's own operations, and all that ran inside it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nvprof_kit._analysis.layers.tree import parents_of, with_ancestors
from nvprof_kit._trace.flops_file import FlopsFile
from nvprof_kit.names import NO_LAYER, Category

Key = tuple[str, str]
"""Layer and phase."""

Work = dict[str, float]
"""Floating point operations by type of number."""


class Operator(NamedTuple):
    """All runs of an operator with the same work in the same ranges.

    Attributes:
        dtype: Type of the multiplied numbers, '' if it multiplies no matrices.
        flops: Floating point operations, without what a causal mask leaves out.
        bytes: Bytes of its inputs and outputs, each storage once.
        dram_bytes: Bytes of these that the L2 cannot hold.
    """

    dtype: str
    flops: float
    bytes: float
    dram_bytes: float


Chain = tuple[Key, ...]
"""A range and those around it, innermost first."""


@dataclass(frozen=True)
class Counted:
    """What was counted.

    Attributes:
        steps: Steps that were counted; 0 where there were none.
        calls: How often each (layer, phase) ran; 0 for one that only layers inside it ran in.
        work: Every operation once, by the ranges that it ran in.
        unknown: Names of operators whose work is not known, the same way.
        attention: The ranges that fused attention was counted in.
        chains: All ranges, also those without an operation.
        traffic: Work and memory traffic of every operator, by the ranges that it ran in; None if not counted.
    """

    steps: int
    calls: Mapping[Key, int]
    work: Mapping[Chain, Work]
    unknown: Mapping[Chain, set[str]]
    attention: frozenset[Chain] = frozenset()
    chains: tuple[Chain, ...] = ()
    traffic: Mapping[Chain, Sequence[Operator]] | None = None

    @cached_property
    def _parent(self) -> dict[str, str]:
        """The layer that holds each layer, '' at the top: what `layer_order.parents` is for a capture."""
        forward = Category.FORWARD.value
        enclosed = (
            (chain[0][0], chain[1][0] if len(chain) > 1 and chain[1][1] == forward else "", 1)
            for chain in self.chains
            if chain[0][1] == forward and chain[0][0] != NO_LAYER
        )
        return parents_of(dict.fromkeys(layer for chain in self.chains for layer, _ in chain), enclosed)

    def with_holders(self, keys: Iterable[Key]) -> Counted:
        """The same, with rows that may have no call of their own and hold what ran in the layers inside them."""
        return replace(self, calls={**dict.fromkeys(keys, 0), **self.calls})

    def rows_of(self, chain: Chain) -> list[Key]:
        """The rows that include the work in these ranges: its layer's row, and in the same phase those of the layers
        that contain it in the model, as for time (`nvprof_kit._analysis.layers.sums`).
        """
        layer, phase = chain[0]
        if layer == NO_LAYER:
            return [chain[0]]
        ancestors = with_ancestors(layer, self._parent)
        return [(ancestor, phase) for ancestor in ancestors if ancestor == layer or (ancestor, phase) in self.calls]

    def nested(
        self,
        work: Mapping[Chain, Work] | None = None,
        *,
        model: bool = False,
        times: Mapping[Key, float] | None = None,
    ) -> dict[Key, Work]:
        """Operations of each (layer, phase) with those of the layers it holds; see `rows_of`.

        Args:
            work: Other amounts than `work`, by the ranges that they belong to.
            model: Without what ran in a recompute.
            times: How often what each (layer, phase) did happened; once by default.
        """
        work = self.work if work is None else work
        sums: dict[Key, Work] = {}
        for chain in dict.fromkeys((*work, *self.chains)):
            often = 1.0 if times is None else times.get(chain[0], math.nan)
            if math.isnan(often):
                continue
            left_out = model and computed_again(chain) is not None
            for key in self.rows_of(chain):
                add(sums.setdefault(key, {}), {} if left_out else work.get(chain, {}), often)
        return sums

    def nested_unknown(self) -> dict[Key, set[str]]:
        """Names of the operators in each (layer, phase) whose work is not known."""
        names: dict[Key, set[str]] = {}
        for chain, unknown in self.unknown.items():
            for key in self.rows_of(chain):
                names.setdefault(key, set()).update(unknown)
        return names

    def nested_attention(self) -> frozenset[Key]:
        """Each (layer, phase) that fused attention was counted in."""
        return frozenset(key for chain in self.attention for key in self.rows_of(chain))

    def with_own_work(self, rows: Container[Key]) -> set[Key]:
        """Which of these rows have an operation of their own, known or not, outside the rows nested in them."""
        chains = [chain for chain, work in self.work.items() if any(work.values())]
        return {next((key for key in chain if key in rows), chain[0]) for chain in (*chains, *self.unknown)}


def read_counted(counts: FlopsFile) -> Counted:
    """Sum up a file of counts."""
    chains = _chains(counts)
    calls: dict[Key, int] = {}
    for chain, count in zip(chains, counts.ranges["calls"].tolist(), strict=True):
        calls[chain[0]] = calls.get(chain[0], 0) + count
    work: dict[Chain, Work] = {}
    attention: set[Chain] = set()
    columns = ("range", "name", "dtype", "flops")
    for number, name, dtype, flops in zip(*(counts.operators[column].tolist() for column in columns), strict=True):
        if flops:
            add(work.setdefault(chains[number], {}), {dtype: flops})
        if flops and "attention" in name:
            attention.add(chains[number])
    unknown: dict[Chain, set[str]] = {}
    for number, name in zip(counts.unknown["range"].tolist(), counts.unknown["name"].tolist(), strict=True):
        unknown.setdefault(chains[number], set()).add(name)
    traffic: dict[Chain, list[Operator]] | None = {} if counts.has_bytes else None
    if traffic is not None:
        amounts = counts.operators[["dtype", "least_flops", "bytes", "dram_bytes"]]
        for number, operator in zip(counts.operators["range"].tolist(), amounts.itertuples(index=False), strict=True):
            traffic.setdefault(chains[number], []).append(Operator(*operator))
    return Counted(counts.steps, calls, work, unknown, frozenset(attention), tuple(chains), traffic)


def computed_again(chain: Chain) -> str | None:
    """The outermost layer that activation checkpointing was recomputing in these ranges; None if none."""
    return next((layer for layer, phase in reversed(chain) if phase == Category.RECOMPUTE.value), None)


def add(work: Work, more: Work, times: float = 1.0) -> None:
    """Add `more`, taken so many times, to `work`."""
    for dtype, flops in more.items():
        work[dtype] = work.get(dtype, 0.0) + flops * times


def _chains(counts: FlopsFile) -> list[Chain]:
    """For each range the ranges around it, itself first."""
    chains: list[Chain] = []
    columns = ("layer", "phase", "inside")
    for layer, phase, inside in zip(*(counts.ranges[name].tolist() for name in columns), strict=True):
        chains.append(((layer, phase), *(chains[inside] if inside >= 0 else ())))
    return chains
