"""Answers whose texts can be printed by whoever gets them."""

from __future__ import annotations

from typing import Any

from nvprof_kit._result.formats import plain


def printable(value: Any) -> Any:
    """A value of JSON types without the control characters of a capture in its texts and keys."""
    if isinstance(value, dict):
        return {printable(name): printable(character) for name, character in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(character) for character in value]
    return plain(value) if isinstance(value, str) else value
