"""Floating point operations from a trace's own shapes, without a count of the program.

A PyTorch trace recorded with shapes (``record_shapes=True``) has the arguments of every operator. The formulas are
those of PyTorch's own counter (`torch.utils.flop_counter`), rewritten here because reading a trace must not need
PyTorch. Of nested operators the outermost one with a formula counts. An operator that multiplies matrices but has no
formula, or lacks its shapes, is listed by name as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array, Nesting, nest
from nvprof_kit._analysis.attribution.ranges import Elsewhere, Ranges
from nvprof_kit._analysis.attribution.warm_up import StepChoice
from nvprof_kit._analysis.flops.counted import Chain, Counted, Key, Work, add
from nvprof_kit._analysis.flops.rows import Row
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES

COUNTS_NOTHING = frozenset(
    {"prim", "prims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"}
)
"""Namespaces of operators that multiply nothing, as in `nvprof_kit._instrument.flops.operators`."""

MULTIPLIES = re.compile(
    r"mm(?![aiy])|matmul|conv(?!ert)|attention|(?<!i)linear(?!1d|_comb)|^_trilinear$|_rnn|lstm_mps|^(add)?mv$|^v?dot$"
    r"|^_fft_|_cdist_|cholesky|triangular_solve|lu_solve|ormqr|geqrf|transformer_encoder"
    r"|^_?linalg_(?!vector_norm|cross|diagonal|check)"
)
"""PyTorch operators that multiply matrices, by name, as in that module."""

ONLY_MOVES = re.compile(r"prepack$|_pack_|reorder|flatten_weight|_search$")
"""Those of them that only prepare data, as in that module."""

_NO_OPERATORS = frozenset({"autograd", "inductor", "torch"})
"""Namespaces of events that the profiler records but that are not operators."""

_TYPES = (
    ("fp4", r"float4"),
    ("fp8", r"float8"),
    ("int8", r"^(un)?signed char$"),
    ("fp16", r"half|complexhalf"),
    ("bf16", r"bfloat16"),
    ("fp32", r"^float$|complex<float>"),
    ("fp64", r"^double$|complex<double>"),
)
"""Number types by the profiler's names, the narrowest first."""

Shape = Sequence[int]
Said = Sequence[Any]


class _Call(NamedTuple):
    """The arguments of an operator: their shapes, and the values of those that are not tensors."""

    dims: Said
    concrete: Said

    def shape(self, position: int, rank: int) -> Shape:
        lengths = self.dims[position]
        if len(lengths) < rank or not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise ValueError(f"argument {position} has no shape")
        return list(lengths)

    def value(self, position: int) -> Any:
        return json.loads(str(self.concrete[position]).replace("True", "true").replace("False", "false"))


def _mm(call: _Call, first: int = 0) -> int:
    (rows, inner), (_, columns) = call.shape(first, 2), call.shape(first + 1, 2)
    return 2 * rows * inner * columns


def _bmm(call: _Call, first: int = 0) -> int:
    (batch, rows, inner), (_, _, columns) = call.shape(first, 3), call.shape(first + 1, 3)
    return 2 * batch * rows * inner * columns


def _grouped_mm(call: _Call) -> int:
    left, right = call.shape(0, 2), call.shape(1, 2)
    return 2 * (left[0] if len(left) == len(right) == 3 else 1) * left[-2] * left[-1] * right[-1]


def _conv(shape: Shape, weight: Shape, out: Shape, transposed: bool) -> int:
    return prod((shape if transposed else out)[2:]) * prod(weight[2:]) * shape[0] * weight[0] * weight[1] * 2


def _convolution(call: _Call) -> int:
    shape, weight = call.shape(0, 3), call.shape(1, 3)
    stride, padding, dilation = (_spread(call.value(position), len(shape) - 2) for position in (3, 4, 5))
    out = [
        (length + 2 * pad - gap * (size - 1) - 1) // step + 1
        for length, pad, gap, size, step in zip(shape[2:], padding, dilation, weight[2:], stride, strict=True)
    ]
    return _conv(shape, weight, [*shape[:2], *out], bool(call.value(6)))


def _spread(values: Any, count: int) -> list[int]:
    return [int(value) for value in values] * (count if len(values) == 1 else 1)


def _convolution_backward(call: _Call) -> int:
    out, shape, weight = (call.shape(position, 3) for position in range(3))
    transposed, mask = bool(call.value(7)), call.value(10)
    turned = [[sizes[1], sizes[0], *sizes[2:]] for sizes in (out, shape, weight)]
    count = _conv(out, weight, shape, not transposed) if mask[0] else 0
    if mask[1]:
        by, of = (turned[1], turned[0]) if transposed else (turned[0], turned[1])
        count += _conv(of, by, turned[2], False)
    return count


def _attention(call: _Call) -> int:
    (batch, heads, queries, width), key, value = (call.shape(position, 4) for position in range(3))
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def _attention_backward(call: _Call) -> int:
    (batch, heads, queries, width), key, value = (call.shape(position, 4) for position in range(1, 4))
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])


_ATTENTIONS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
FORMULAS: Mapping[str, Callable[[_Call], int]] = MappingProxyType(
    {
        **dict.fromkeys(("aten::mm", "aten::_int_mm", "aten::_scaled_mm"), _mm),
        **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::_addmm_activation"), lambda call: _mm(call, 1)),
        "aten::bmm": _bmm,
        **dict.fromkeys(("aten::baddbmm", "aten::baddbmm_"), lambda call: _bmm(call, 1)),
        **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm"), _grouped_mm),
        **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _convolution),
        "aten::convolution_backward": _convolution_backward,
        **{f"aten::_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
        **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
    }
)
"""Operations of one call by the operator's name."""


def work_of(name: str, arguments: str) -> tuple[str, int | None]:
    """Number type and operations of one call; None if its shapes do not give them.

    Args:
        name: The operator.
        arguments: What it was called with: the column ``arguments`` of the schema's ``shapes``.
    """
    dims, types, concrete = (argument if isinstance(argument, list) else [] for argument in json.loads(arguments))
    try:
        flops: int | None = int(FORMULAS[name](_Call(dims, concrete)))
    except (ValueError, TypeError, IndexError, KeyError):
        flops = None
    type_names = [str(argument).lower() for argument in types]
    dtypes = (
        dtype
        for dtype, pattern in _TYPES
        if any(re.search(pattern, argument) for argument in type_names if argument != "")
    )
    return next(dtypes, ""), flops


def counted_from_shapes(operations: Operations, choice: StepChoice, rows: Sequence[Row]) -> Counted:
    """What the steps of a trace computed, by the ranges that its operators ran in.

    Args:
        operations: The operations, of a trace with the optional table ``shapes``.
        choice: The steps that count.
        rows: The layers and phases of these steps.
    """
    frame = operations.trace.shapes
    ranges = operations.attribution.ranges
    chains = _chains(ranges)
    work: dict[Chain, Work] = {}
    unknown: dict[Chain, set[str]] = {}
    attention: set[Chain] = set()
    if frame is not None and len(frame):
        names = [str(name) for name in frame["name"].cat.categories]
        code = frame["name"].cat.codes.to_numpy()
        formula = np.array([name in FORMULAS for name in names], dtype=bool)[code]
        lacks_formula = np.array([_may_multiply(name) for name in names], dtype=bool)[code] & ~formula
        frame = frame[formula | lacks_formula]
        has_work, is_unknown = _outermost(frame, formula[formula | lacks_formula])
        inner, is_in_step = _where(ranges, choice, frame)
        arguments = frame["arguments"].cat
        keys = np.stack([inner, frame["name"].cat.codes.to_numpy(), arguments.codes.to_numpy()])
        for rows_of, is_known in (
            (np.flatnonzero(has_work & is_in_step), True),
            (np.flatnonzero(is_unknown & is_in_step), False),
        ):
            cells, numbers = np.unique(keys[:, rows_of], axis=1, return_counts=True)
            for (where, name, arguments_code), times in zip(cells.T.tolist(), numbers.tolist(), strict=True):
                chain = chains[where]
                dtype, flops = (
                    work_of(names[name], str(arguments.categories[arguments_code])) if is_known else ("", None)
                )
                if flops is None:
                    unknown.setdefault(chain, set()).add(names[name])
                    continue
                add(work.setdefault(chain, {}), {dtype: float(flops)}, times)
                if "attention" in names[name]:
                    attention.add(chain)
    calls: dict[Key, int] = {row.key: row.calls for row in rows}
    return Counted(choice.count, calls, work, unknown, frozenset(attention), tuple(dict.fromkeys(chains.values())))


def _may_multiply(name: str) -> bool:
    """Whether an operator without a formula may multiply matrices."""
    space, separator, plain = name.partition("::")
    if not separator or space in _NO_OPERATORS:
        return False
    if space == "aten":
        return MULTIPLIES.search(plain) is not None and ONLY_MOVES.search(plain) is None
    return space not in COUNTS_NOTHING


def _outermost(frame: Any, formula: Any) -> tuple[Any, Any]:
    """Which calls count, and which are of unknown work. A call inside one of either kind is neither, and one that
    contains a call that counts is not unknown, so that no work counts twice.
    """
    nesting = nest(*(frame[name].to_numpy() for name in ("start_ns", "end_ns", "tid")))
    holds, inside = np.zeros(len(formula) + 1, dtype=bool), np.zeros(len(formula) + 1, dtype=bool)
    levels = [np.flatnonzero(nesting.depth == level) for level in range(int(nesting.depth.max(initial=0)) + 1)]
    for here in reversed(levels):
        np.logical_or.at(holds, nesting.parent[here], formula[here] | holds[here])
    holds[-1] = False
    has_work, unknown = np.zeros(len(formula), dtype=bool), np.zeros(len(formula), dtype=bool)
    for here in levels:
        parents = nesting.parent[here]
        free = ~inside[parents]
        has_work[here] = free & formula[here]
        unknown[here] = free & ~formula[here] & ~holds[here]
        inside[here] = inside[parents] | has_work[here] | unknown[here]
    return has_work, unknown


def _where(ranges: Ranges, choice: StepChoice, frame: Any) -> tuple[Int64Array, Any]:
    """The range that each call ran in, or `NONE`, and whether it belongs to a step that counts."""
    pid, tid, start = (frame[name].to_numpy() for name in ("pid", "tid", "start_ns"))
    inner = ranges.nesting.innermost(tid, start)
    step = ranges.step_at(inner)
    alone = np.flatnonzero(step == NONE)
    open_step = Elsewhere(ranges, ranges.step >= 0).open_at(pid[alone], tid[alone], start[alone])
    step[alone] = np.append(ranges.step, NONE)[open_step]
    attributed = np.append((ranges.layer_range >= 0) | (ranges.phase_range >= 0), False)[inner]
    unattributed = np.flatnonzero(~attributed)
    inner[unattributed] = Elsewhere(ranges, ranges.is_one_of(PHASE_CATEGORIES)).open_at(
        pid[unattributed], tid[unattributed], start[unattributed]
    )
    is_in_step = np.append(choice.shown, False)[step] if len(choice.shown) else np.ones(len(step), dtype=bool)
    return inner, is_in_step


def _chains(ranges: Ranges) -> dict[int, Chain]:
    """The ranges of layers and phases around each range, itself first; for `NONE`, the place outside all ranges."""
    nowhere: Chain = ((NO_LAYER, NO_PHASE),)
    chains: dict[int, Chain] = {NONE: nowhere}
    layer, phase = ranges.is_one_of(LAYER_CATEGORIES).tolist(), ranges.is_one_of(PHASE_CATEGORIES).tolist()
    nesting: Nesting = ranges.nesting
    parent, name, texts = nesting.parent.tolist(), ranges.name.tolist(), ranges.phase.tolist()
    chain_of_key: dict[tuple[Key, int], Chain] = {}
    for row in np.argsort(nesting.depth, kind="stable").tolist():
        outer = chains[parent[row]]
        if not layer[row] and not (phase[row] and outer[0][0] == NO_LAYER):
            chains[row] = outer
            continue
        key = (ranges.names[name[row]].text if layer[row] else NO_LAYER, texts[row] or NO_PHASE)
        tail = () if outer is nowhere else outer
        chains[row] = chain_of_key.setdefault((key, id(tail)), (key, *tail))
    return chains
