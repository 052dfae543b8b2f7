"""What the links of a GPU carry at most: to the host by PCIe or NVLink-C2C, to other GPUs by NVLink.

The figures are data (`gpu_links.toml`, in the package), with their sources.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Link(NamedTuple):
    """A link's name, '' for none that is known, and what it carries in one direction in 10⁹ bytes per second."""

    name: str
    gb_per_s: float


UNKNOWN = Link("", float("nan"))


def link_of(gpu: str, copy: str) -> Link:
    """The link that a copy goes over; `UNKNOWN` inside one GPU, and for a GPU that the data do not name.

    Args:
        gpu: The GPU's name, as the capture gives it.
        copy: The kind of copy: ``memcpy HtoD``, ``Memcpy PtoP (Device -> Device)``.
    """
    said = _said_of(gpu)
    if re.search(r"\b(HtoD|DtoH)\b", copy) and said:
        return Link(said["host"], _data()["link"][said["host"]])
    if re.search(r"\bPtoP\b", copy) and "peer" in said:
        return Link("NVLink", said["peer"])
    return UNKNOWN


@lru_cache
def _said_of(gpu: str) -> dict[str, Any]:
    return next((one for one in _data()["gpu"] if re.search(one["match"], gpu)), {})


@lru_cache
def _data() -> dict[str, Any]:
    file = resources.files("nvprof_kit.analysis") / "gpu_links.toml"
    data: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    return data
