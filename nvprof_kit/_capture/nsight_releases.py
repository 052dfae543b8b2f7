"""Nsight releases by CUDA version, from `nsight_releases.toml`, which lists its sources."""

from __future__ import annotations

import re
from functools import partial

from nvprof_kit._toml import read_toml

_table = partial(read_toml, "nvprof_kit._capture", "nsight_releases.toml")


def numbers(version: str) -> tuple[int, ...]:
    """A version as a comparable tuple: ``2023.4.4`` gives ``(2023, 4, 4)``."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def cuda_of(tool: str, version: str) -> str | None:
    """The newest CUDA version, for example ``12.4``, with a toolkit that had no newer release of the tool.

    Args:
        tool: ``nsys`` or ``ncu``.
        version: Its version.

    Returns:
        None for a release older than the table.
    """
    toolkits = [entry["cuda"] for entry in _table()["toolkit"] if numbers(entry[tool])[:2] <= numbers(version)[:2]]
    return _minor(toolkits[-1]) if toolkits else None


def is_newest(tool: str, version: str) -> bool:
    """Whether a release is at least as new as the newest in the table; nothing is known about such releases."""
    return numbers(version)[:2] >= numbers(_table()["toolkit"][-1][tool])[:2]


def release_for(tool: str, cuda: str) -> str | None:
    """The release of the tool in a CUDA toolkit, for example ``2025.3``; None if the table lacks that CUDA version."""
    releases = [entry[tool] for entry in _table()["toolkit"] if numbers(entry["cuda"])[:2] == numbers(cuda)[:2]]
    return _minor(releases[0]) if releases else None


def cuda_of_driver(driver: str) -> str | None:
    """The CUDA version, for example ``13.0``, of a driver such as ``580.95.05``, by its branch; None if unknown."""
    toolkits = [entry for entry in _table()["toolkit"] if numbers(entry.get("driver", ""))[:1] == numbers(driver)[:1]]
    return _minor(toolkits[0]["cuda"]) if toolkits and driver else None


def known_trouble(tool: str, version: str, driver_cuda: str) -> tuple[str, str] | None:
    """Known problems of this tool release with a driver of this CUDA version: why it matters, and a workaround."""
    for entry in _table()["known"]:
        old, new = numbers(version)[:2] <= numbers(entry["upto"]), numbers(driver_cuda) >= numbers(entry["driver_cuda"])
        if entry["tool"] == tool and old and new:
            return entry["why"], entry["fix"]
    return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
