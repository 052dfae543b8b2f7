"""How every page of HTML is made: one environment of templates that escapes each text, one policy for scripts.

A page is a single file that loads nothing from any network. Texts of a capture go through the template's escaping or
through JSON; the page's own rules forbid every script but the one whose hash they name.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup
    from matplotlib.figure import Figure


def render(template: str, scripts: Sequence[str] = (), styles: Sequence[str] = (), **shown: Any) -> bytes:
    """A page in UTF-8.

    Args:
        template: The template's file.
        scripts: Files of its scripts, in order; they become one.
        styles: Files of its styles.
        shown: What the template shows.
    """
    script = "\n".join(_file(one) for one in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = (
        _environment()
        .get_template(template)
        .render(
            style=trusted("\n".join(_file(one) for one in styles)),
            script=trusted(script),
            script_hash=f"sha256-{digest}",
            **shown,
        )
    )
    return text.encode("utf-8", "replace")


def trusted(text: str) -> Markup:
    """Markup of our own, or a library's, to go into a page as it is."""
    from markupsafe import Markup

    return Markup(text)  # never a text of a capture


def svg_of(figure: Figure) -> Markup:
    """A figure as an SVG element to stand in a page; matplotlib escapes its texts."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return trusted(text[text.index("<svg") :])


def _file(name: str) -> str:
    return files("nvprof_kit._report.page").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    return made
