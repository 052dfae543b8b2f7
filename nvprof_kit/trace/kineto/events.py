"""The events of a Kineto trace, sorted by what they are. Times are microseconds with three decimals in the file, and
whole nanoseconds here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nvprof_kit.names import DOMAIN

Event = dict[str, Any]
Int64Array = npt.NDArray[np.int64]

GPU_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of what ran on the GPU, and the kind of operation each is."""

_ANNOTATION, _OPERATOR, _PYTHON, _ARROW = "user_annotation", "cpu_op", "python_function", "fwdbwd"
_CALLS = ("cuda_runtime", "cuda_driver")
_OLDER = {"operator": _OPERATOR, "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_OURS = f"{DOMAIN}:"


@dataclass(frozen=True)
class Events:
    """The complete ("X") events of a trace by category, and its arrows from forward to backward."""

    by_category: Mapping[str, list[Event]]
    arrows: list[Event]

    @classmethod
    def of(cls, events: Iterable[Any]) -> Events:
        """Sort the events of a trace. Older versions wrote the categories with capitals; our ranges come as operators,
        which costs the recorder least, and count as annotations.
        """
        found: dict[str, list[Event]] = {}
        arrows: list[Event] = []
        for event in events:
            if not isinstance(event, dict) or "ts" not in event:
                continue
            category = str(event.get("cat", "")).lower()
            if event.get("ph") == "X":
                ours = str(event.get("name", "")).startswith(_OURS)
                found.setdefault(_ANNOTATION if ours else _OLDER.get(category, category), []).append(event)
            elif category == _ARROW:
                arrows.append(event)
        return cls(found, arrows)

    @property
    def gpu(self) -> list[tuple[str, list[Event]]]:
        """What ran on the GPU: kind of operation and events."""
        return [(kind, self.by_category.get(category, [])) for category, kind in GPU_CATEGORIES.items()]

    @property
    def calls(self) -> list[Event]:
        """Calls of the CUDA runtime and driver."""
        return [event for category in _CALLS for event in self.by_category.get(category, [])]

    @property
    def operators(self) -> list[Event]:
        """Operators on the CPU, our ranges not among them."""
        return self.by_category.get(_OPERATOR, [])

    @property
    def annotations(self) -> list[Event]:
        """What the program annotated, our ranges among it."""
        return self.by_category.get(_ANNOTATION, [])

    @property
    def python(self) -> list[Event]:
        """Calls of Python functions and modules, in a trace with stacks."""
        return self.by_category.get(_PYTHON, [])


def number(value: Any) -> int:
    """A whole number that the file may hold as a text; 0 for what is none."""
    return value if isinstance(value, int) else int(value) if str(value).lstrip("-").isdecimal() else 0


def numbers(events: list[Event], name: str, missing: int = -1) -> Int64Array:
    """One of the arguments of the events."""
    return np.array([number(event.get("args", {}).get(name, missing)) for event in events], dtype=np.int64)


def threads(events: list[Event]) -> Int64Array:
    """The threads of the events."""
    return np.array([number(event.get("tid")) for event in events], dtype=np.int64)


def times(events: list[Event]) -> tuple[Int64Array, Int64Array]:
    """Start and end of the events in ns."""
    start = np.rint(np.array([event["ts"] for event in events], dtype=np.float64) * 1000).astype(np.int64)
    length = np.rint(np.array([event.get("dur", 0) for event in events], dtype=np.float64) * 1000).astype(np.int64)
    return start, start + length
