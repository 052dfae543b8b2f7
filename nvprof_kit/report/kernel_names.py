"""Names of kernels short enough for a table."""

from __future__ import annotations

import re

_NAMESPACES = re.compile(r"(?:\w+::|<unnamed>::|\(anonymous namespace\)::)+(?=\w)")


def short_kernel(name: str, width: int = 60) -> str:
    """A kernel's name without its return type, parameters and namespaces, cut to a width."""
    plain = _without_parameters(name.removeprefix("void ").replace("(anonymous namespace)", "<unnamed>"))
    plain = _NAMESPACES.sub("", plain)
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"


def _without_parameters(name: str) -> str:
    """What stands before the parenthesis that is outside every angle bracket."""
    depth = 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:place]
    return name
