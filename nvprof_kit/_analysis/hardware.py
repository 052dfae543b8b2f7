"""Peak figures of GPUs, and link bandwidths: to the host by PCIe or NVLink-C2C, to other GPUs by NVLink.

The link figures are data (`gpu_links.toml`, in the package), with their sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from nvprof_kit._toml import read_toml
from nvprof_kit.errors import CaptureError, UsageError
from nvprof_kit.names import PEAKS_FILE

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
"""The data types with peaks."""


@dataclass(frozen=True)
class Peaks:
    """The peak throughput of a GPU.

    Attributes:
        name: Name of the GPU.
        flops: Operations per second without sparsity, by data type.
        bandwidth: Memory bandwidth in bytes per second, 0 if unknown.
        source: The document that states the figures.
        measured: Which figures `nvprof-kit doctor --measure` measured: data types, and ``memory`` for the bandwidth.
        files: The file that these were read from.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float = 0.0
    source: str = ""
    measured: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @classmethod
    def measured_in(cls, path: Path, gpu: str) -> Peaks | None:
        """What was measured of a GPU; None without a file, or if it is of another GPU."""
        if not path.is_file():
            return None
        try:
            figures = json.loads(path.read_bytes())
            flops = {dtype: float(figures["flops"][dtype]) for dtype in DTYPES if dtype in figures["flops"]}
            bandwidth = float(figures["bandwidth"])
            if not all(1e9 <= number < 1e18 for number in (*flops.values(), bandwidth)):
                raise ValueError("a figure is not between 1e9 and 1e18 a second")
            peaks = cls(gpu, flops, bandwidth, "measured", (*flops, "memory"), (path,))
            return peaks if figures["gpu"] == gpu else None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CaptureError.of("no-peaks", path=path, error=error) from None


_data = partial(read_toml, "nvprof_kit._analysis", "gpu_links.toml")


@lru_cache(maxsize=1)
def known_gpus() -> tuple[tuple[re.Pattern[str], Peaks], ...]:
    """The GPUs that the package knows, each with a pattern for the device names that CUDA reports."""
    gpus = []
    for row in read_toml("nvprof_kit._analysis", "gpu_peaks.toml")["gpu"]:
        flops = {str(dtype): float(tera) * 1e12 for dtype, tera in row["tflops"].items()}
        peaks = Peaks(row["name"], flops, float(row["gbytes"]) * 1e9, str(row["source"]))
        gpus.append((re.compile(row["match"]), peaks))
    return tuple(gpus)


def peaks_of(
    gpus: Iterable[str], user_peaks: Mapping[str, float] | None = None, capture: str | Path | None = None
) -> Peaks | None:
    """The peaks of a capture's GPUs; None if unknown.

    Args:
        gpus: Their names; if they are different models, the peaks are unknown.
        user_peaks: FLOP/s by data type from the user; they override all others.
        capture: The capture. What `nvprof-kit doctor --measure` left beside it overrides the built-in figures.

    Raises:
        CaptureError: The file of measured peaks is damaged.
    """
    names = sorted(set(gpus))
    peaks = measured = None
    if len(names) == 1:
        peaks = next((peaks for match, peaks in known_gpus() if match.search(names[0])), None)
        measured = None if capture is None else Peaks.measured_in(Path(capture).with_name(PEAKS_FILE), names[0])
    if measured is not None and peaks is not None:
        measured = replace(measured, name=peaks.name, flops={**peaks.flops, **measured.flops})
    peaks = measured or peaks
    if not user_peaks:
        return peaks
    if peaks is None:
        return Peaks(", ".join(names) or "the GPU", dict(user_peaks), source="--peak")
    return replace(peaks, flops={**peaks.flops, **user_peaks}, source=f"{peaks.source}; --peak")


def parse_peak(text: str) -> tuple[str, float]:
    """Parse a peak from the user, ``bf16=989e12``.

    Raises:
        UsageError: The text has another form.
    """
    dtype, _, number = text.partition("=")
    try:
        flops = float(number)
    except ValueError:
        flops = 0.0
    if dtype not in DTYPES or not 1e9 <= flops < 1e18:
        raise UsageError.of("peak", text=text, types=", ".join(DTYPES))
    return dtype, flops


class Link(NamedTuple):
    """A link's name, '' if unknown, and its peak bandwidth in one direction in 10⁹ bytes per second."""

    name: str
    gb_per_s: float


UNKNOWN = Link("", float("nan"))


def link_of(gpu: str, copy: str) -> Link:
    """The link that a copy uses; `UNKNOWN` inside one GPU, and for a GPU that is not in the data.

    Args:
        gpu: The GPU's name, as in the capture.
        copy: The kind of copy: ``memcpy HtoD``, ``Memcpy PtoP (Device -> Device)``.
    """
    entry = _entry_of(gpu)
    if re.search(r"\b(HtoD|DtoH)\b", copy) and entry:
        return Link(entry["host"], _data()["link"][entry["host"]])
    if re.search(r"\bPtoP\b", copy) and "peer" in entry:
        return Link("NVLink", entry["peer"])
    return UNKNOWN


def fastest_link(gpu: str) -> Link:
    """The fastest link to another GPU: NVLink, or that to the host where the GPU has none; `UNKNOWN` if it is not in
    the data. Other nodes are behind slower ones.
    """
    nvlink, entry = link_of(gpu, "PtoP"), _entry_of(gpu)
    return link_of(gpu, "HtoD") if entry and nvlink is UNKNOWN else nvlink


@lru_cache
def _entry_of(gpu: str) -> dict[str, Any]:
    return next((entry for entry in _data()["gpu"] if re.search(entry["match"], gpu)), {})
