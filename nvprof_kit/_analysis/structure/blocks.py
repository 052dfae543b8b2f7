"""From anchors to blocks: passes through the model, where each block begins and ends, and one number for each layer.

A *pass* is a stretch of anchors of one direction between two visits of the model's ends (the embedding, the loss). Its
anchors are grouped into blocks by what is between them: from one block to the next are all parts of a block, between
two attentions of one block only some. A backward pass runs the blocks of the forward passes before it in reverse.
The kernels between two groups are the end of one block and the start of the next. Where one ends is seen at the edges
of the pass: what precedes its first anchor ends as a block starts, what follows its last anchor starts as a block ends.
Where the two leave a choice, a block ends with the sum of its residual stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from nvprof_kit._analysis.attribution.intervals import Floats, Int64Array
from nvprof_kit._analysis.kernels.classes import CLASSES
from nvprof_kit._analysis.structure.tokens import BACKWARD, FORWARD, Anchor, Sequence

_ALIKE, _SAME_STACK, _SAME_BLOCK = 0.6, 0.5, 0.8
"""Shares of common kernels from which on stretches repeat, and passes of equal size and all passes are of one stack."""
_SAME_ORDER = 0.65
"""Share of common pairs of successive classes from which on stretches repeat."""
_UNLIKE = 0.5
"""Stretches that are less alike have nothing in common."""
_CONTEXT = 8
_WEIGHTS, _INNER = np.array([2, 1, 1]), 2.6
"""Of norms, sums and products of a stretch; the most that is within a block, where 4 is between blocks."""
_MOST_SIDES = 8
_SOFTMAX, _NORM, _EMBEDDING = (list(CLASSES).index(name) for name in ("softmax", "norm", "embedding"))
_LEAST_RUN = 3

_MATCH, _OTHER_NORM, _OTHER_PRODUCT, _MISMATCH = 1.0, 0.75, 0.0, -1.0
_OPEN, _EXTEND, _PRODUCT, _SUM = -1.5, -0.05, -2.0, -12.0
"""Scores of an alignment: an equal kernel, a norm or product for another, any other pair; a gap, and each kernel in it,
product or sum of a residual stream.
"""
_END_OF_BLOCK = 0.6
"""How much sooner a block ends after a sum than elsewhere, in kernels."""
_TIE, _NEAR = 0.3, 3
"""Borders are as good as each other within this score; so many kernels beside one are looked at for a better."""
_HOPELESS = 25.0
"""An alignment that is so much worse than the best is not continued."""
_LONGEST = 1200
"""Kernels of each stretch that are compared at most."""
_LEAST_COMPARED, _LEAST_WORK = 40_000, 30_000
"""Of passes that repeat none before so many kernels are compared, or every 25th of all, before the others are given up;
and so many steps of alignments are taken, or one for every 60th kernel.
"""

Group = tuple[Anchor, ...]


class Aligner:
    """Aligns stretches of one sequence; the same two are aligned once.

    Attributes:
        work: Steps of alignments that are left until the sequence is given up.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._is_norm, self._is_product = sequence.is_norm, sequence.is_product
        self._skip = np.where(sequence.is_product, _PRODUCT, np.where(sequence.is_sum, _SUM, _EXTEND))
        self._scores: dict[tuple[bytes, bytes], Floats] = {}
        self.work = max(_LEAST_WORK, len(sequence.token) // 60)

    def start(self, tokens: Int64Array, targets: Iterable[Int64Array]) -> list[Floats]:
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

    def end(self, tokens: Int64Array, targets: Iterable[Int64Array]) -> list[Floats]:
        """How well the end of `tokens` agrees with each end of each of `targets`, by length."""
        return self.start(tokens[::-1], [target[::-1] for target in targets])

    def _align(self, tokens: Int64Array, targets: list[Int64Array]) -> list[Floats]:
        """Align `tokens` with all of `targets` at once, a row each."""
        length = min(max(len(target) for target in targets), _LONGEST)
        other = np.full((len(targets), length), -1)
        for row, stretch in zip(other, targets, strict=True):
            row[: len(stretch)] = stretch[:length]
        weight = np.where(other < 0, 0.0, self._skip[other])
        norm, product = ((other >= 0) & kind[other] for kind in (self._is_norm, self._is_product))
        skipped = np.concatenate([np.zeros((len(targets), 1)), np.cumsum(weight, axis=1)], axis=1)
        above = skipped + np.where(skipped < 0, _OPEN, 0.0)
        best, vertical = above.copy(), np.full(above.shape, -np.inf)
        for token in tokens.tolist():
            self.work -= 1 + other.size // 1000
            vertical = np.maximum(vertical, above + _OPEN) + self._skip[token]
            column = vertical.copy()
            differ = np.minimum(weight, self._skip[token]) + _MISMATCH
            if self._is_norm[token]:
                differ[norm] = _OTHER_NORM
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
        counts = [len(stretch) for stretch in targets]
        ends = [np.full(max(count - length, 0), -np.inf) for count in counts]
        return [np.append(row[: count + 1], end) for row, count, end in zip(best, counts, ends, strict=True)]


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
    anchors: Group
    recomputes: bool = False
    stack: int = -1
    number: int = -1


@dataclass(eq=False)
class Pass:
    """A pass through the blocks of one stack, in the order of launches; `groups` are the anchors of each block."""

    direction: int
    groups: list[Group]
    left: int = 0
    right: int = 0
    blocks: list[Block] = field(default_factory=list)
    stack: int = -1
    given_up: bool = False

    @property
    def anchors(self) -> list[Anchor]:
        """Those of all blocks."""
        return [anchor for group in self.groups for anchor in group]

    @property
    def spans(self) -> list[slice]:
        """What is between the anchors of two blocks, each."""
        return [slice(before[-1].last + 1, after[0].first) for before, after in pairwise(self.groups)]


def find_passes(sequence: Sequence) -> tuple[list[Pass], int]:
    """The passes of a sequence with their blocks, in order, and how many were given up: in a long sequence those that
    repeat none before. Passes without evidence of repetition are left out.
    """
    recomputed_at = np.array([anchor.first for anchor in sequence.anchors if anchor.recomputed], dtype=np.int64)
    passes = _split(sequence)
    given_up = _give_up(passes, sequence)
    passes = _with_bounds(_with_blocks(passes, sequence), len(sequence.token))
    aligner = Aligner(sequence)
    cuts: dict[tuple[bytes, tuple[int, ...]], list[tuple[int, int]]] = {}
    lengths: dict[int, dict[bytes, int]] = {BACKWARD: {}, FORWARD: {}}
    for model_pass in sorted(passes, key=lambda model_pass: model_pass in (passes[0], passes[-1])):  # may be cut
        if model_pass.given_up:
            continue
        left, right = model_pass.left, model_pass.right
        positions = (position - left for group in model_pass.groups for anchor in group for position in anchor[:2])
        key = sequence.token[left:right].tobytes(), (len(model_pass.groups), *positions)
        if key not in cuts:
            if aligner.work <= 0:
                given_up += 1
                continue
            repeats = _repeats(sequence, model_pass, lengths[model_pass.direction])
            edges = _cut(sequence, model_pass, aligner, lengths[model_pass.direction]) if repeats else []
            cuts[key] = [(start - left, stop - left) for start, stop in pairwise(edges)]
        for (start, stop), group in zip(cuts[key], model_pass.groups, strict=False):
            block = Block(left + start, left + stop - 1, model_pass.direction, group)
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


def _split(sequence: Sequence) -> list[Pass]:
    """Divide anchors into passes where their direction changes, or where between two of them are kernels of the
    model's ends that are not in what is near.
    """
    outer_tokens = frozenset(np.unique(sequence.token[sequence.outer]).tolist())
    outer_of: dict[bytes, frozenset[int]] = {}
    passes: list[Pass] = []
    anchors = [anchor for anchor in sequence.anchors if not anchor.recomputed]
    for direction, run in groupby(anchors, key=lambda anchor: anchor.direction):
        of_direction = list(run)
        spans = Pass(direction, [(anchor,) for anchor in of_direction]).spans
        norms = _counts(sequence, spans)[0]
        inside = []
        for span in spans:
            key = sequence.token[span].tobytes()
            if key not in outer_of:
                outer_of[key] = outer_tokens.intersection(sequence.token[span].tolist())
            inside.append(outer_of[key])
        breaks = []
        for index, tokens in enumerate(inside):
            near: list[frozenset[int]] = []
            for side, step in ((inside[index + 1 : index + 5], 1), (inside[max(index - 4, 0) : index][::-1], -1)):
                is_beside_inner = bool(side) and 2 * norms[index + step] <= norms[index]
                near += side[: 4 if is_beside_inner else 2]  # two blocks, of two anchors or of one
            if tokens.difference(*near):
                breaks.append(index + 1)
        for first, end in pairwise([0, *breaks, len(of_direction)]):
            pass_anchors = of_direction[first:end]
            is_softmax = [bool((sequence.coarse[a.first : a.last + 1] == _SOFTMAX).all()) for a in pass_anchors]
            if len(is_softmax) > 3 and sum(is_softmax) == 1:  # at an edge: it pools what the blocks give
                pass_anchors = pass_anchors[int(is_softmax[0]) : len(is_softmax) - int(is_softmax[-1])]
            passes.append(Pass(direction, [(anchor,) for anchor in pass_anchors]))
    return _with_bounds(passes, len(sequence.token))


def _with_bounds(passes: list[Pass], size: int) -> list[Pass]:
    """The passes, each from the last anchor of the one before to the first anchor of the one after it."""
    for index, model_pass in enumerate(passes):
        model_pass.left = passes[index - 1].groups[-1][-1].last + 1 if index else 0
        model_pass.right = passes[index + 1].groups[0][0].first if index + 1 < len(passes) else size
    return passes


def _with_blocks(passes: list[Pass], sequence: Sequence) -> list[Pass]:
    """The passes, divided into those of one stack each, their anchors grouped into blocks.

    A backward pass with as many anchors as the forward passes before it has their blocks, in reverse.
    """
    divided: list[Pass] = []
    layouts: dict[bytes, list[list[int]]] = {}  # passes with the same kernels are divided alike
    forward: list[list[int]] = []
    for model_pass in passes:
        anchors, direction = model_pass.anchors, model_pass.direction
        if model_pass.given_up:
            divided.append(model_pass)
            continue
        if direction == FORWARD and divided and divided[-1].direction == BACKWARD:
            forward = []
        layout = _mirrored(forward, len(anchors)) if direction == BACKWARD else []
        if layout:
            del forward[len(forward) - len(layout) :]
        else:
            key = sequence.token[model_pass.left : model_pass.right].tobytes() + bytes([direction])
            if key not in layouts:
                lone_start, lone_end = _lone(sequence, model_pass)
                inner = Pass(direction, model_pass.groups[lone_start : len(anchors) - lone_end])
                model_pass.groups[lone_start : len(anchors) - lone_end] = _grouped(sequence, inner)
                widths = [len(group) for group in model_pass.groups]
                runs = [0, *_split_runs(sequence, model_pass), len(widths)]
                cuts = [cut for first, end in pairwise(runs) for cut in _split_stacks(sequence, model_pass, first, end)]
                edges = sorted({*runs, *cuts, lone_start, len(widths) - lone_end})
                layouts[key] = [widths[first:end] for first, end in pairwise(edges)]
            layout = layouts[key]
            if direction == FORWARD:
                forward += layout
        first = 0
        for stack in layout:
            edges = np.cumsum([first, *stack]).tolist()
            divided.append(Pass(direction, [tuple(anchors[a:b]) for a, b in pairwise(edges)]))
            first = edges[-1]
    return divided


def _mirrored(forward: list[list[int]], count: int) -> list[list[int]]:
    """The blocks of forward passes in reverse, of the last with so many anchors; none if there is no such number.

    Of the first of them the last two blocks may be missing, as those of a tower that are not used.
    """
    layout: list[list[int]] = []
    for stack in reversed(forward):
        for unused in range(3):
            used = stack[: len(stack) - unused]
            if (count == sum(used) and len(used) > 2) or (count > sum(used) and not unused):
                break
        else:
            return []
        layout.append(used[::-1])
        count -= sum(used)
        if not count:
            return layout
    return []


def _lone(sequence: Sequence, model_pass: Pass) -> tuple[bool, bool]:
    """Whether the first and the last attention are no block's: what is next to it, and between it and the others, is
    not next to or between others, as where a model pools its inputs or outputs.
    """
    if len(model_pass.groups) < 5:
        return False, False

    def is_lone(turn: int) -> bool:
        gap, *gaps = model_pass.spans[::turn][:4]
        anchor, *anchors = model_pass.anchors[::turn][:5]
        pairs = [(gap, other) for other in gaps]
        pairs += [(_beside(anchor, side), _beside(other, side)) for other in anchors for side in (-1, 1)]
        return not any(_likeness(sequence, span, other) >= _UNLIKE for span, other in pairs)

    return is_lone(1), is_lone(-1)


def _beside(anchor: Anchor, side: int) -> slice:
    """The kernels just before an anchor, or just after it."""
    if side < 0:
        return slice(max(anchor.first - _CONTEXT, 0), anchor.first)
    return slice(anchor.last + 1, anchor.last + 1 + _CONTEXT)


def _counts(sequence: Sequence, spans: list[slice]) -> Int64Array:
    """How many norms, sums and matrix products are in each of some stretches; shape ``(3, len(spans))``."""
    kinds = sequence.is_norm, sequence.is_sum, sequence.is_product
    return np.array([[np.count_nonzero(kind[sequence.token[span]]) for span in spans] for kind in kinds])


def _grouped(sequence: Sequence, model_pass: Pass) -> list[Group]:
    """The anchors of each block: between two of one block are fewer norms, sums and products than between blocks, as
    all sublayers of a block are there. All blocks have one anchor, or some several and equally many.
    """
    anchors, spans = model_pass.anchors, model_pass.spans
    if not spans:
        return model_pass.groups
    counts = _counts(sequence, spans)
    size = np.round(_WEIGHTS @ (counts / np.maximum(counts.mean(axis=1, keepdims=True), 1)), 1)
    kinds = {int(sequence.coarse[anchor.first]) for anchor in anchors}
    options = [(True, model_pass.groups)]
    for threshold in np.unique(size)[1:].tolist():
        is_border = size >= threshold
        edges = [0, *(1 + np.flatnonzero(is_border)).tolist(), len(anchors)]
        widths = np.diff(edges)
        runs = [len(list(run)) for width, run in groupby(widths.tolist()) if width > 1]
        shares = counts[:, ~is_border].mean(axis=1) / np.maximum(counts[:, is_border].mean(axis=1), 1)
        if (widths[widths > 1] != widths.max()).any() or _WEIGHTS @ shares > _INNER:
            continue
        inner = spans[edges[widths.argmax()] :][: widths.max() - 1]
        pairs_by_lag = (zip(inner, inner[lag:], strict=False) for lag in (1, 2))
        likeness_by_lag = ([_likeness(sequence, a, b) for a, b in pairs] for pairs in pairs_by_lag)
        if any(likeness and np.median(likeness) >= _ALIKE for likeness in likeness_by_lag):
            continue  # these are blocks, and the wider stretches between two runs of them
        is_scattered = min(runs) < 2
        if is_scattered:  # a second attention of some blocks: the same everywhere, with half the products
            seconds = [spans[index] for index in np.flatnonzero(~is_border)]
            is_second = len(runs) > 1 and len(kinds) == 1 and widths.max() == 2 and shares[2] <= 0.5
            if not is_second or min(_likeness(sequence, a, b) for a, b in pairwise(seconds)) < _ALIKE:
                continue
        options.append((is_scattered, [tuple(anchors[first:end]) for first, end in pairwise(edges)]))
    return min(options, key=lambda option: (option[0], len(option[1])))[1]


def _split_runs(sequence: Sequence, model_pass: Pass) -> list[int]:
    """Where a pass is several runs of a model without a loss or a look-up between them, as the steps of a diffusion
    model: what is between two runs has all that is after the last and before the first, what is between blocks not.
    """
    token, groups, size = sequence.token, model_pass.groups, len(sequence.is_norm)
    before = token[model_pass.left : groups[0][0].first]
    after = token[groups[-1][-1].last + 1 : model_pass.right]
    ends = np.bincount(np.concatenate([before, after]), minlength=size)
    in_both = [np.minimum(np.bincount(token[span], minlength=size), ends).sum() for span in model_pass.spans]
    between = 1 + np.flatnonzero(np.array(in_both) == ends.sum())
    lengths = np.diff([0, *between.tolist(), len(groups)])
    if len(between) < len(in_both) and (lengths == lengths[0]).all() and lengths[0] >= _LEAST_RUN:
        return [int(index) for index in between]
    return []


def _split_stacks(sequence: Sequence, model_pass: Pass, first: int, end: int) -> list[int]:
    """Where one stack follows another in a run of blocks: where blocks get more attentions, as from an encoder to a
    decoder; or where blocks become unlike, after a norm more, or with half or twice the norms from there on.
    """
    widths, spans = [len(group) for group in model_pass.groups[first:end]], model_pass.spans[first : end - 1]
    narrow = widths.index(max(widths))
    is_decoder = narrow > 0 and min(widths[narrow:]) == max(widths) > 1
    cuts = [first + narrow] if is_decoder else []
    norms = _counts(sequence, spans)[0]
    for index in range(2, len(spans) - 2):
        before, after = slice(max(index - 3, 0), index), slice(index + 1, index + 4)
        low, high = sorted((norms[before], norms[after]), key=np.mean)
        if 2 * low.max() < high.min() or (
            norms[index] > max(low.max(), high.max())
            and not any(_likeness(sequence, a, b) >= _UNLIKE for a in spans[before] for b in spans[after])
        ):
            cuts.append(first + index + 1)
    return cuts


def _likeness(sequence: Sequence, span: slice, other: slice) -> float:
    """How alike two stretches are, by their kernels or, where those differ, by the classes of them: 0 to 1."""
    token, coarse = sequence.token, sequence.coarse
    return max(similarity(token[span], token[other]), similarity(coarse[span], coarse[other]) - 0.15)


def _repeats(sequence: Sequence, model_pass: Pass, lengths: dict[bytes, int]) -> bool:
    """Whether most of what is between blocks has its classes in the order of what is beside it, or beside that; or all
    of it is in other passes, of which `lengths` tells how they were cut.
    """
    spans = model_pass.spans
    if len(spans) < 2 or all(sequence.token[span].tobytes() in lengths for span in spans):
        return len(spans) > 0
    classes = [sequence.coarse[span] for span in spans]
    pairs = [of_span[:-1] * len(CLASSES) + of_span[1:] for of_span in classes]
    neighbours = [similarity(*both) for both in pairwise(pairs)]
    second = [similarity(*both) for both in zip(pairs, pairs[2:], strict=False)]
    best = np.maximum([0.0, *neighbours], [*neighbours, 0.0])
    return max(float(np.median(best)), float(np.median(second or [0.0]))) >= _SAME_ORDER


def _cut(sequence: Sequence, model_pass: Pass, aligner: Aligner, lengths: dict[bytes, int]) -> list[int]:
    """Where the blocks of a pass begin, and where the last one ends; `lengths` as in `_borders`."""
    token, left, right = sequence.token, model_pass.left, model_pass.right
    anchors, spans = model_pass.anchors, [(span.start, span.stop) for span in model_pass.spans]
    before, after = token[left : anchors[0].first], token[anchors[-1].last + 1 : right]
    sums = (sequence.is_sum[token[left:right]].astype(float) + sequence.sums[left:right]) / 2
    starts_block = np.append(sequence.is_sum_and_norm[token[left + 1 : right]], False)
    preference = np.append(0.0, _END_OF_BLOCK * np.maximum(sums, starts_block))
    looked_up = sequence.coarse[max(left - 1, 0) : anchors[0].first] == _EMBEDDING
    if model_pass.direction == FORWARD and np.count_nonzero(looked_up) > 2:  # words, positions and types, as BERT's
        preference[1:] += np.where(sequence.coarse[left:right] == _NORM, 2 * _END_OF_BLOCK, 0.0)
    relative = [(start - left, end - left) for start, end in spans]
    borders = _borders(token[left:right], relative, (after, before), preference, aligner, lengths=lengths)
    borders = [left + border for border in borders]
    starts = _distinct([token[border:end] for border, (_, end) in zip(borders, spans, strict=True)])
    ends = _distinct([token[start:border] for border, (start, _) in zip(borders, spans, strict=True)])
    start = max((_longest(aligner.end(section, [before])[0]) for section in starts), default=(0.0, 0))[1]
    end = max((_longest(aligner.start(section, [after])[0]) for section in ends), default=(0.0, 0))[1]
    return [anchors[0].first - start, *borders, anchors[-1].last + 1 + end]


def _distinct(sides: list[Int64Array]) -> list[Int64Array]:
    return list({side.tobytes(): side for side in sides}.values())[:_MOST_SIDES]


def _longest(scores: Floats) -> tuple[float, int]:
    """The best score, and its length."""
    length = int(np.argmax(scores))
    return float(scores[length]), length


def _borders(
    token: Int64Array,
    spans: list[tuple[int, int]],
    edges: tuple[Int64Array, Int64Array],
    preference: Floats,
    aligner: Aligner,
    *,
    lengths: dict[bytes, int],
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
        lengths: How much of each stretch is of the first of two blocks; those of other passes are known, and those of
            this one are added.
    """
    keys = [token[start:end].tobytes() for start, end in spans]
    span_of = dict(zip(keys, spans, strict=True))
    ends, starts = [edges[0]], [edges[1]]
    while not span_of.keys() <= lengths.keys():
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
        solved = [(*span_of[key], length) for key, length in lengths.items() if key in span_of][:_MOST_SIDES]
        ends = [token[start : start + length] for start, _, length in solved]
        starts = [token[start + length : end] for start, end, length in solved]
    return [start + lengths[key] for key, (start, _) in zip(keys, spans, strict=True)]


def _border(by_ends: Floats, by_starts: Floats, preference: Floats) -> tuple[float, int]:
    """The share of a stretch that is explained, and where in it one block ends and the next begins.

    Args:
        by_ends: By position, how well what is before it agrees with the end of a block.
        by_starts: By position, how well what is from it on agrees with the start of a block.
        preference: By position, how much sooner a block begins there than elsewhere; 1 for a kernel explained.
    """
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


def number_blocks(passes: list[Pass], sequence: Sequence) -> list[Pass]:
    """Give each block its stack and number, so that a layer is the same in every pass.

    Forward passes with as many blocks of about the same kernels are the same stack. Backward passes belong to the
    forward passes before them, in reverse order. The first pass of a capture may lack blocks that ran before it began,
    and the last one those that ran after it ended.

    Returns:
        One forward pass of each stack (a backward pass where there is no forward one).
    """
    if not passes:
        return []
    first, last = passes[0], passes[-1]
    complete_passes = dict(zip(passes, passes, strict=True))
    complete_passes[last] = _complete(last, passes, sequence, is_first=False)
    complete_passes[first] = _complete(first, passes, sequence, is_first=True)
    stacks: list[Pass] = []
    waiting: list[Pass] = []
    unmatched: list[Pass] = []
    for model_pass, complete in complete_passes.items():
        if model_pass.direction == FORWARD:
            model_pass.stack = _stack_of(stacks, complete, sequence)
            if waiting and waiting[-1].direction == BACKWARD:
                waiting = []
            waiting.append(model_pass)
            continue
        sizes = {other: len(complete_passes[other].blocks) for other in waiting}
        size = len(complete.blocks)
        same = [other for other in waiting if sizes[other] == size]
        # the backward pass of a tower of which the last blocks are not used is shorter
        same = same or [other for other in waiting[-1:] if 3 <= size < sizes[other] <= size + 2]
        if same:
            model_pass.stack = same[-1].stack
            waiting.remove(same[-1])
        else:
            unmatched.append(model_pass)
    backward = [model_pass for model_pass in passes if model_pass.direction == BACKWARD and model_pass.stack >= 0]
    for model_pass in unmatched:
        complete = complete_passes[model_pass]
        same = [other for other in backward if _is_same_stack(complete_passes[other].blocks, complete.blocks, sequence)]
        model_pass.stack = same[0].stack if same else _stack_of(stacks, complete, sequence)
    for model_pass, complete in complete_passes.items():
        is_forward = model_pass.direction == FORWARD
        missing = len(complete.blocks) - len(model_pass.blocks) if is_forward == (model_pass is first) else 0
        for index, block in enumerate(model_pass.blocks if is_forward else reversed(model_pass.blocks)):
            block.stack, block.number = model_pass.stack, missing + index
    for number, stack in enumerate(stacks):
        members = [model_pass for model_pass in passes if model_pass.stack == number]
        size = len(stack.blocks)
        if size > _LEAST_RUN and all(_pools(model_pass, size) for model_pass in members):
            for model_pass in members:
                model_pass.blocks = [block for block in model_pass.blocks if block.number < size - 1]
    return stacks


def _pools(model_pass: Pass, size: int) -> bool:
    """Whether the last attention of so many pools what the blocks give: nothing after it is as in a block."""
    if model_pass.direction == FORWARD:
        block = model_pass.blocks[-1]
        return block.number < size - 1 or block.anchors[-1].last == block.last < model_pass.right - 1
    block = model_pass.blocks[0]
    return block.number < size - 1 or block.anchors[0].first == block.first > model_pass.left


def _complete(model_pass: Pass, passes: list[Pass], sequence: Sequence, *, is_first: bool) -> Pass:
    """The pass of which the last blocks are most like those of the capture's first pass, or the first blocks like
    those of its last one, if the capture lacks the others; else the pass itself.
    """
    inner_passes = [other for other in passes[1:-1] if other.direction == model_pass.direction]
    size = len(model_pass.blocks)
    if any(_is_same_stack(other.blocks, model_pass.blocks, sequence) for other in inner_passes):
        return model_pass
    uncut = slice(min(size - 1, 1), None) if is_first else slice(max(size - 1, 1))
    blocks = model_pass.blocks[uncut]
    similarities: dict[Pass, float] = {}
    for other in inner_passes:
        same = (other.blocks[-size:] if is_first else other.blocks[:size])[uncut]
        if len(other.blocks) > size and _is_same_stack(same, blocks, sequence):
            similarities[other] = similarity(sequence.token[_inside(same)], sequence.token[_inside(blocks)])
    return max(similarities, key=similarities.__getitem__, default=model_pass)


def _stack_of(stacks: list[Pass], model_pass: Pass, sequence: Sequence) -> int:
    """The stack that a pass runs, a new one if no stack is alike."""
    for number, other in enumerate(stacks):
        if _is_same_stack(other.blocks, model_pass.blocks, sequence):
            return number
    stacks.append(model_pass)
    return len(stacks) - 1


def _is_same_stack(blocks: list[Block], other_blocks: list[Block], sequence: Sequence) -> bool:
    """Whether as many blocks have about the same kernels, or kernels of the same classes and as many inputs."""
    if [len(block.anchors) for block in blocks] != [len(block.anchors) for block in other_blocks]:
        return False
    inside, other = _inside(blocks), _inside(other_blocks)
    if similarity(sequence.token[inside], sequence.token[other]) >= _SAME_BLOCK:
        return True
    first, second = (
        np.median([np.count_nonzero(sequence.product[block.first : block.anchors[0].first]) for block in run])
        for run in (blocks, other_blocks)
    )
    is_alike = similarity(sequence.coarse[inside], sequence.coarse[other]) >= _SAME_STACK
    return is_alike and bool(first == second)


def _inside(blocks: list[Block]) -> slice:
    return slice(blocks[0].first, blocks[-1].last + 1)
