"""Fills the templates of pages, everything from a capture escaped; plain pages are headings, tables and plots."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from nvprof_kit._result.formats import plain

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup
    from matplotlib.figure import Figure


MAX_TEXT = 1000
"""Maximum length of a text; longer ones are cut and show their length."""


def short_text(text: str) -> str:
    """A text cut to `MAX_TEXT` characters, with its length if it was longer."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def render(template: str, scripts: Sequence[str] = (), styles: Sequence[str] = (), **variables: Any) -> bytes:
    """A page as UTF-8.

    Args:
        template: The template file.
        scripts: Script files in order; they are concatenated.
        styles: CSS files.
        variables: The template variables.
    """
    style, script = ("\n".join(map(_file, names)) for names in (styles, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    variables |= {"style": trusted(style), "script": trusted(script), "script_hash": f"sha256-{digest}"}
    return plain(_environment().get_template(template).render(variables)).encode("utf-8")


def trusted(text: str) -> Markup:
    """Mark text as safe HTML: our own, or from a library."""
    from markupsafe import Markup

    return Markup(text)  # never texts from a capture


def _file(name: str) -> str:
    return files("nvprof_kit._report.page").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: short_text(value) if type(value) is str else value,  # our own markup is no plain text
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    return environment


def result_page(title: str, element: str, figures: Iterable[Figure] = ()) -> bytes:
    """A page with one HTML element, such as Rich writes it, below plots; Matplotlib escapes their texts."""
    from nvprof_kit._report.plots.plots import encode

    pictures = [encode(figure, "svg").decode() for figure in figures]
    plots = "".join(picture[picture.index("<svg") :] for picture in pictures)
    return render("result.html", (), ("plain.css",), title=title, shown=trusted(plots + element))
