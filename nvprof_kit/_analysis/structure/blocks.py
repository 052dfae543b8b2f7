"""From anchors to blocks: passes through the model, where each block begins and ends, and one number for each layer.

A *pass* is a stretch of anchors of one direction between two visits of the model's ends (the embedding, the loss).
The kernels between two anchors are the end of one block and the start of the next. Where one ends is seen at the edge
of the pass: before the first block of a forward pass there is no other block, so what precedes its anchor and recurs
before the others is the start of a block. The last block of a backward pass has none after it in the same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.structure.tokens import BACKWARD, FORWARD, Anchor, Sequence

_ALIKE = 0.6
_SAME_STACK = 0.5
_SAME_BLOCK = 0.8
_SAME_ATTENTION = 0.7
_CONTEXT = 8
_MOST_SIDES = 8
_ATTENTION = [list(CLASSES).index(name) for name in ("attention", "softmax")]
_NORM = list(CLASSES).index("norm")
_LEAST_SCORE = 3.0
_LEAST_EDGE, _LEAST_RUN = 3, 4
_COMMON = 0.75
"""A kernel that is in more of the stretches between anchors than this is part of every block."""


_MATCH, _AKIN, _MISMATCH, _OPEN, _EXTEND = 1.0, 0.75, -1.0, -1.5, -0.05
_LONGEST = 1200
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
        tokens, other = np.ascontiguousarray(tokens[:_LONGEST]), np.ascontiguousarray(other[:_LONGEST])
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


@dataclass(eq=False)
class Block:
    """One run of one block: positions ``first`` to ``last`` of a sequence, its direction, and where it belongs."""

    first: int
    last: int
    direction: int
    anchors: tuple[Anchor, ...]
    recomputes: bool = False
    stack: int = -1
    number: int = -1


@dataclass(eq=False)
class Pass:
    """A pass through the blocks of one stack, in the order of launches."""

    direction: int
    anchors: list[Anchor]
    left: int = 0
    right: int = 0
    width: int = 1
    blocks: list[Block] = field(default_factory=list)
    stack: int = -1


def find_passes(sequence: Sequence) -> list[Pass]:
    """The passes of a sequence with their blocks, in order; passes without evidence of repetition are left out."""
    anchors, recomputed = _without_recompute(sequence.anchors)
    passes: list[Pass] = []
    for direction, group in groupby(anchors, key=lambda anchor: anchor.direction):
        passes += _split(sequence, list(group), direction)
    for index, model_pass in enumerate(passes):
        model_pass.left = passes[index - 1].anchors[-1].last + 1 if index else 0
        model_pass.right = passes[index + 1].anchors[0].first if index + 1 < len(passes) else len(sequence.token)
    for split in (_split_steps, _split_stacks):
        passes = _each(passes, sequence, split)
    aligner = Aligner(sequence.kind)
    widths: dict[bytes, tuple[int, int]] = {}
    cuts: dict[tuple[bytes, tuple[int, ...]], list[tuple[int, int]]] = {}
    recomputed_at = np.array([anchor.first for anchor in recomputed], dtype=np.int64)
    for model_pass in passes:
        span = sequence.token[model_pass.anchors[0].first : model_pass.anchors[-1].last + 1].tobytes()
        if span not in widths or widths[span][0] != len(model_pass.anchors):  # passes with the same kernels are alike
            model_pass.anchors = _join_inner(sequence, model_pass)
            widths[span] = len(model_pass.anchors), _width(sequence, model_pass)
        model_pass.width = widths[span][1]
    for index, model_pass in enumerate(passes):
        if not model_pass.width:
            continue
        left, right = model_pass.left, model_pass.right
        before = _outside(sequence, left, model_pass.anchors[0].first, passes[max(index - 1, 0) : index + 1])
        after = _outside(sequence, model_pass.anchors[-1].last + 1, right, passes[index : index + 2])
        left = int(before[0]) + 1 if len(before) else left
        right = int(after[-1]) + 1 if len(after) else right
        positions = (position - left for anchor in model_pass.anchors for position in anchor[:2])
        key = sequence.token[left:right].tobytes(), (model_pass.direction, model_pass.width, *positions)
        if key not in cuts:
            edges = _cut(sequence, model_pass, (left, right), aligner)
            cuts[key] = [(start - left, stop - left) for start, stop in pairwise(edges)]
        for (start, stop), block_anchors in zip(cuts[key], _groups(model_pass), strict=True):
            block = Block(left + start, left + stop - 1, model_pass.direction, block_anchors)
            if model_pass.direction == BACKWARD:
                first, end = np.searchsorted(recomputed_at, (block.first, block.last + 1))
                block.recomputes = bool(end > first)
            model_pass.blocks.append(block)
    return [model_pass for model_pass in passes if model_pass.width]


def _outside(sequence: Sequence, start: int, end: int, passes: list[Pass]) -> Int64Array:
    """Positions from `start` to `end` that may belong to the model's ends and whose kernel is in no block of passes."""
    positions = start + np.flatnonzero(sequence.outer[start:end])
    if not len(positions):
        return positions
    outside = np.ones(len(positions), dtype=bool)
    for model_pass in passes:
        between = sequence.token[model_pass.anchors[0].last + 1 : model_pass.anchors[-1].first]
        outside &= (sequence.token[positions][:, None] != between).all(axis=1)
    return positions[outside]


def _without_recompute(anchors: Items[Anchor]) -> tuple[list[Anchor], list[Anchor]]:
    """Leave out the forward anchors that a backward pass runs again: runs as long as the backward run they precede."""
    runs = [list(group) for _, group in groupby(anchors, key=lambda anchor: anchor.direction)]
    dropped: set[int] = set()
    index = 0
    while index + 3 < len(runs):
        if runs[index][0].direction != FORWARD:
            index += 1
            continue
        end = index + 2
        while end + 1 < len(runs) and len(runs[end]) == len(runs[end + 1]) and len(runs[end]) <= len(runs[index]) // 2:
            end += 2
        backward = sum(len(run) for run in runs[index + 1 : end : 2])
        first = len(runs[index + 1])
        if end > index + 2 and len(runs[index]) == backward + first:
            dropped.update(id(anchor) for anchor in runs[index][-first:])
            dropped.update(id(anchor) for run in runs[index + 2 : end : 2] for anchor in run)
        index = end
    left = [anchor for anchor in anchors if id(anchor) not in dropped]
    return left, [anchor for anchor in anchors if id(anchor) in dropped]


def _split(sequence: Sequence, anchors: list[Anchor], direction: int) -> list[Pass]:
    """Divide anchors of one direction into passes where the model's ends lie between two of them: kernels that
    are at the ends only, or that may be and are not in what is near.
    """
    outer = frozenset(sequence.token[sequence.outer].tolist())
    inside = [frozenset(sequence.token[a.last + 1 : b.first].tolist()) & outer for a, b in pairwise(anchors)]
    share = Counter(token for tokens in inside for token in tokens)
    ends = {token for token in sequence.token[sequence.end].tolist() if share[token] < _COMMON * len(inside)}
    breaks = []
    for index, tokens in enumerate(inside):
        near = inside[max(index - 2, 0) : index] + inside[index + 1 : index + 3]
        if ends & tokens or tokens.difference(*near):
            breaks.append(index + 1)
    return [Pass(direction, anchors[start_at:end]) for start_at, end in pairwise([0, *breaks, len(anchors)])]


def _each(
    passes: list[Pass], sequence: Sequence, split: Callable[[Sequence, Pass], list[tuple[int, int, int]]]
) -> list[Pass]:
    """The passes, each divided before some anchors: their indices, where the part before ends at the latest, and where
    the part after begins at the earliest.
    """
    divided: list[Pass] = []
    cuts_of: dict[tuple[bytes, int], list[tuple[int, int, int]]] = {}  # passes with the same kernels are cut alike
    for model_pass in passes:
        anchors, origin = model_pass.anchors, model_pass.left
        key = sequence.token[origin : model_pass.right].tobytes(), len(anchors)
        if key not in cuts_of:
            cuts_of[key] = [(index, end - origin, start - origin) for index, end, start in split(sequence, model_pass)]
        cuts = [(index, end + origin, start + origin) for index, end, start in cuts_of[key]]
        for (first, _, left), (last, right, _) in pairwise(
            [(0, 0, origin), *cuts, (len(anchors), model_pass.right, 0)]
        ):
            divided.append(Pass(model_pass.direction, anchors[first:last], left, right))
    return divided


def _split_steps(sequence: Sequence, model_pass: Pass) -> list[tuple[int, int, int]]:
    """Where a pass is several runs of a model without a loss or a look-up between them, as the steps of a diffusion
    model: kernels that recur at a constant number of anchors before the first block of a run, and others after the
    last.
    """
    anchors = model_pass.anchors
    inner = ((a.last + 1, b.first) for a, b in pairwise(anchors))
    edges = [(model_pass.left, anchors[0].first), *inner, (anchors[-1].last + 1, model_pass.right)]
    gaps_of: dict[int, list[int]] = defaultdict(list)
    for gap, (start, end) in enumerate(edges):
        for token in np.unique(sequence.token[start:end]).tolist():
            gaps_of[token].append(gap)
    tokens_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for token, gaps in gaps_of.items():
        if len(gaps) > 1 and len(set(np.diff(gaps))) == 1:
            tokens_of[tuple(gaps)].append(token)
    token_count = _LEAST_EDGE - 1
    runs: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    for pattern, tokens in tokens_of.items():
        period = pattern[1] - pattern[0]
        later = tuple(gap + period for gap in pattern)
        count = len(tokens) + len(tokens_of.get(later, ()))
        if later in tokens_of and period >= _LEAST_RUN and count > token_count:
            token_count, runs = count, (pattern, later)
    cuts: list[tuple[int, int, int]] = []
    for gap in sorted({*runs[0], *runs[1]} - {0, len(anchors)}):
        start, end = edges[gap]
        after, before = (np.flatnonzero(np.isin(sequence.token[start:end], tokens_of[pattern])) for pattern in runs)
        border = start + int(before[-1] + 1 if gap in runs[1] else after[0])
        cuts.append((gap, border, border))
    return cuts


def _split_stacks(sequence: Sequence, model_pass: Pass) -> list[tuple[int, int, int]]:
    """Where the blocks of a pass become others, in the products before their attention too (after it backward), as
    double and single blocks do.
    """
    anchors, spans, gaps = model_pass.anchors, _spans(model_pass), _gaps(sequence, model_pass)
    if len(gaps) < 5 or similarity(gaps[0], gaps[-1]) >= _SAME_BLOCK:
        return []
    change = next(index for index, gap in enumerate(gaps) if similarity(gap, gaps[0]) < _SAME_BLOCK)
    if not 2 <= change <= len(gaps) - 3 or any(similarity(gap, gaps[-1]) < _SAME_BLOCK for gap in gaps[change + 1 :]):
        return []
    turn = slice(None, None, -1 if model_pass.direction == FORWARD else 1)
    size = min(len(gaps[0]), len(gaps[-1]))
    differs = np.append(gaps[0][turn][:size] != gaps[-1][turn][:size], True)
    if sequence.product[spans[0]][turn][: int(np.argmax(differs))].any():
        return []
    return [(change + 1, anchors[change + 1].first, anchors[change].last + 1)]


def _context(sequence: Sequence, model_pass: Pass, index: int) -> Int64Array:
    """The kernels just before the attention of a block forward, after it backward."""
    anchor = model_pass.anchors[index]
    first = anchor.first - _CONTEXT if model_pass.direction == FORWARD else anchor.last + 1
    return sequence.token[max(first, 0) : first + _CONTEXT]


def _join_inner(sequence: Sequence, model_pass: Pass) -> list[Anchor]:
    """Join a second attention of some blocks with the first: what is between the two is less than half of what is
    between others, and what precedes it is not what precedes the others.
    """
    anchors, gaps = model_pass.anchors, _gaps(sequence, model_pass)
    if len(gaps) < 3:
        return anchors
    products = np.array([np.count_nonzero(sequence.product[span]) for span in _spans(model_pass)])
    lengths = np.array([len(gap) for gap in gaps])
    is_short = (products <= np.median(products) / 2) & (lengths <= 0.6 * np.median(lengths))
    fused = np.isin(sequence.coarse[[anchor.first for anchor in anchors]], _ATTENTION)
    if not is_short.any() or is_short.mean() >= 0.5 or not fused.all():
        return anchors
    second = 1 if model_pass.direction == FORWARD else 0
    usual = _context(sequence, model_pass, int(np.flatnonzero(~is_short)[-second] + second))
    joined = [anchors[0]]
    for index, anchor in enumerate(anchors[1:]):
        inner = is_short[index] and similarity(_context(sequence, model_pass, index + second), usual) < _SAME_ATTENTION
        if inner:
            joined[-1] = joined[-1]._replace(last=anchor.last)
        else:
            joined.append(anchor)
    return joined


def _spans(model_pass: Pass) -> list[slice]:
    """What is between the anchors of a pass."""
    return [slice(before.last + 1, after.first) for before, after in pairwise(model_pass.anchors)]


def _gaps(sequence: Sequence, model_pass: Pass) -> list[Int64Array]:
    return [sequence.token[span] for span in _spans(model_pass)]


def _width(sequence: Sequence, model_pass: Pass) -> int:
    """How many anchors a block of the pass has; 0 if the pass shows no repetition."""
    spans, token, coarse = _spans(model_pass), sequence.token, sequence.coarse
    if not spans:
        return 0

    def likeness(distance: int) -> list[float]:
        return [
            max(similarity(token[a], token[b]), similarity(coarse[a], coarse[b]) - 0.15)
            for a, b in zip(spans, spans[distance:], strict=False)
        ]

    neighbours, every_second = likeness(1), likeness(2)
    if len(model_pass.anchors) % 2 == 0 and len(spans) >= 3:
        products = [np.count_nonzero(sequence.product[span]) for span in spans]
        lengths = [span.stop - span.start for span in spans]
        shorter = max(products[0::2]) < min(products[1::2]) and max(lengths[0::2]) < min(lengths[1::2])
        if shorter and np.median(every_second) > np.median(neighbours) + 0.1:
            return 2
    if not neighbours:
        return 1
    best = np.maximum([0.0, *neighbours], [*neighbours, 0.0])
    repeats = len(every_second) > 1 and float(np.median(every_second)) >= _ALIKE
    return int(repeats or float(np.median(best)) >= _ALIKE)


def _cut(sequence: Sequence, model_pass: Pass, bounds: tuple[int, int], aligner: Aligner) -> list[int]:
    """Where the blocks of a pass begin, and where the last one ends."""
    token, (left, right) = sequence.token, bounds
    groups = _groups(model_pass)
    before = token[left : groups[0][0].first]
    after = token[groups[-1][-1].last + 1 : right]
    spans = [(a[-1].last + 1, b[0].first) for a, b in pairwise(groups)]
    gaps = [token[start_at:end] for start_at, end in spans]
    if model_pass.direction == FORWARD:
        sizes = _propagate(gaps, before, aligner, from_end=True)
        borders = [end - size for (_, end), size in zip(spans, sizes, strict=True)]
        # what precedes the first block may end as a block does, with a sum before a norm: the sum is the block's
        for index, (border, (_, end)) in enumerate(zip(list(borders), spans, strict=True)):
            is_start = np.append(sequence.product[border:end] | np.isin(sequence.coarse[border:end], _NORM), True)
            first = min(
                int(np.argmax(is_start)), 2
            )  # a scale and the sum; a norm of several kernels has sums of its own
            sums = np.flatnonzero(sequence.residual[border : border + first])
            borders[index] = border + int(sums[-1]) + 1 if len(sums) else border
    else:
        sizes = _propagate(gaps, after, aligner, from_end=False)
        borders = [start_at + size for (start_at, _), size in zip(spans, sizes, strict=True)]
        for index, (gap, (_begin, end)) in enumerate(zip(gaps, spans, strict=True)):
            start = end - aligner.end(before, gap)[1]
            if start > borders[index]:  # the last block's backward lacks kernels: it is shorter than the others' ends
                products = np.flatnonzero(sequence.product[start:end])
                borders[index] = start + (int(products[0]) if len(products) else 0)
    starts = [token[border:end] for border, (_, end) in zip(borders[:3], spans, strict=False)]
    ends = [token[start_at:border] for border, (start_at, _) in zip(borders[-3:], spans[-3:], strict=False)]
    before_size = max(aligner.end(before, section)[0] for section in starts)
    tail = max(aligner.start(after, section)[0] for section in ends)
    return [groups[0][0].first - before_size, *borders, groups[-1][-1].last + 1 + tail]


def _groups(model_pass: Pass) -> list[tuple[Anchor, ...]]:
    """The anchors of each block of a pass."""
    return [
        tuple(model_pass.anchors[index : index + model_pass.width])
        for index in range(0, len(model_pass.anchors), model_pass.width)
    ]


def _propagate(gaps: list[Int64Array], edge: Int64Array, aligner: Aligner, *, from_end: bool) -> list[int]:
    """For each gap, the length of the part next to the known edge's kind of block."""
    if from_end:
        gaps, edge = [gap[::-1] for gap in gaps], edge[::-1]
    keys = [gap.tobytes() for gap in gaps]
    kinds = dict(zip(keys, gaps, strict=True))
    lengths: dict[bytes, int] = {}
    while len(lengths) < len(kinds):
        # best first: a gap like the edge, or one with a side that another gap has, whose border is known
        sized = list(lengths.items())[:_MOST_SIDES]
        sides = [(kinds[key][:size], kinds[key][size:][::-1]) for key, size in sized]
        options: dict[bytes, tuple[float, int]] = {}
        for key, gap in kinds.items():
            if key in lengths:
                continue
            size_of_edge, size, score = aligner.start(edge, gap)
            candidates = [(score / max(size_of_edge, size, 1) if score >= _LEAST_SCORE else 0.0, size)]
            for start_side, end_side in sides:
                _, size, score = aligner.start(gap, start_side)
                candidates.append((score / max(len(start_side), 1), size))
                _, size, score = aligner.start(gap[::-1], end_side)
                candidates.append((score / max(len(end_side), 1), len(gap) - size))
            options[key] = max(candidates)
        best = max(quality for quality, _ in options.values())
        lengths |= {key: size for key, (quality, size) in options.items() if quality >= best - 0.05}
    return [lengths[key] for key in keys]


def number_blocks(passes: list[Pass], sequence: Sequence) -> list[Pass]:
    """Give each block its stack and number, so that a layer is the same in every pass.

    Forward passes with as many blocks of about the same kernels are the same stack. Backward passes belong to the
    forward passes before them, in reverse order.

    Returns:
        One forward pass of each stack (a backward pass where there is no forward one).
    """
    stacks: list[Pass] = []
    waiting: list[Pass] = []
    for model_pass in passes:
        if model_pass.direction == FORWARD:
            model_pass.stack = _stack_of(stacks, model_pass, sequence)
            if waiting and waiting[-1].direction == BACKWARD:
                waiting = []
            waiting.append(model_pass)
        else:
            same = [other for other in waiting if len(other.blocks) == len(model_pass.blocks)]
            # the backward pass of a tower of which the last blocks are not used is shorter
            size = len(model_pass.blocks)
            same = same or [other for other in waiting[-1:] if 3 <= size < len(other.blocks) <= size + 2]
            if same:
                model_pass.stack = same[-1].stack
                waiting.remove(same[-1])
            else:
                model_pass.stack = _stack_of(stacks, model_pass, sequence)
        last = len(model_pass.blocks) - 1
        for index, block in enumerate(model_pass.blocks):
            block.stack = model_pass.stack
            block.number = index if model_pass.direction == FORWARD else last - index
    return stacks


def _stack_of(stacks: list[Pass], model_pass: Pass, sequence: Sequence) -> int:
    """The stack that a pass runs, a new one if no stack is alike."""
    for number, other in enumerate(stacks):
        likeness = len(other.blocks) == len(model_pass.blocks) and other.width == model_pass.width
        if likeness and similarity(_inside(other, sequence), _inside(model_pass, sequence)) >= _SAME_STACK:
            return number
    stacks.append(model_pass)
    return len(stacks) - 1


def _inside(model_pass: Pass, sequence: Sequence) -> Int64Array:
    return sequence.coarse[model_pass.blocks[0].first : model_pass.blocks[-1].last + 1]
