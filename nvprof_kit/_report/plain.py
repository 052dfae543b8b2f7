"""Text of a capture as it leaves the package: nothing in it steers a terminal or is run by a spreadsheet.

A capture holds whatever the profiled program named: an escape sequence in a range's name would reach the terminal of
the one who reads it, and a csv cell that begins with ``=`` is a formula to a spreadsheet.
"""

from __future__ import annotations

_KEPT = "\t\n"
_STEERING = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}
_STEERING |= dict.fromkeys((0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
_STEERING |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: str) -> str:
    """The text with a sign in place of each control character, half letter, and mark that turns the direction."""
    return text if text.isascii() and text.isprintable() else text.translate(_STEERING)


def csv_cell(text: str) -> str:
    """The same for a cell of a csv file: what a spreadsheet would take for a formula begins with an apostrophe."""
    return plain(f"'{text}" if text.startswith(_FORMULA) else text)
