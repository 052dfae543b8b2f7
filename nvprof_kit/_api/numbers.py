"""Numbers that callers pass."""

from __future__ import annotations

import math

from nvprof_kit.errors import UsageError


def checked(name: str, value: float, lowest: float = 0.0, highest: float = math.inf) -> float:
    """A number of a call, if it is finite and in its range.

    Args:
        name: The parameter's name.
        value: Its value.
        lowest: The lowest allowed value.
        highest: The highest.

    Raises:
        UsageError: It is not.
    """
    if math.isfinite(value) and lowest <= value <= highest:
        return value
    limits = f"{lowest:g} to {highest:g}" if math.isfinite(highest) else f"{lowest:g} or more"
    raise UsageError(f"{name}={value:g}: needed a finite number, {limits}")
