"""Self-contained sunburst pages for `MemoryProfiler`: one ring per level of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nvprof_kit._report.page.template import render
from nvprof_kit._result.writer import write_file

Row = Sequence[Any]
"""Kind, path, bytes, device."""

Point = tuple[str, str, Sequence[Row]]
"""A time point: name, compute device, rows."""

PAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "params": ("params_memory_sunburst.html", "Parameters"),
        "grads": ("grads_memory_sunburst.html", "Gradients"),
        "os_params": ("os_params_memory_sunburst.html", "Optimizer's copies of parameters"),
        "os_state": ("os_memory_sunburst.html", "Optimizer state"),
        "activation": ("activation_memory_sunburst.html", "Activations kept for the backward pass"),
    }
)
"""File name and title of the page of each kind."""

SUMMARY = "summary_sunburst.html"


def write_sunbursts(folder: Path, points: Sequence[Point]) -> None:
    """Write a page for each kind at its peak, and a summary at the peak of the total.

    Args:
        folder: Output folder.
        points: The time points.
    """
    for kind, (name, title) in PAGES.items():
        most = max(points, key=_Sum(kind))
        rows = [(row[1], row[2]) for row in _here(most) if row[0] == kind]
        write_file(folder / name, sunburst_page(title, f"At {most[0]}.", rows))
    most = max(points, key=_Sum(None))
    rows = [(f"{row[0]}.{row[1]}" if row[1] else row[0], row[2]) for row in _here(most)]
    write_file(folder / SUMMARY, sunburst_page("Memory", f"At {most[0]}, when it was most.", rows))


def sunburst_page(title: str, about: str, rows: Iterable[tuple[str, int]]) -> bytes:
    """A page with bytes by dotted path; all texts are escaped.

    Args:
        title: Heading of the page and name of the root.
        about: A sentence below the heading.
        rows: Path and bytes of each row; rows without positive bytes are left out.
    """
    shown = {"title": title, "about": about, "data": _tree(title, rows)}
    return render("sunburst.html", ("sunburst.js",), ("sunburst.css",), **shown)


def _tree(name: str, rows: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """A node for each part of a path, with the total bytes below it."""
    root: dict[str, Any] = {"name": name, "bytes": 0, "parts": {}}
    for path, count in rows:
        if count <= 0:
            continue
        node = root
        node["bytes"] += count
        for part in path.split("."):
            node = node["parts"].setdefault(part, {"name": part, "bytes": 0, "parts": {}})
            node["bytes"] += count
    return _listed(root)


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    parts = [_listed(part) for part in node["parts"].values()]
    own = node["bytes"] - sum(part["bytes"] for part in parts)
    if parts and own:
        parts.append({"name": "(itself)", "bytes": own})
    return {"name": node["name"], "bytes": node["bytes"], **({"parts": parts} if parts else {})}


def _here(point: Point) -> list[Row]:
    return [row for row in point[2] if row[3] == point[1]]


class _Sum:
    """Bytes of a kind at a time point; None for all kinds."""

    def __init__(self, kind: str | None) -> None:
        self._kind = kind

    def __call__(self, point: Point) -> int:
        return sum(row[2] for row in _here(point) if self._kind in (None, row[0]))
