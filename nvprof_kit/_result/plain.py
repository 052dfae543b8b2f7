"""Sanitizes texts from a capture: no terminal control sequences and no spreadsheet formulas.

A capture contains names from the profiled program: an escape sequence in a range's name would reach the reader's
terminal, and a spreadsheet would evaluate a CSV cell that begins with ``=``.
"""

from __future__ import annotations

STEERING = (*range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Code points above those of text in ASCII that control a terminal, or turn the direction of the text."""

_KEPT = "\t\n"
_STEERING = {code: "\ufffd" for code in (*range(0x20), *STEERING, *range(0xD800, 0xE000)) if chr(code) not in _KEPT}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: str) -> str:
    """Replace control characters, lone surrogates and bidirectional marks in a text."""
    return text if text.isascii() and text.isprintable() else text.translate(_STEERING)


def title(name: str) -> str:
    """A path or a name as it is shown: on one line, whatever it holds."""
    return plain(" ".join(name.splitlines()))


def csv_cell(text: str) -> str:
    """The same for a CSV cell; a text that a spreadsheet would take for a formula gets a leading apostrophe."""
    return plain(f"'{text}" if text.startswith(_FORMULA) else text)
