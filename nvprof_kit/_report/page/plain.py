"""A page that needs nothing but a browser: no network, no script, every text escaped."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 14px; } th, td { padding: 2px 10px; text-align: right; }
th { border-bottom: 1px solid #888; } td:first-child, th:first-child { text-align: left; }
tr:hover td { background: #eef4fa; } svg { max-width: 100%; height: auto; } .warning { color: #9a6700; }
.scroll { overflow: auto; max-height: 34rem; }
"""


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: Its heading.
        svg: A picture, as SVG made by us.
        table: Head and rows of a table, as text.
    """

    title: str
    svg: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None


def page(title: str, lines: Iterable[str], sections: Iterable[Section], warnings: Iterable[str] = ()) -> bytes:
    """A page as UTF-8: a title, some lines, the sections, and what may be wrong with the figures."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [f"<p>{html.escape(line)}</p>" for line in lines]
    body += [f'<p class="warning">{html.escape(warning)}</p>' for warning in warnings]
    for section in sections:
        body += [f"<h2>{html.escape(section.title)}</h2>", section.svg]
        if section.table:
            body.append(_table(*section.table))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n'.encode()
    )


def svg_of(figure: Figure) -> str:
    """A figure as an SVG element to stand in a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'
