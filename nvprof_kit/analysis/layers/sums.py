"""Sums of operations and ranges by (layer, phase) and step.

Everything is one array of shape ``(keys, columns)``: a key is a (layer, phase) pair, a column is a step, column 0
being "outside steps"; without steps there is column 0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.attribution.attribution import Attribution
from nvprof_kit.analysis.attribution.intervals import alone, exact_sums, union_lengths
from nvprof_kit.analysis.attribution.nesting import NONE, Int64Array, Integers, inherit
from nvprof_kit.analysis.attribution.ranges import Ranges, steps_around
from nvprof_kit.analysis.attribution.windows import devices_of
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES
from nvprof_kit.trace.schema import Trace


class Outside(NamedTuple):
    """What lies outside every layer, in one phase, over all steps."""

    calls: int
    ops: int
    self_ns: int
    cpu_ns: int


@dataclass(frozen=True)
class LayerSums:
    """The sums; arrays are int64 of shape ``(keys, columns)``.

    Attributes:
        keys: The (layer, phase) pairs; those of `NO_LAYER` come last.
        steps: Step number of each column but the first.
        loop_phases: Texts of the phase ranges, by their first start.
        calls, ops, self_ns, total_ns, busy_ns, cpu_ns: The columns of the per-layer table.
    """

    keys: list[tuple[str, str]]
    steps: Int64Array
    loop_phases: tuple[str, ...]
    calls: Int64Array
    ops: Int64Array
    self_ns: Int64Array
    total_ns: Int64Array
    busy_ns: Int64Array
    cpu_ns: Int64Array

    @cached_property
    def layers(self) -> list[str]:
        """The distinct layers, without `NO_LAYER`."""
        return list(dict.fromkeys(layer for layer, _ in self.keys if layer != NO_LAYER))

    @cached_property
    def _index(self) -> dict[tuple[str, str], int]:
        return {key: index for index, key in enumerate(self.keys)}

    def own(self, layer: str, phase: str) -> int:
        """Time of a layer's own operations of one phase over all steps, in ns."""
        key = self._index.get((layer, phase))
        return int(self.self_ns[key].sum()) if key is not None else 0

    def over_phases(self, values: Int64Array, layer: str) -> dict[str, int]:
        """One of the arrays summed over steps, for each phase that the layer has."""
        keys = {category.value: self._index.get((layer, category.value)) for category in LAYER_CATEGORIES}
        return {phase: int(values[key].sum()) for phase, key in keys.items() if key is not None}

    def outside(self, phase: str) -> Outside:
        """What lies outside every layer in one phase."""
        key = self._index.get((NO_LAYER, phase))
        return Outside(
            *(
                int(values[key].sum()) if key is not None else 0
                for values in (self.calls, self.ops, self.self_ns, self.cpu_ns)
            )
        )


def sum_layers(trace: Trace, attribution: Attribution, *, by_step: bool) -> LayerSums:
    """Sum a capture's operations and ranges by layer, phase and, where asked, step."""
    ranges = attribution.ranges
    keyed = _keyed(ranges, attribution)
    columns = len(ranges.steps) + 1 if by_step else 1
    cells = (len(keyed.keys), columns)
    count = len(keyed.keys) * columns
    start, end = (trace.ops[name].to_numpy() for name in ("start_ns", "end_ns"))
    device = devices_of(trace)[1]
    duration = end - start
    column: Integers = attribution.step + 1 if by_step else np.zeros(len(duration), dtype=np.int64)
    inside = attribution.layer_range >= 0
    own_key = np.where(
        inside, np.append(keyed.of_range, NONE)[attribution.layer_range], keyed.outside[attribution.phase]
    )
    cell = own_key * columns + column
    self_ns = exact_sums(cell, duration, count)
    free = alone(start, end, device)

    chains = _Chains(ranges, keyed, columns)
    held = chains.group(
        attribution.layer_range[inside], column[inside], duration[inside], np.where(free, duration, 0)[inside]
    )
    total_ns, busy_ns = chains.totals(held)
    outside_cells = ~np.repeat([layer != NO_LAYER for layer, _ in keyed.keys], columns)
    total_ns[outside_cells] = self_ns[outside_cells]
    busy_ns += exact_sums(cell[~inside & free], duration[~inside & free], count)
    crowd = np.flatnonzero(~free)
    if len(crowd):
        op, group = chains.memberships(crowd, attribution.layer_range[crowd], column[crowd], own_key[crowd])
        busy_ns += union_lengths(start[op], end[op], device[op], group, count)
    calls, cpu_ns = _range_sums(ranges, keyed, columns)
    calls += chains.replays(attribution.replay, attribution.layer_range, column)
    return LayerSums(
        keys=keyed.keys,
        steps=ranges.steps if by_step else ranges.steps[:0],
        loop_phases=keyed.loop_phases,
        calls=calls.reshape(cells),
        ops=np.bincount(cell, minlength=count).reshape(cells),
        self_ns=self_ns.reshape(cells),
        total_ns=total_ns.reshape(cells),
        busy_ns=busy_ns.reshape(cells),
        cpu_ns=cpu_ns.reshape(cells),
    )


# ---------------------------------------------------------------- keys


@dataclass(frozen=True)
class _Keyed:
    """The keys and which of them a range or an operation outside layers counts for.

    `of_range` is `NONE` for a range that is neither a layer's nor a phase's. `repeats` marks a range inside
    another one of its key: its time is counted with the outer one.
    """

    keys: list[tuple[str, str]]
    of_range: Int64Array
    repeats: npt.NDArray[np.bool_]
    outside: Int64Array
    loop_phases: tuple[str, ...]


def _keyed(ranges: Ranges, attribution: Attribution) -> _Keyed:
    is_layer, is_phase = ranges.is_one_of(LAYER_CATEGORIES), ranges.is_one_of(PHASE_CATEGORIES)
    text = np.array([named.text for named in ranges.names], dtype=object)
    by_time = np.argsort(ranges.start, kind="stable")
    loop_phases = tuple(dict.fromkeys(ranges.phase[by_time[is_phase[by_time]]].tolist()))
    layer_code = np.where(is_layer, ranges.name, NONE)
    phase_code = {phase: code for code, phase in enumerate(attribution.phases)}
    pair = layer_code * len(attribution.phases) + _codes(ranges.phase, phase_code)
    pairs = np.unique(pair[is_layer])
    merged: dict[tuple[str, str], int] = {}
    place = [
        merged.setdefault(
            (text[one // len(attribution.phases)], attribution.phases[one % len(attribution.phases)]), len(merged)
        )
        for one in pairs.tolist()
    ]
    of_range = np.full(len(pair), NONE, dtype=np.int64)
    of_range[is_layer] = np.array(place, dtype=np.int64)[np.searchsorted(pairs, pair[is_layer])]
    outside = np.full(len(attribution.phases), NONE, dtype=np.int64)
    for phase in dict.fromkeys((*loop_phases, *attribution.phases, NO_PHASE)):
        if phase:
            outside[phase_code[phase]] = merged.setdefault((NO_LAYER, phase), len(merged))  # a range may be called so
    of_range[is_phase] = outside[_codes(ranges.phase[is_phase], phase_code)]
    return _Keyed(
        keys=list(merged),
        of_range=of_range,
        repeats=_inside_its_like(of_range, ranges),
        outside=outside,
        loop_phases=loop_phases,
    )


def _codes(values: npt.NDArray[Any], codes: dict[str, int]) -> Int64Array:
    return np.array([codes[value] for value in values.tolist()], dtype=np.int64)


def _inside_its_like(label: Int64Array, ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Which ranges lie, at any depth, inside a range of the same label."""
    parent = ranges.nesting.parent
    nearest = np.append(inherit(np.where(label >= 0, np.arange(len(label)), NONE), ranges.nesting), NONE)
    result = np.zeros(len(label), dtype=bool)
    current = nearest[parent]
    while (current >= 0).any():
        result |= (current >= 0) & (label >= 0) & (np.append(label, NONE)[current] == label)
        current = nearest[np.append(parent, NONE)[current]]
    return result


# ---------------------------------------------------------------- chains of layers


class _Held(NamedTuple):
    """Operations grouped by (layer's range, column): shape ``(g,)`` each, times in ns."""

    layer_range: Int64Array
    column: Int64Array
    duration: Int64Array
    free: Int64Array


@dataclass(frozen=True)
class _Chains:
    """Walks from an operation's layer outwards over the layers that enclose it, all operations at once, a level at
    a time.
    """

    ranges: Ranges
    keyed: _Keyed
    columns: int

    @cached_property
    def _outer(self) -> Int64Array:
        """For each range the next layer's range around it; `NONE` behind the last, so that index `NONE` finds
        `NONE`.
        """
        parent = self.ranges.nesting.parent
        return np.append(np.append(self.ranges.layer_range, NONE)[parent], NONE)

    @property
    def _cells(self) -> int:
        return len(self.keyed.keys) * self.columns

    def group(self, layer_range: Integers, column: Integers, duration: Int64Array, free: Int64Array) -> _Held:
        """Sum operations by the layer's range and column they belong to, before walking: ranges are few,
        operations many.
        """
        if self.columns == 1:
            count = len(self.ranges.start)
            sums = (exact_sums(layer_range, values, count) for values in (duration, free))
            return _Held(np.arange(count), np.zeros(count, dtype=np.int64), *sums)
        pairs, which = np.unique(layer_range.astype(np.int64) * self.columns + column, return_inverse=True)
        sums = (exact_sums(which, values, len(pairs)) for values in (duration, free))
        return _Held(pairs // self.columns, pairs % self.columns, *sums)

    def totals(self, held: _Held) -> tuple[Int64Array, Int64Array]:
        """Time of all operations, and of those that overlap no other, nested in each cell."""
        total, free = (np.zeros(self._cells, dtype=np.int64) for _ in range(2))
        current = np.where(held.duration + held.free > 0, held.layer_range, NONE)
        while (here := np.flatnonzero(current >= 0)).size:
            counted = here[~self.keyed.repeats[current[here]]]
            cell = self.keyed.of_range[current[counted]] * self.columns + held.column[counted]
            total += exact_sums(cell, held.duration[counted], self._cells)
            free += exact_sums(cell, held.free[counted], self._cells)
            current = self._outer[current]
        return total, free

    def memberships(
        self, ops: Int64Array, layer_range: Integers, column: Integers, own_key: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Every (operation, cell) such that the operation is nested in the cell's ranges, or is the cell's own
        outside layers.
        """
        loose = layer_range == NONE
        op, cell = [ops[loose]], [(own_key * self.columns + column)[loose]]
        current = layer_range
        while (here := np.flatnonzero(current >= 0)).size:
            counted = here[~self.keyed.repeats[current[here]]]
            op.append(ops[counted])
            cell.append(self.keyed.of_range[current[counted]] * self.columns + column[counted])
            current = self._outer[current]
        return np.concatenate(op), np.concatenate(cell)

    def replays(self, replay: Integers, layer_range: Integers, column: Integers) -> Int64Array:
        """Times that CUDA-graph replays ran each cell: once for each replay that ran an operation nested in it."""
        ran = np.flatnonzero((replay >= 0) & (layer_range >= 0))
        replay = replay.astype(np.int64)  # products of counts do not fit 32 bits
        _, first = np.unique(replay[ran] * len(self.ranges.start) + layer_range[ran], return_index=True)
        one = ran[first]
        op, cell = self.memberships(one, layer_range[one], column[one], np.zeros(len(one), dtype=np.int64))
        seen = np.unique(replay[op] * self._cells + cell)
        return np.bincount(seen % self._cells, minlength=self._cells)


def _range_sums(ranges: Ranges, keyed: _Keyed, columns: int) -> tuple[Int64Array, Int64Array]:
    """Number of ranges of each cell, and the CPU time inside them, a range inside another of its key counted with
    that one.
    """
    mine = np.flatnonzero(keyed.of_range >= 0)
    column = steps_around(ranges, mine) + 1 if columns > 1 else np.zeros(len(mine), dtype=np.int64)
    cell = keyed.of_range[mine] * columns + column
    cells = len(keyed.keys) * columns
    length = np.where(keyed.repeats[mine], 0, ranges.end[mine] - ranges.start[mine])
    return np.bincount(cell[ranges.first[mine]], minlength=cells), exact_sums(cell, length, cells)
