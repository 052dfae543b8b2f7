"""GPU time as stacks for flame graphs: pprof's ``profile.proto``, and folded stacks.

``go tool pprof``, Pyroscope, Speedscope and Perfetto read the former; ``flamegraph.pl``, inferno and Speedscope the
latter. Field numbers are from ``proto/profile.proto`` of pprof.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nvprof_kit._analysis.stacks import frames
from nvprof_kit._report.export import wire
from nvprof_kit._result.plain import plain, title
from nvprof_kit._trace.schema import CaptureInfo

if TYPE_CHECKING:
    import pandas as pd

_SAMPLE_TYPE, _SAMPLE, _MAPPING, _LOCATION, _FUNCTION, _STRING = 1, 2, 3, 4, 5, 6
_DURATION, _PERIOD_TYPE, _PERIOD, _COMMENT, _DEFAULT = 10, 11, 12, 13, 14
_VALUES = (("gpu_time", "nanoseconds"), ("gpu_ops", "count"))


class _Row(NamedTuple):
    """A row of `nvprof_kit._analysis.stacks.stacks`."""

    layer: str
    phase: str
    kernel: str
    kernel_class: str
    gpu_ops: int
    gpu_self_ns: int


class _Profile:
    """A profile under construction, with its string and location tables."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {"": 0}
        self._places: dict[tuple[str, str], int] = {}
        self.fields: list[bytes] = []

    def string(self, text: str) -> int:
        """Index of a string; adds the string if needed. ``go tool pprof -top`` prints it to a terminal."""
        text = title(text)
        return self._strings.setdefault(text, len(self._strings))

    def add(self, field: int, content: bytes | int) -> None:
        """Append a field to the profile."""
        self.fields.append(wire.number(field, content) if isinstance(content, int) else wire.text(field, content))

    def location(self, name: str, where: str) -> int:
        """Id of a frame; adds the frame if needed.

        Args:
            name: Name of the function: modules with the same name are one function, as are calls of the same kernel.
            where: Path of the module, used as the function's file name.
        """
        key = name, where
        if key not in self._places:
            self._places[key] = place = len(self._places) + 1
            function = wire.number(1, place) + wire.number(2, self.string(name)) + wire.number(4, self.string(where))
            self.add(_FUNCTION, function)
            self.add(_LOCATION, wire.number(1, place) + wire.number(2, 1) + wire.text(4, wire.number(1, place)))
        return self._places[key]

    def encoded(self) -> bytes:
        """The encoded message."""
        return b"".join([*self.fields, *(wire.text(_STRING, one) for one in self._strings)])


def pprof(rows: pd.DataFrame, info: CaptureInfo, length_ns: int) -> bytes:
    """The stacks as a gzipped profile with GPU time and number of operations; labels give layer, phase and class.

    Args:
        rows: Result of `nvprof_kit._analysis.stacks.stacks`.
        info: Information about the capture.
        length_ns: Duration of the capture.
    """
    profile = _Profile()
    for kind, unit in _VALUES:
        profile.add(_SAMPLE_TYPE, wire.number(1, profile.string(kind)) + wire.number(2, profile.string(unit)))
    named = wire.number(5, profile.string(Path(info.path).name)) + wire.number(7, 1)  # has_functions: no symbol lookup
    profile.add(_MAPPING, wire.number(1, 1) + named)
    for row in _rows(rows):
        stack = frames(row.layer, row.phase, row.kernel)
        depth = len(stack) - 2
        paths = [".".join(row.layer.split(".")[: place + 1]) for place in range(depth)] + [""] * 2
        places = [profile.location(name, where) for name, where in zip(stack, paths, strict=True)]
        labels = {"layer": row.layer, "phase": row.phase, "class": row.kernel_class}
        profile.add(
            _SAMPLE,
            wire.packed(1, places[::-1])
            + wire.packed(2, (row.gpu_self_ns, row.gpu_ops))
            + b"".join(
                wire.text(3, wire.number(1, profile.string(key)) + wire.number(2, profile.string(value)))
                for key, value in labels.items()
            ),
        )
    profile.add(_DURATION, length_ns)
    kind, unit = _VALUES[0]  # each nanosecond counts: Pyroscope opens no file without a period
    profile.add(_PERIOD_TYPE, wire.number(1, profile.string(kind)) + wire.number(2, profile.string(unit)))
    profile.add(_PERIOD, 1)
    for comment in (f"{info.tool}: {info.path}", *info.warnings):
        profile.add(_COMMENT, profile.string(comment))
    profile.add(_DEFAULT, profile.string(_VALUES[0][0]))
    return gzip.compress(profile.encoded(), mtime=0)


def folded(rows: pd.DataFrame) -> bytes:
    """The stacks as lines: frames from the root separated by semicolons, a space, GPU time in ns."""
    lines = [
        f"{';'.join(_plain(one) for one in frames(row.layer, row.phase, row.kernel))} {row.gpu_self_ns}\n"
        for row in _rows(rows)
    ]
    return "".join(lines).encode("utf-8", "replace")


def _rows(rows: pd.DataFrame) -> list[_Row]:
    return [_Row(*row) for row in zip(*(rows[name].tolist() for name in _Row._fields), strict=True)]


def _plain(frame: str) -> str:
    """A frame without separator characters."""
    return plain(" ".join(frame.replace(";", ":").split()))
