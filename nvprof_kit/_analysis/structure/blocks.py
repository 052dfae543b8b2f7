"""From anchors to blocks: passes through the model, where each block begins and ends, and one number for each layer.

A *pass* is a stretch of anchors of one direction between two visits of the model's ends (the embedding, the loss).
The kernels between two anchors are the end of one block and the start of the next. Where one ends is seen at the edges
of the pass: what precedes its first anchor ends as a block starts, what follows its last anchor starts as a block ends.
Where the two leave a choice, a block ends with the sum of its residual stream.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from nvprof_kit._analysis.attribution.intervals import Int64Array
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.structure.tokens import BACKWARD, FORWARD, Anchor, Sequence

FloatArray = npt.NDArray[np.float64]

_ALIKE, _ALIKE_MIXERS, _SAME_STACK, _SAME_BLOCK, _SAME_ATTENTION = 0.6, 0.65, 0.5, 0.8, 0.7
"""Shares of common kernels from which on stretches repeat, pairs of mixers repeat, and the others are the same."""
_UNLIKE = 0.5
"""Stretches that are less alike have nothing in common."""
_CONTEXT = 8
_MOST_SIDES = 8
_ATTENTION = [list(CLASSES).index(name) for name in ("attention", "softmax")]
_NORM, _SOFTMAX, _EMBEDDING = (list(CLASSES).index(name) for name in ("norm", "softmax", "embedding"))
_LEAST_EDGE, _LEAST_RUN = 3, 3
_COMMON = 0.75
"""A kernel that is in more of the stretches between anchors than this is part of every block."""

_MATCH, _AKIN, _MISMATCH, _OPEN, _EXTEND, _PRODUCT, _SUM = 1.0, 0.75, -1.0, -1.5, -0.05, -2.0, -12.0
_OTHER_PRODUCT = -0.25
"""Scores of an alignment: an equal kernel, a norm for a norm, another kernel, a gap, and each kernel in it, product or
sum of a residual stream; a product for a product.
"""
_END_OF_BLOCK = 0.6
"""How much sooner a block ends after a sum than elsewhere, in kernels."""
_TIE, _NEAR = 0.3, 3
"""Borders are as good as each other within this score; so many kernels beside one are looked at for a better."""
_HOPELESS = 25.0
"""An alignment that is so much worse than the best is not continued."""
_LONGEST = 1200
"""Kernels of each stretch that are compared at most."""
_LEAST_COMPARED, _LEAST_WORK = 40_000, 15_000
"""Of passes that repeat none before so many kernels are compared, or every 25th of all, before the others are given up;
and so many steps of alignments are taken, or one for every 60th kernel.
"""


class Aligner:
    """Aligns stretches of one sequence; the same two are aligned once.

    Attributes:
        work: Steps of alignments that are left until the sequence is given up.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._is_norm, self._is_product = sequence.is_norm, sequence.is_product
        self._skip = np.where(sequence.is_product, _PRODUCT, np.where(sequence.is_sum, _SUM, _EXTEND))
        self._scores: dict[tuple[bytes, bytes], FloatArray] = {}
        self.work = max(_LEAST_WORK, len(sequence.token) // 60)

    def start(self, tokens: Int64Array, targets: Iterable[Int64Array]) -> list[FloatArray]:
        """How well the start of `tokens` agrees with each start of each of `targets`.

        Returns:
            For each of `targets` the score of the best alignment of ``target[:length]`` with any start of `tokens`, by
            length: 1 for each kernel in common, less for those that differ. Gaps cost little more when they are long,
            but each matrix product and each sum in them. Shape ``(len(target) + 1,)`` each.
        """
        targets = [np.ascontiguousarray(target) for target in targets]
        start = np.ascontiguousarray(tokens[: _LONGEST + _LONGEST // 8]).tobytes()
        keys = [(start, target.tobytes()) for target in targets]
        groups: dict[int, dict[tuple[bytes, bytes], Int64Array]] = defaultdict(dict)
        for key, target in zip(keys, targets, strict=True):
            if key not in self._scores:
                groups[len(target).bit_length()][key] = target
        for group in groups.values():
            longest = max(len(target) for target in group.values())
            scores = self._align(tokens[: min(_LONGEST, longest + _LONGEST // 8)], list(group.values()))
            self._scores.update(zip(group, scores, strict=True))
        return [self._scores[key] for key in keys]

    def end(self, tokens: Int64Array, targets: Iterable[Int64Array]) -> list[FloatArray]:
        """How well the end of `tokens` agrees with each end of each of `targets`, by length."""
        return self.start(tokens[::-1], [target[::-1] for target in targets])

    def _align(self, tokens: Int64Array, targets: list[Int64Array]) -> list[FloatArray]:
        """Align `tokens` with all of `targets` at once, a row each."""
        length = min(max(len(target) for target in targets), _LONGEST)
        other = np.full((len(targets), length), -1)
        for row, stretch in zip(other, targets, strict=True):
            row[: len(stretch)] = stretch[:length]
        weight = np.where(other < 0, 0.0, self._skip[other])
        norm, product = (np.where(other < 0, False, kind[other]) for kind in (self._is_norm, self._is_product))
        skipped = np.concatenate([np.zeros((len(targets), 1)), np.cumsum(weight, axis=1)], axis=1)
        above = skipped + np.where(skipped < 0, _OPEN, 0.0)
        best, vertical = above.copy(), np.full(above.shape, -np.inf)
        for token in tokens.tolist():
            self.work -= 1 + other.size // 1000
            vertical = np.maximum(vertical, above + _OPEN) + self._skip[token]
            column = vertical.copy()
            differ = np.minimum(weight, self._skip[token]) + _MISMATCH
            if self._is_norm[token]:
                differ[norm] = _AKIN
            if self._is_product[token]:
                differ[product] = _OTHER_PRODUCT
            differ[other == token] = _MATCH
            column[:, 1:] = np.maximum(column[:, 1:], above[:, :-1] + differ)
            # a gap in `other`: the best of all columns to the left, minus what the gap costs
            before = np.maximum.accumulate(column - skipped, axis=1)
            column[:, 1:] = np.maximum(column[:, 1:], before[:, :-1] + _OPEN + skipped[:, 1:])
            best = np.maximum(best, column)
            if (column.max(axis=1) < best.max(axis=1) - _HOPELESS).all():
                break
            above = column
        ends = [np.full(max(len(stretch) - length, 0), -np.inf) for stretch in targets]
        return [
            np.append(scores[: len(stretch) + 1], end) for scores, stretch, end in zip(best, targets, ends, strict=True)
        ]


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
    given_up: bool = False


def find_passes(sequence: Sequence) -> tuple[list[Pass], int]:
    """The passes of a sequence with their blocks, in order, and how many were given up: in a long sequence those that
    repeat none before. Passes without evidence of repetition are left out.
    """
    recomputed_at = np.array([anchor.first for anchor in sequence.anchors if anchor.recomputed], dtype=np.int64)
    passes = _split(sequence)
    given_up = _give_up(passes, sequence)
    for split in (_split_runs, _split_lone, _split_unlike, _split_stacks):
        passes = _each(passes, sequence, split)
    passes = _with_bounds(_mirrored(passes), len(sequence.token))
    widths: dict[bytes, tuple[int, int]] = {}
    for model_pass in passes:
        if model_pass.given_up:
            continue
        span = sequence.token[model_pass.anchors[0].first : model_pass.anchors[-1].last + 1].tobytes()
        if span not in widths or widths[span][0] != len(model_pass.anchors):  # passes with the same kernels are alike
            model_pass.anchors = _join_inner(sequence, model_pass)
            widths[span] = len(model_pass.anchors), _width(sequence, model_pass)
        model_pass.width = widths[span][1]
    aligner = Aligner(sequence)
    cuts: dict[tuple[bytes, tuple[int, ...]], list[tuple[int, int]]] = {}
    is_post_norm: bool | None = None
    for direction in (BACKWARD, FORWARD):  # a backward pass tells more of where a block ends
        for index, model_pass in enumerate(passes):
            if model_pass.direction != direction or not model_pass.width or model_pass.given_up:
                continue
            left, right = model_pass.left, model_pass.right
            before = _outside(sequence, left, model_pass.anchors[0].first, passes[max(index - 1, 0) : index + 1])
            after = _outside(sequence, model_pass.anchors[-1].last + 1, right, passes[index : index + 2])
            left = int(before[0]) + 1 if len(before) else left
            right = int(after[-1]) + 1 if len(after) else right
            model_pass.left, model_pass.right = left, right
            positions = (position - left for anchor in model_pass.anchors for position in anchor[:2])
            key = sequence.token[left:right].tobytes(), (direction, model_pass.width, *positions)
            if key not in cuts:
                if aligner.work <= 0:
                    given_up += 1
                    continue
                edges = _cut(sequence, model_pass, aligner, is_post_norm)
                cuts[key] = [(start - left, stop - left) for start, stop in pairwise(edges)]
                if direction == BACKWARD:  # of such blocks it begins with a norm's, and ends without one before the sum
                    begins_with_norm, ends_with_norm = (
                        np.mean([(sequence.coarse[max(i + low, 0) : i + high] == _NORM).any() for i in edges[1:-1]])
                        for low, high in ((0, 3), (-4, 0))
                    )
                    is_post_norm = bool(is_post_norm) or bool(begins_with_norm > 0.5 > ends_with_norm)
            for (start, stop), block_anchors in zip(cuts[key], _groups(model_pass), strict=True):
                block = Block(left + start, left + stop - 1, direction, block_anchors)
                first, end = np.searchsorted(recomputed_at, (block.first, block.last + 1))
                block.recomputes = bool(end > first)
                model_pass.blocks.append(block)
    return [model_pass for model_pass in passes if model_pass.blocks], given_up


def _give_up(passes: list[Pass], sequence: Sequence) -> int:
    """Mark the passes that are given up, as they repeat none before and enough others do not, and count them."""
    left = max(_LEAST_COMPARED, len(sequence.token) // 25)
    spans: set[bytes] = set()
    for model_pass in passes:
        first, end = model_pass.anchors[0].first, model_pass.anchors[-1].last + 1
        span = sequence.token[first:end].tobytes()
        if span not in spans:
            left -= end - first
            spans.add(span)
            model_pass.given_up = left < 0
    return sum(model_pass.given_up for model_pass in passes)


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


def _split(sequence: Sequence) -> list[Pass]:
    """Divide anchors into passes where their direction changes, or where the model's ends lie between two of them:
    kernels that are at the ends only, or that may be and are not in what is near.
    """
    outer_tokens = frozenset(np.unique(sequence.token[sequence.outer]).tolist())
    end_tokens = frozenset(np.unique(sequence.token[sequence.end]).tolist())
    outer_of: dict[bytes, frozenset[int]] = {}
    passes: list[Pass] = []
    anchors = [anchor for anchor in sequence.anchors if not anchor.recomputed]
    for direction, group in groupby(anchors, key=lambda anchor: anchor.direction):
        of_direction = list(group)
        inside = []
        for before, after in pairwise(of_direction):
            stretch = sequence.token[before.last + 1 : after.first]
            key = stretch.tobytes()
            if key not in outer_of:
                outer_of[key] = outer_tokens.intersection(stretch.tolist())
            inside.append(outer_of[key])
        uses = Counter(token for tokens in inside for token in tokens)
        ends = {token for token in uses if token in end_tokens and uses[token] < _COMMON * len(inside)}
        breaks = []
        for index, tokens in enumerate(inside):
            near = inside[max(index - 2, 0) : index] + inside[index + 1 : index + 3]
            if ends & tokens or tokens.difference(*near):
                breaks.append(index + 1)
        for first, end in pairwise([0, *breaks, len(of_direction)]):
            pass_anchors = of_direction[first:end]
            is_softmax = [bool((sequence.coarse[a.first : a.last + 1] == _SOFTMAX).all()) for a in pass_anchors]
            if len(is_softmax) > 3 and sum(is_softmax) == 1:  # at an edge: it pools what the blocks give
                pass_anchors = pass_anchors[int(is_softmax[0]) : len(is_softmax) - int(is_softmax[-1])]
            passes.append(Pass(direction, _join_without_norm(sequence, pass_anchors)))
    return _with_bounds(passes, len(sequence.token))


def _join_without_norm(sequence: Sequence, anchors: list[Anchor]) -> list[Anchor]:
    """Join anchors of one block, as those of sparse attention: what is between them has no norm, fewer products than
    what is between others, and does not repeat; and each block has as many.
    """
    gaps = [slice(a.last + 1, b.first) for a, b in pairwise(anchors)]
    has_norm = np.array([(sequence.coarse[gap] == _NORM).any() for gap in gaps], dtype=bool)
    products = np.array([np.count_nonzero(sequence.product[gap]) for gap in gaps])
    size = len(anchors) // (1 + np.count_nonzero(has_norm))
    is_border = np.arange(1, len(anchors)) % size == 0
    if size == 1 or len(anchors) < 3 * size or (has_norm != is_border).any():
        return anchors
    repeats = size > 2 and min(_likeness(sequence, a, b) for a, b in pairwise(gaps[: size - 1])) >= _ALIKE
    if repeats or products[~has_norm].max() >= products[has_norm].min():
        return anchors
    return [a._replace(last=b.last) for a, b in zip(anchors[::size], anchors[size - 1 :: size], strict=True)]


def _with_bounds(passes: list[Pass], size: int) -> list[Pass]:
    """The passes, each from the last anchor of the one before to the first anchor of the one after it."""
    for index, model_pass in enumerate(passes):
        model_pass.left = passes[index - 1].anchors[-1].last + 1 if index else 0
        model_pass.right = passes[index + 1].anchors[0].first if index + 1 < len(passes) else size
    return passes


def _each(passes: list[Pass], sequence: Sequence, split: Callable[[Sequence, Pass], list[int]]) -> list[Pass]:
    """The passes, each divided before the anchors with the indices that `split` gives."""
    divided: list[Pass] = []
    cuts_of: dict[tuple[bytes, int], list[int]] = {}  # passes with the same kernels are cut alike
    for model_pass in passes:
        if model_pass.given_up:
            divided.append(model_pass)
            continue
        key = sequence.token[model_pass.left : model_pass.right].tobytes(), len(model_pass.anchors)
        if key not in cuts_of:
            cuts_of[key] = split(sequence, model_pass)
        edges = [0, *cuts_of[key], len(model_pass.anchors)]
        divided += [Pass(model_pass.direction, model_pass.anchors[first:end]) for first, end in pairwise(edges)]
    return _with_bounds(divided, len(sequence.token))


def _split_runs(sequence: Sequence, model_pass: Pass) -> list[int]:
    """Where a pass is several runs of a model without a loss or a look-up between them, as the steps of a diffusion
    model: what is between two runs has all that is after the last and before the first, what is between blocks not; or
    kernels recur at a constant number of anchors before the first block of a run, and others after the last.
    """
    anchors, size = model_pass.anchors, len(sequence.is_norm)
    inner = [edge for anchor in anchors for edge in (anchor.first, anchor.last + 1)]
    edges = [model_pass.left, *inner, model_pass.right]
    gaps = [sequence.token[start:end] for start, end in zip(edges[0::2], edges[1::2], strict=True)]
    ends = np.bincount(np.concatenate([gaps[0], gaps[-1]]), minlength=size)
    in_both = [np.minimum(np.bincount(gap, minlength=size), ends).sum() for gap in gaps[1:-1]]
    between = 1 + np.flatnonzero(np.array(in_both) == ends.sum())
    runs = np.diff([0, *between.tolist(), len(anchors)])
    if 0 < len(between) < len(in_both) and (runs == runs[0]).all() and runs[0] >= _LEAST_RUN:
        return [int(index) for index in between]
    indices_of: dict[int, list[int]] = defaultdict(list)
    for index, gap in enumerate(gaps):
        for token in np.unique(gap).tolist():
            indices_of[token].append(index)
    tokens_of: dict[tuple[int, ...], int] = Counter(
        tuple(indices) for indices in indices_of.values() if len(indices) > 1 and len(set(np.diff(indices))) == 1
    )
    token_count, cuts = _LEAST_EDGE - 1, set[int]()
    for pattern, count in tokens_of.items():
        period = pattern[1] - pattern[0]
        later = tuple(index + period for index in pattern)
        if later in tokens_of and period >= _LEAST_RUN and count + tokens_of[later] > token_count:
            token_count, cuts = count + tokens_of[later], {*pattern, *later}
    return sorted(cuts - {0, len(anchors)})


def _likeness(sequence: Sequence, span: slice, other: slice) -> float:
    """How alike two stretches are, by their kernels or, where those differ, by the classes of them: 0 to 1."""
    token, coarse = sequence.token, sequence.coarse
    return max(similarity(token[span], token[other]), similarity(coarse[span], coarse[other]) - 0.15)


def _split_lone(sequence: Sequence, model_pass: Pass) -> list[int]:
    """Where the first or last attention is no block's: what is next to it, and between it and the others, is not next
    to or between others, as where a model pools its inputs or outputs.
    """
    if len(model_pass.anchors) < 5:
        return []
    cuts = []
    for turn, cut in ((1, 1), (-1, len(model_pass.anchors) - 1)):
        gap, *gaps = _spans(model_pass)[::turn][:4]
        anchor, *anchors = model_pass.anchors[::turn][:5]
        if not any(_likeness(sequence, gap, other) >= _UNLIKE for other in gaps) and not any(
            _likeness(sequence, _beside(anchor, side), _beside(other, side)) >= _UNLIKE
            for other in anchors
            for side in (-1, 1)
        ):
            cuts.append(cut)
    return cuts


def _beside(anchor: Anchor, side: int) -> slice:
    """The kernels just before an anchor, or just after it."""
    if side < 0:
        return slice(max(anchor.first - _CONTEXT, 0), anchor.first)
    return slice(anchor.last + 1, anchor.last + 1 + _CONTEXT)


def _split_unlike(sequence: Sequence, model_pass: Pass) -> list[int]:
    """Where one stack follows another: the stretches before are like none after, and what is between the two is like
    neither, or what is next to their attention is not.
    """
    spans = _spans(model_pass)
    cuts: list[int] = []
    for index in range(2, len(spans) - 2):
        before, after = spans[max(index - 3, *cuts[-1:], 0) : index], spans[index + 1 : index + 4]
        if len(before) < 2 or any(_likeness(sequence, a, b) >= _UNLIKE for a in before for b in after):
            continue
        first, second = model_pass.anchors[index : index + 2]
        if all(_likeness(sequence, spans[index], span) < _UNLIKE for span in (*before, *after)) or all(
            _likeness(sequence, _beside(first, side), _beside(second, side)) < _UNLIKE for side in (-1, 1)
        ):
            cuts.append(index + 1)
    return cuts


def _mirrored(passes: list[Pass]) -> list[Pass]:
    """The passes, a backward one divided as the forward passes before it are, in reverse, if it runs all of them."""
    divided: list[Pass] = []
    sizes: list[int] = []
    for model_pass in passes:
        anchors = model_pass.anchors
        if model_pass.direction == FORWARD:
            if divided and divided[-1].direction == BACKWARD:
                sizes = []
            sizes.append(len(anchors))
            divided.append(model_pass)
            continue
        if len(sizes) > 1 and sum(sizes) == len(anchors) and not model_pass.given_up:
            edges = np.cumsum([0, *reversed(sizes)]).tolist()
            divided += [Pass(BACKWARD, anchors[first:end]) for first, end in pairwise(edges)]
        else:
            divided.append(model_pass)
    return divided


def _split_stacks(sequence: Sequence, model_pass: Pass) -> list[int]:
    """Where the blocks of a pass become others, in the products before their attention too (after it backward), as
    double and single blocks do.
    """
    spans, gaps = _spans(model_pass), _gaps(sequence, model_pass)
    if len(gaps) < 5 or similarity(gaps[0], gaps[-1]) >= _SAME_BLOCK:
        return []
    change = next(index for index, gap in enumerate(gaps) if similarity(gap, gaps[0]) < _SAME_BLOCK)
    after = gaps[change + 1 :]
    is_one_kind = all(similarity(gap, gaps[-1]) >= _SAME_BLOCK for gap in after)
    is_in_turn = len(after) > 3 and all(
        similarity(*pair) >= _SAME_BLOCK for pair in zip(after, after[2:], strict=False)
    )
    if not 2 <= change <= len(gaps) - 3 or not (is_one_kind or is_in_turn):
        return []
    products = [np.count_nonzero(sequence.product[span]) for span in spans]
    first = change + (len(gaps) - change + 1) % 2
    if is_in_turn and model_pass.direction == FORWARD and max(products[first::2]) < min(products[first + 1 :: 2]):
        return [first]  # a decoder: what is between its two attentions lacks what every block has
    turn = slice(None, None, -1 if model_pass.direction == FORWARD else 1)
    size = min(len(gaps[0]), len(gaps[-1]))
    differs = np.append(gaps[0][turn][:size] != gaps[-1][turn][:size], True)
    if sequence.product[spans[0]][turn][: int(np.argmax(differs))].any():
        return []
    return [change + 1]


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
    spans = _spans(model_pass)
    if not spans:
        return 0

    def likeness(distance: int) -> list[float]:
        return [_likeness(sequence, a, b) for a, b in zip(spans, spans[distance:], strict=False)]

    neighbours, every_second = likeness(1), likeness(2)
    if len(model_pass.anchors) % 2 == 0 and len(spans) >= 3:
        products = [np.count_nonzero(sequence.product[span]) for span in spans]
        lengths = [span.stop - span.start for span in spans]
        shorter = max(products[0::2]) < min(products[1::2]) and max(lengths[0::2]) < min(lengths[1::2])
        likeness_of_two = float(np.median(every_second))
        if shorter and likeness_of_two > np.median(neighbours) + 0.1:
            return 2  # the second lacks what every block has, as attention to an encoder does
        if likeness_of_two > _ALIKE_MIXERS and np.median(neighbours) < 1 - _ALIKE_MIXERS:
            return 2  # two mixers side by side have nothing in common, while two kinds of blocks do
    if not neighbours:
        return 1
    best = np.maximum([0.0, *neighbours], [*neighbours, 0.0])
    threshold = _ALIKE if len(every_second) > 1 else _SAME_BLOCK
    repeats = bool(every_second) and float(np.median(every_second)) >= threshold
    return int(repeats or float(np.median(best)) >= _ALIKE)


def _cut(sequence: Sequence, model_pass: Pass, aligner: Aligner, is_post_norm: bool | None) -> list[int]:
    """Where the blocks of a pass begin, and where the last one ends."""
    token, left, right = sequence.token, model_pass.left, model_pass.right
    groups = _groups(model_pass)
    before = token[left : groups[0][0].first]
    after = token[groups[-1][-1].last + 1 : right]
    spans = [(a[-1].last + 1, b[0].first) for a, b in pairwise(groups)]
    sums = sequence.is_sum[token[left:right]]
    if not all(sums[start - left : end - left].any() for start, end in spans):
        sums = sequence.sums[left:right]
    starts_block = np.append(sequence.is_sum_and_norm[token[left + 1 : right]], False)
    preference = np.append(0.0, np.where(sums | starts_block, _END_OF_BLOCK, 0.0))
    if is_post_norm is None:  # without a backward pass: three look-ups, of words, positions and types, are BERT's
        looked_up = sequence.coarse[max(left - 1, 0) : groups[0][0].first] == _EMBEDDING
        is_post_norm = bool(np.count_nonzero(looked_up) > 2)
    if is_post_norm and model_pass.direction == FORWARD:
        preference[1:] += np.where(sequence.coarse[left:right] == _NORM, 2 * _END_OF_BLOCK, 0.0)
    relative = [(start - left, end - left) for start, end in spans]
    borders = [left + border for border in _borders(token[left:right], relative, (after, before), preference, aligner)]
    starts = _distinct([token[border:end] for border, (_, end) in zip(borders, spans, strict=True)])
    ends = _distinct([token[start:border] for border, (start, _) in zip(borders, spans, strict=True)])
    _, start = max((_longest(aligner.end(section, [before])[0]) for section in starts), default=(0.0, 0))
    _, end = max((_longest(aligner.start(section, [after])[0]) for section in ends), default=(0.0, 0))
    return [groups[0][0].first - start, *borders, groups[-1][-1].last + 1 + end]


def _distinct(sides: list[Int64Array]) -> list[Int64Array]:
    return list({side.tobytes(): side for side in sides}.values())[:_MOST_SIDES]


def _longest(scores: FloatArray) -> tuple[float, int]:
    """The best score, and its length."""
    length = int(np.argmax(scores))
    return float(scores[length]), length


def _borders(
    token: Int64Array,
    spans: list[tuple[int, int]],
    edges: tuple[Int64Array, Int64Array],
    preference: FloatArray,
    aligner: Aligner,
) -> list[int]:
    """For each stretch between two blocks, where the second begins: where most of it is explained by the ends and
    starts of blocks that are known.

    The first known are the edges of the pass, after its last block and before its first. The stretches that they
    explain best come first; the two sides of those explain the others, where blocks are of several kinds.

    Args:
        token: The tokens of the pass.
        spans: First position and end of each stretch.
        edges: What follows the last block, and what precedes the first.
        preference: By position, how much sooner a block begins there than elsewhere; 1 for a kernel explained.
        aligner: Aligns them.
    """
    keys = [token[start:end].tobytes() for start, end in spans]
    span_of = dict(zip(keys, spans, strict=True))
    lengths: dict[bytes, int] = {}
    ends, starts = [edges[0]], [edges[1]]
    while len(lengths) < len(span_of):
        unsolved = {key: span for key, span in span_of.items() if key not in lengths}
        gaps = [token[start:end] for start, end in unsolved.values()]
        by_ends = zip(*(aligner.start(other, gaps) for other in ends), strict=True)
        by_starts = zip(*(aligner.end(other, gaps) for other in starts), strict=True)
        options = {
            key: _border(np.max(of_ends, axis=0), np.max(of_starts, axis=0)[::-1], preference[start : end + 1])
            for (key, (start, end)), of_ends, of_starts in zip(unsolved.items(), by_ends, by_starts, strict=True)
        }
        best_share = max(share for share, _ in options.values())
        for key, (share, length) in options.items():
            if share >= best_share - 0.05:
                lengths[key] = length
        solved = [(*span_of[key], length) for key, length in list(lengths.items())[:_MOST_SIDES]]
        ends = [token[start : start + length] for start, _, length in solved]
        starts = [token[start + length : end] for start, end, length in solved]
    return [start + lengths[key] for key, (start, _) in zip(keys, spans, strict=True)]


def _border(by_ends: FloatArray, by_starts: FloatArray, preference: FloatArray) -> tuple[float, int]:
    """The share of a stretch that is explained, and where in it one block ends and the next begins.

    Args:
        by_ends: By position, how well what is before it agrees with the end of a block.
        by_starts: By position, how well what is from it on agrees with the start of a block.
        preference: By position, how much sooner a block begins there than elsewhere; 1 for a kernel explained.
    """
    by_starts = by_starts - np.append(preference[1:] > 0, False)  # no block starts with what one ends with
    by_ends, by_starts = np.maximum.accumulate(by_ends), np.maximum.accumulate(by_starts[::-1])[::-1]
    end = int(np.argmax(by_ends > by_ends[-1] - _TIE))
    start = len(by_starts) - 1 - int(np.argmax(by_starts[::-1] > by_starts[0] - _TIE))
    trusts_end = bool(by_ends[-1] > by_starts[0])
    low, high = start, end  # where both explain, else where what neither explains would be of the side explained less
    if end <= start:
        low, high = (end - _NEAR, end + _NEAR) if trusts_end else (start - _NEAR, start + _NEAR)
    low, high = max(low, 0), min(high, len(by_ends) - 1)
    explained = by_ends + by_starts + preference
    best = float(explained[low : high + 1].max())
    ties = low + np.flatnonzero(explained[low : high + 1] > best - _TIE)
    return best / max(len(by_ends) - 1, 1), int(ties[0 if trusts_end else -1])


def _groups(model_pass: Pass) -> list[tuple[Anchor, ...]]:
    """The anchors of each block of a pass."""
    return [
        tuple(model_pass.anchors[index : index + model_pass.width])
        for index in range(0, len(model_pass.anchors), model_pass.width)
    ]


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
    inside = _inside(model_pass)
    for number, other in enumerate(stacks):
        if len(other.blocks) != len(model_pass.blocks) or other.width != model_pass.width:
            continue
        if similarity(sequence.token[_inside(other)], sequence.token[inside]) >= _SAME_BLOCK:
            return number
        likeness = similarity(sequence.coarse[_inside(other)], sequence.coarse[inside])
        if likeness >= _SAME_STACK and _inputs(other, sequence) == _inputs(model_pass, sequence):
            return number
    stacks.append(model_pass)
    return len(stacks) - 1


def _inputs(model_pass: Pass, sequence: Sequence) -> float:
    """How many matrix products the blocks of a pass have before their attention."""
    products = [np.count_nonzero(sequence.product[block.first : block.anchors[0].first]) for block in model_pass.blocks]
    return float(np.median(products))


def _inside(model_pass: Pass) -> slice:
    return slice(model_pass.blocks[0].first, model_pass.blocks[-1].last + 1)
