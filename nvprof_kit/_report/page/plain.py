"""Pages without scripts or network access; all texts are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvprof_kit._report.page.template import render, trusted

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        title: The heading.
        svg: A figure from `nvprof_kit._report.page.template.svg_of`.
        table: Header and rows of a table, as text.
    """

    title: str
    svg: Markup | str = ""
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None


def page(title: str, lines: Iterable[str], sections: Iterable[Section], warnings: Iterable[str] = ()) -> bytes:
    """A page as UTF-8: title, lines, sections, and warnings about the figures."""
    parts = {"lines": list(lines), "sections": list(sections), "warnings": list(warnings)}
    return render("plain.html", (), ("plain.css",), title=title, **parts)


def result_page(title: str, element: str) -> bytes:
    """A page with one HTML element, such as Rich writes it."""
    return render("result.html", (), ("plain.css",), title=title, shown=trusted(element))
