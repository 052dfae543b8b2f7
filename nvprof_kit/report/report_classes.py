"""Time by class of kernel, as the page draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nvprof_kit.analysis.intervals import exact_sums
from nvprof_kit.analysis.kernel_classes import CLASSES, Rule, classify
from nvprof_kit.report.units import Milliseconds, percent
from nvprof_kit.trace.schema import Trace


@dataclass(frozen=True)
class ClassTimes:
    """Time by class of kernel.

    Attributes:
        gpu_ns: The classes that took time, with it in ns; the costliest first.
        doubts: That some kernels matched no rule.
    """

    gpu_ns: dict[str, int]
    doubts: tuple[str, ...] = ()


def class_times(trace: Trace, own_rules: tuple[Rule, ...] = ()) -> ClassTimes | None:
    """Time by class of kernel; None where the capture has no kernels.

    Args:
        trace: The capture, with the column ``name``.
        own_rules: Rules asked before the package's.
    """
    if not trace.info.on_gpu:
        return None
    found = classify(trace.ops, own_rules)
    length = (trace.ops["end_ns"] - trace.ops["start_ns"]).to_numpy()
    sums = exact_sums(found.code.astype(np.int64), length, len(CLASSES)).tolist()
    took = [(name, ns) for name, ns in zip(CLASSES, sums, strict=True) if ns > 0]
    return ClassTimes(dict(sorted(took, key=lambda one: -one[1])), found.doubts(sum(sums)))


def class_bars(times: ClassTimes | None, steps: int) -> list[dict[str, Any]]:
    """A row of the page for each class: name, time per step, percent, and width of its bar in percent."""
    if times is None or not times.gpu_ns:
        return []
    whole, longest = sum(times.gpu_ns.values()), max(times.gpu_ns.values())
    ms = Milliseconds.for_total(whole, max(steps, 1))
    return [
        {"name": name, "time": ms(ns), "percent": percent(ns / whole), "width": f"{100 * ns / longest:.2f}"}
        for name, ns in times.gpu_ns.items()
    ]
