"""Key figures of a sampled window for a monitoring system: time by kind of layer and phase, per step.

A monitoring system stores a time series for each set of labels, so their number is limited: a kind is a layer path with
stars for numbers, ``layers.*.self_attn``, and the number of distinct kinds is capped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nvprof_kit._analysis.attribution.attribution import attribute
from nvprof_kit._analysis.attribution.step_times import step_times
from nvprof_kit._analysis.layers.layers import LAYER_PHASES, LayersOptions, layers
from nvprof_kit._trace.schema import Trace
from nvprof_kit.names import NO_LAYER, NO_PHASE

OTHERS = "(other)"
"""Label for kinds or phases beyond the limit."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_PHASES = 16


class Bounded:
    """The values of a label: the first `most` values are kept, later ones become `OTHERS`.

    Args:
        most: Maximum number of values.
        known: Values that are known from the start.
    """

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self._most, self._known = most, dict.fromkeys(known)

    def __call__(self, value: str) -> str:
        """The value, or `OTHERS`."""
        if value not in self._known and len(self._known) < self._most:
            self._known[value] = None
        return value if value in self._known else OTHERS


class Labels:
    """The labels of all windows of a program.

    Args:
        kinds: Maximum number of kinds of layers.
    """

    def __init__(self, kinds: int) -> None:
        self.kind = Bounded(max(kinds, 1), [NO_LAYER])
        self.phase = Bounded(_PHASES, [*LAYER_PHASES, "optimizer", "data", NO_PHASE])


@dataclass(frozen=True)
class Sample:
    """One window; times per step in seconds.

    Attributes:
        layers: Time of the operations by kind of layer and phase; they add up to the step's total.
        step: Duration of a step, None without steps.
        busy: Share of it in which the GPU was busy, None without steps or a GPU.
        in_layers: Share of the operations' time in a named layer.
        device: ``gpu``, or ``cpu`` for the operators of a CPU-only recording.
    """

    layers: dict[tuple[str, str], float]
    step: float | None
    busy: float | None
    in_layers: float
    device: str


def kind_of(layer: str) -> str:
    """The kind of a layer: its path, with stars for numbers."""
    return _NUMBER.sub("*", layer)


def sample(trace: Trace, labels: Labels) -> Sample:
    """Compute the figures of a recorded window; if it has steps, the mean over them.

    Args:
        trace: The window.
        labels: The program's labels.
    """
    attribution = attribute(trace)
    rows = layers(trace, LayersOptions(by_step=True), attribution).rows
    times = step_times(trace, attribution)
    if len(times):
        rows = rows[rows["step"].notna()]
    count = max(len(times), 1)
    rows = rows.groupby(["layer", "phase"], observed=True)["gpu_self_ns"].sum().reset_index()
    rows = rows.sort_values("gpu_self_ns", ascending=False)  # the most expensive kinds keep their names
    found: dict[tuple[str, str], float] = {}
    named = 0
    for layer, phase, ns in zip(*(rows[name].tolist() for name in ("layer", "phase", "gpu_self_ns")), strict=True):
        key = labels.kind(kind_of(str(layer))), labels.phase(str(phase))
        found[key] = found.get(key, 0.0) + int(ns) / count / 1e9
        named += int(ns) * (layer != NO_LAYER)
    wall = int(times["wall_ns"].sum()) if len(times) else 0
    return Sample(
        layers=found,
        step=wall / count / 1e9 if wall else None,
        busy=int(times["busy_ns"].sum()) / wall if wall and trace.info.on_gpu else None,
        in_layers=named / max(int(rows["gpu_self_ns"].sum()), 1),
        device="gpu" if trace.info.on_gpu else "cpu",
    )
