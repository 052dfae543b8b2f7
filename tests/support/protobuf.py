"""The wire format of protocol buffers, read without a definition."""

from __future__ import annotations

from collections import defaultdict


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """The fields of a message by their numbers: whole numbers, and the bytes of texts and messages."""
    found: dict[int, list[int | bytes]] = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            found[key >> 3].append(data[at : at + value])
            at += value
        else:
            assert key & 7 == 0, f"wire type {key & 7}"
            found[key >> 3].append(value)
    assert at == len(data)
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def varints(data: bytes) -> list[int]:
    """A packed list of whole numbers."""
    found, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found
