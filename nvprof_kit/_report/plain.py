"""Sanitizes texts from a capture: no terminal control sequences and no spreadsheet formulas.

A capture contains names from the profiled program: an escape sequence in a range's name would reach the reader's
terminal, and a spreadsheet would evaluate a CSV cell that begins with ``=``.
"""

from __future__ import annotations

_KEPT = "\t\n"
_STEERING = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}
_STEERING |= dict.fromkeys((0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
_STEERING |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: str) -> str:
    """Replace control characters, lone surrogates and bidirectional marks in a text."""
    return text if text.isascii() and text.isprintable() else text.translate(_STEERING)


def title(path: str) -> str:
    """A path as it is shown: on one line, whatever its name holds."""
    return plain(" ".join(path.splitlines()))


def csv_cell(text: str) -> str:
    """The same for a CSV cell; a text that a spreadsheet would take for a formula gets a leading apostrophe."""
    return plain(f"'{text}" if text.startswith(_FORMULA) else text)
