"""Numbers that callers pass."""

from __future__ import annotations

import math

from nvprof_kit.errors import UsageError


def checked(name: str, value: float, least: float = 0.0, most: float = math.inf) -> float:
    """A number of a call, if it is finite and in its range.

    Args:
        name: The parameter's name.
        value: Its value.
        least: The least allowed value.
        most: The largest.

    Raises:
        UsageError: It is not.
    """
    if math.isfinite(value) and least <= value <= most:
        return value
    limits = f"{least:g} to {most:g}" if math.isfinite(most) else f"{least:g} or more"
    raise UsageError(f"{name}={value:g}: needed a finite number, {limits}")
