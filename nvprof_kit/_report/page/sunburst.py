"""Self-contained sunburst pages for `MemoryProfiler`: one ring per level of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvprof_kit._report.page.template import render
from nvprof_kit._result.writer import write_file
from nvprof_kit._toml import read_toml

Row = Sequence[Any]
"""Kind, path, bytes, device."""

Point = tuple[str, str, Sequence[Row]]
"""A time point: name, compute device, rows."""

PAGES: Mapping[str, Sequence[str]] = read_toml("nvprof_kit._report.page", "titles.toml")["sunburst"]
"""File name and title of the page of each kind."""

SUMMARY = "summary_sunburst.html"


def write_sunbursts(folder: Path, points: Sequence[Point]) -> None:
    """Write a page for each kind at its peak, and a summary at the peak of the total.

    Args:
        folder: Output folder.
        points: The time points.
    """

    def peak_rows(kind: str | None) -> tuple[str, list[Row]]:
        rows = {name: [row for row in rows if row[3] == device] for name, device, rows in points}
        point = max(rows, key=lambda name: sum(row[2] for row in rows[name] if kind in (None, row[0])))
        return point, rows[point]

    for kind, (name, title) in PAGES.items():
        point, rows = peak_rows(kind)
        parts = [(row[1], row[2]) for row in rows if row[0] == kind]
        write_file(folder / name, sunburst_page(title, f"At {point}.", parts))
    point, rows = peak_rows(None)
    parts = [(f"{row[0]}.{row[1]}" if row[1] else row[0], row[2]) for row in rows]
    write_file(folder / SUMMARY, sunburst_page("Memory", f"At {point}, when it was most.", parts))


def sunburst_page(title: str, about: str, rows: Iterable[tuple[str, int]]) -> bytes:
    """A page with bytes by dotted path; all texts are escaped.

    Args:
        title: Heading of the page and name of the root.
        about: A sentence below the heading.
        rows: Path and bytes of each row; rows without positive bytes are left out.
    """
    root: dict[str, Any] = {"name": title, "bytes": 0, "parts": {}}
    for path, count in rows:
        if count <= 0:
            continue
        node = root
        node["bytes"] += count
        for path_part in path.split("."):
            node = node["parts"].setdefault(path_part, {"name": path_part, "bytes": 0, "parts": {}})
            node["bytes"] += count
    return render("sunburst.html", ("sunburst.js",), ("sunburst.css",), title=title, about=about, data=_listed(root))


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    parts = [_listed(child) for child in node["parts"].values()]
    own_bytes = node["bytes"] - sum(child["bytes"] for child in parts)
    if parts and own_bytes:
        parts.append({"name": "(itself)", "bytes": own_bytes})
    return {"name": node["name"], "bytes": node["bytes"], **({"parts": parts} if parts else {})}
