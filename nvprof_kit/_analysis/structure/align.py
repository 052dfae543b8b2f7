"""Alignment of two stretches of kernels that begin alike, where one lacks kernels of the other or has more."""

from __future__ import annotations

import numpy as np

from nvprof_kit._analysis.attribution.nesting import Int64Array

_MATCH, _AKIN, _MISMATCH, _OPEN, _EXTEND = 1.0, 0.75, -1.0, -1.5, -0.05
LONGEST = 1200
"""Kernels of each stretch that are compared at most."""


class Aligner:
    """Aligns stretches of one sequence; the same two are aligned once.

    Args:
        kind: For each token, a number that it shares with those it can stand for; -1 for none.
    """

    def __init__(self, kind: Int64Array) -> None:
        self._kind = kind
        self._known: dict[tuple[bytes, bytes], tuple[int, int, float]] = {}

    def start(self, tokens: Int64Array, other: Int64Array) -> tuple[int, int, float]:
        """How far two stretches agree from their start on, see `common_start`."""
        tokens, other = np.ascontiguousarray(tokens[:LONGEST]), np.ascontiguousarray(other[:LONGEST])
        key = tokens.tobytes(), other.tobytes()
        if key not in self._known:
            self._known[key] = common_start(tokens, other, self._kind)
        return self._known[key]

    def end(self, tokens: Int64Array, other: Int64Array) -> tuple[int, int, float]:
        """How far two stretches agree from their end back."""
        return self.start(tokens[::-1], other[::-1])


def common_start(tokens: Int64Array, other: Int64Array, kind: Int64Array) -> tuple[int, int, float]:
    """How far two stretches agree from their start on.

    Args:
        tokens: Tokens, shape ``(m,)``.
        other: Tokens, shape ``(n,)``.
        kind: For each token, a number that it shares with those it can stand for; -1 for none.

    Returns:
        The number of kernels of each in the part that agrees best, and its score: 1 for each kernel in common, less for
        those that differ (gaps cost little more when they are long).
    """
    equal = np.flatnonzero(tokens[: len(other)] != other[: len(tokens)])
    same = int(equal[0]) if len(equal) else min(len(tokens), len(other))
    if same == min(len(tokens), len(other)):
        return same, same, float(same)
    width, kinds = len(other) + 1, kind[other]
    column = np.arange(width)
    above = np.where(column == 0, 0.0, _OPEN + _EXTEND * column)
    vertical = np.full(width, -np.inf)
    best = (0, 0, 0.0)
    for row, token in enumerate(tokens.tolist(), 1):
        vertical = np.maximum(vertical + _EXTEND, above + _OPEN)
        step = np.full(width, -np.inf)
        akin = _AKIN if kind[token] >= 0 else _MISMATCH
        step[1:] = above[:-1] + np.where(other == token, _MATCH, np.where(kinds == kind[token], akin, _MISMATCH))
        here = np.maximum(step, vertical)
        # a gap in `other`: the best of all columns to the left, minus what the gap costs
        before = np.maximum.accumulate(here - _EXTEND * column)
        here[1:] = np.maximum(here[1:], before[:-1] + _OPEN + _EXTEND * column[1:])
        position = int(np.argmax(step))
        if step[position] > best[2]:
            best = (row, position, float(step[position]))
        if here.max() < best[2] - 60:
            break
        above = here
    return best


def similarity(tokens: Int64Array, other: Int64Array) -> float:
    """Share of kernels that two stretches have in common, in any order: 0 to 1."""
    if not len(tokens) or not len(other):
        return float(len(tokens) == len(other))
    width = int(max(tokens.max(), other.max())) + 1
    counts = np.bincount(tokens, minlength=width), np.bincount(other, minlength=width)
    return float(np.minimum(*counts).sum() / np.maximum(*counts).sum())
