"""Operations and memory traffic from a trace's own shapes, without a count of the program.

A PyTorch trace recorded with shapes (``record_shapes=True``) has the arguments of every operator. The formulas for
operations are those of PyTorch's own counter (`torch.utils.flop_counter`), rewritten here because reading a trace must
not need PyTorch; inputs are read once and outputs written once, as in `nvprof_kit._instrument.flops.traffic`. Outputs
are not recorded: they follow from the inputs. Of nested operators the outermost one that is not composed of others
counts. An operator that multiplies matrices but has no formula, or lacks its shapes, is listed by name as unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.intervals import NONE, Bools, Int64Array, inherit, nest
from nvprof_kit._analysis.attribution.ranges import OwnerLookup, Ranges
from nvprof_kit._analysis.attribution.steps import StepChoice
from nvprof_kit._operators import OVERWRITES, SCATTERS, SELECTS, arguments_read_again, causal_share, operator_kind
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.flops_file import TABLES, FlopsFile
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES

_NO_OPERATORS = frozenset({"autograd", "inductor", "torch"})
"""Namespaces of events that the profiler records but that are not operators."""

_OPERATORS = read_toml("nvprof_kit._analysis.flops", "operators.toml")
_COMPOSED = re.compile("|".join(_OPERATORS["composed"]))
_MOVES_NOTHING = re.compile("|".join(_OPERATORS["moves_nothing"]))
_CAUSAL: Mapping[str, Sequence[int]] = _OPERATORS["causal"]
_TYPES: Mapping[str, tuple[str, int]] = _OPERATORS["types"]

_CODES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 9: 8, 10: 16, 11: 1, 15: 2}
"""Bytes of an element, by PyTorch's number of its type, as a value of an argument."""

Shape = Sequence[int]


class _Tensor(NamedTuple):
    """A tensor among the arguments.

    Attributes:
        dims: Its shape.
        dtype: Type of its numbers, '' if they are integers or truth values.
        width: Bytes of an element.
        bytes: Bytes of its distinct elements.
    """

    dims: Shape
    dtype: str
    width: int
    bytes: int

    @classmethod
    def of(cls, dims: Any, strides: Any, dtype: str, width: int) -> _Tensor:
        """A tensor of these dimensions; strides that were not recorded count as those of distinct elements.

        Raises:
            ValueError: `dims` is not a list of lengths.
        """
        if not isinstance(dims, list) or not all(type(length) is int and length >= 0 for length in dims):
            raise ValueError(f"{dims} is not a shape")
        if not isinstance(strides, list) or len(strides) != len(dims):
            strides = [1] * len(dims)
        # a dimension of stride 0 is expanded: it repeats one element
        elements = prod(length if stride else min(length, 1) for length, stride in zip(dims, strides, strict=True))
        return cls(dims, dtype, width, elements * width)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a tensor of this shape whose elements are all distinct."""
        return prod(self.dims) * self.width


class _Call(NamedTuple):
    """The arguments of an operator: their shapes, types, strides, and the values of those that are not tensors."""

    dims: Sequence[Any]
    types: Sequence[Any]
    concrete: Sequence[Any]
    strides: Sequence[Any]

    @classmethod
    def parse(cls, arguments: str) -> _Call:
        """Read the column ``arguments`` of the schema's ``shapes``."""
        return cls(*(argument if isinstance(argument, list) else [] for argument in json.loads(arguments)))

    def value(self, position: int, default: Any = None) -> Any:
        """The value of an argument."""
        text = str(self.concrete[position]) if position < len(self.concrete) else ""
        return json.loads(text.replace("True", "true").replace("False", "false")) if text else default

    def tensors(self, position: int, widths: dict[int, int] | None = None) -> list[_Tensor]:
        """The tensors of an argument: none, one, or those of a list, the types of which are not recorded.

        Args:
            position: Of the argument.
            widths: Bytes of an element of the tensors before it, by their number of elements; of another number it
                is that of the last.

        Raises:
            ValueError: It is a list of so many that the profiler did not record their shapes, or has other dimensions.
        """
        type_name = str(self.types[position]).lower().removeprefix("c10::") if position < len(self.types) else ""
        dims, strides = (each[position] if position < len(each) else [] for each in (self.dims, self.strides))
        if type_name in _TYPES:
            return [_Tensor.of(dims, strides, *_TYPES[type_name])]
        if type_name != "tensorlist":
            return []
        if not dims and not position:
            raise ValueError("shapes that were not recorded")
        strides_of_each = strides if isinstance(strides, list) and len(strides) == len(dims) else [[]] * len(dims)
        last = next(reversed(widths.values()), 4) if widths else 4
        return [_Tensor.of(shape, stride, "fp32", (widths or {}).get(prod(shape), last))
                for shape, stride in zip(dims, strides_of_each, strict=True)]  # fmt: skip

    def shape(self, position: int, rank: int) -> Shape:
        """The shape of a tensor of at least so many dimensions, of any type."""
        dims = _Tensor.of(self.dims[position], [], "", 1).dims
        if len(dims) < rank:
            raise ValueError(f"argument {position} has no shape")
        return dims


def _product(call: _Call, first: int = 0) -> int:
    left, right = call.shape(first, 2), call.shape(first + 1, 2)
    return 2 * (left[0] if len(left) == len(right) == 3 else 1) * left[-2] * left[-1] * right[-1]


def _conv(shape: Shape, weight: Shape, out: Shape, transposed: bool) -> int:
    return prod((shape if transposed else out)[2:]) * prod(weight[2:]) * shape[0] * weight[0] * weight[1] * 2


def _convolved(call: _Call) -> list[int]:
    """The shape of a convolution's result."""
    shape, weight = call.shape(0, 3), call.shape(1, 3)
    options = (call.value(position) for position in (3, 4, 5, 7))
    stride, padding, dilation, more = (of * (len(shape) - 2) if len(of) == 1 else of for of in options)
    parts = zip(shape[2:], padding, dilation, weight[2:], stride, more, strict=True)
    if call.value(6):
        lengths = [(length - 1) * step - 2 * pad + gap * (size - 1) + extra + 1
                   for length, pad, gap, size, step, extra in parts]  # fmt: skip
        return [shape[0], weight[1] * call.value(8), *lengths]
    lengths = [(length + 2 * pad - gap * (size - 1) - 1) // step + 1 for length, pad, gap, size, step, _ in parts]
    return [shape[0], weight[0], *lengths]


def _convolution_backward(call: _Call) -> int:
    out, shape, weight = (call.shape(position, 3) for position in range(3))
    transposed, mask = bool(call.value(7)), call.value(10)
    swapped = [[sizes[1], sizes[0], *sizes[2:]] for sizes in (out, shape, weight)]
    count = _conv(out, weight, shape, not transposed) if mask[0] else 0
    if mask[1]:
        by, of = (swapped[1], swapped[0]) if transposed else (swapped[0], swapped[1])
        count += _conv(of, by, swapped[2], False)
    return count


def _attention(call: _Call, first: int = 0) -> int:
    (batch, heads, queries, width), key, value = (call.shape(first + position, 4) for position in range(3))
    widths = 3 * width + 2 * value[3] if first else width + value[3]
    return 2 * batch * heads * queries * key[2] * widths


_FORMULAS: Mapping[str, Callable[[_Call], int]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), _product),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_"), lambda call: _product(call, 1)),
    **dict.fromkeys(
        ("convolution", "_convolution", "convolution_overrideable"),
        lambda call: _conv(call.shape(0, 3), call.shape(1, 3), _convolved(call), bool(call.value(6))),
    ),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_CAUSAL, _attention),
    **{f"{name}_backward": lambda call: _attention(call, 1) for name in _CAUSAL},
}
"""Operations of one call by the operator's name."""


def _traffic(name: str, call: _Call, widths: dict[int, int]) -> tuple[list[int], list[int]]:
    """Bytes of each tensor that one call of an operator reads, and of each that it writes.

    Args:
        name: The operator.
        call: Its arguments.
        widths: As in `_Call.tensors`.
    """
    arguments = [call.tensors(position, widths) for position in range(len(call.types))]
    tensors = [tensor for argument in arguments for tensor in argument]
    reads, first = [tensor.bytes for tensor in tensors], arguments[0] if arguments else []
    writes = [tensor.bytes for tensor in first]
    if name.startswith("_fused_") and name.endswith("_"):  # an optimizer: parameters, gradients, states, steps
        return reads, writes + [tensor.bytes for argument in arguments[2:6] for tensor in argument]
    if name in SCATTERS:
        rows = min(writes[0], sum(tensor.bytes for tensor in tensors[1:] if tensor.dtype))
        return [rows, *reads[1:]], [rows]
    if name.endswith("_") and not name.endswith("__"):
        return reads[len(first) :] if name in OVERWRITES else reads, writes
    if name.startswith("_foreach_"):
        return reads, writes if "norm" not in name else []
    rule = next((rule for pattern, rule in _RESULTS.items() if re.fullmatch(pattern, name)), None)
    if rule is not None:
        writes = rule(call, tensors)
    elif tensors:
        widest = max(tensors, key=lambda tensor: (tensor.dtype != "", tensor.dims != [], tensor.width))
        writes = [_elements(tensors) * widest.width]
    if name in SELECTS:  # only those that it returns, or one of each row
        reads[0] = min(reads[0], writes[0] if "nll" not in name else prod(tensors[1].dims) * tensors[0].width)
    elif name.startswith("nll_loss") and name.endswith("backward"):
        reads[1] = 0
    mask = call.value(len(call.types) - 1) if name.endswith("norm_backward") else None
    second_reads = [tensor.bytes for argument in arguments[: arguments_read_again(name, mask)] for tensor in argument]
    return ([] if name.startswith("new_") or name.endswith("_like") else reads + second_reads), writes


def _elements(tensors: Sequence[_Tensor]) -> int:
    """The number of elements that these broadcast to, or that the largest has."""
    try:
        return prod(np.broadcast_shapes(*(tuple(tensor.dims) for tensor in tensors)))
    except ValueError:
        return max(prod(tensor.dims) for tensor in tensors)


def _gradients(first: int, mask: int = 0) -> Callable[[_Call, Sequence[_Tensor]], list[int]]:
    """The gradients of an attention's or convolution's arguments from the first on, as far as a mask asks for them."""
    return lambda call, _: [
        tensor.dense_bytes
        for position, is_asked in enumerate(call.value(mask)[:2] if mask else [True] * 3)
        for tensor in call.tensors(first + position)[:is_asked]
    ]


def _reduced(call: _Call, tensors: Sequence[_Tensor]) -> list[int]:
    tensor, *second = tensors
    if second:  # the smaller of two
        return [_elements(tensors) * tensor.width]
    candidates = [call.value(position) for position in (1, 2)]
    single_axis = candidates[:1] if isinstance(candidates[0], int) else []
    axes_argument = next((axes for axes in candidates if isinstance(axes, list)), single_axis)
    axes = {axis % len(tensor.dims) for axis in axes_argument or range(len(tensor.dims))}
    return [prod(length for axis, length in enumerate(tensor.dims) if axis not in axes) * tensor.width]


def _matrix(call: _Call, tensors: Sequence[_Tensor]) -> list[int]:
    left, right = tensors[:2] if len(tensors) != 3 else tensors[-2:]
    batch = left.dims[:-2] if len(left.dims) == len(right.dims) else []
    return [prod(batch) * left.dims[-2] * right.dims[-1] * left.width]


_RESULTS: Mapping[str, Callable[[_Call, Sequence[_Tensor]], list[int]]] = {
        r"mm|_int_mm|bmm|addmm|_addmm_activation|baddbmm": _matrix,
        r"_grouped_mm": lambda call, of: _matrix(call, of[:2]) * (
            of[2].dims[0] if len(of) > 2 and len(of[0].dims) == len(of[1].dims) == 2 else 1
        ),
        r"_?convolution|convolution_overrideable": lambda call, of: [prod(_convolved(call)) * of[0].width],
        r"convolution_backward": _gradients(1, 10),
        r".*_attention(_for_cpu)?": lambda call, of: [prod(of[0].dims[:3]) * (of[2].dims[3] * of[0].width + 4)],
        r".*_attention(_for_cpu)?_backward": _gradients(1),
        r"_to_copy": lambda call, of: [prod(of[0].dims) * _CODES.get(call.value(1, -1), of[0].width)],
        r"embedding": lambda call, of: [prod(of[1].dims) * of[0].dims[-1] * of[0].width],
        r"embedding(_dense)?_backward": lambda call, of: [call.value(2) * of[0].dims[-1] * of[0].width],
        r"index": lambda call, of: [of[0].dense_bytes],  # the shapes of the indices are not recorded
        r"index_select": lambda call, of: [
            of[0].dense_bytes // max(of[0].dims[call.value(1)], 1) * prod(of[1].dims)
        ],
        r"gather|take": lambda call, of: [prod(of[-1].dims) * of[0].width],
        r"nll_loss.*_forward|.*_loss": lambda call, of: [of[0].width],
        r"eq|ne|lt|le|gt|ge|greater|less|logical_\w+|is(nan|inf|finite)": lambda call, of: [_elements(of)],
        r"sum|mean|amax|amin|prod|var|std|logsumexp|any|all|max|min|argmax|argmin|norm|linalg_vector_norm": _reduced,
        r"cat|stack|_chunk_cat": lambda call, of: [sum(tensor.dense_bytes for tensor in of)],
        r"\w+_like": lambda call, of: [of[0].dense_bytes],
        r"new_(zeros|ones|full)|(slice|select|diagonal)_backward": lambda call, of: [prod(call.value(1)) * of[0].width],
        r"zeros|ones|rand|randn": lambda call, of: [prod(call.value(0)) * _CODES.get(call.value(1, 6), 4)],
        r"full": lambda call, of: [prod(call.value(0)) * _CODES.get(call.value(2, 6), 4)],
        r"arange|scalar_tensor|nonzero|masked_select|rand(int|perm)|topk|multinomial|bincount|unique.*|histc": (
            lambda call, of: []
        ),
    }  # fmt: skip
"""Bytes of the results of operators, by their names; of all others as of an elementwise one."""


class _L2:
    """What the L2 may hold, as `nvprof_kit._instrument.flops.traffic.Cache`. Which memory a tensor is in is not
    recorded, so it is found if the L2 holds one of the same length or of a multiple.
    """

    def __init__(self, size: int) -> None:
        self._size, self._capacity, self._resident = size, 2 * size, 0
        self._tensors: OrderedDict[int, int] = OrderedDict()

    def read(self, size: int) -> int:
        """Bytes of a tensor that must come from memory."""
        if any(length % size == 0 for length in self._tensors):
            return max(size - self._size, 0)
        self.write(size)
        return size

    def write(self, size: int) -> int:
        """Bytes of a tensor that must go to memory."""
        self._resident += min(size, self._capacity)
        self._tensors[size] = self._tensors.pop(size, 0) + 1
        while self._resident > self._capacity:
            length, number = self._tensors.popitem(last=False)
            self._resident -= min(length, self._capacity)
            if number > 1:
                self._tensors[length] = number - 1
                self._tensors.move_to_end(length, last=False)
        return max(size - self._capacity, 0)


_L2_BYTES = 50 * 2**20
"""The L2 of an H100; a trace does not say how large it was."""


def counts_from_shapes(operations: Operations, choice: StepChoice, rows: pd.DataFrame) -> FlopsFile:
    """What the steps of a trace computed, by the ranges that its operators ran in.

    Args:
        operations: The operations, of a trace with the optional table ``shapes``.
        choice: The steps that count.
        rows: The layers and phases of these steps, and their calls.
    """
    trace, ranges = operations.trace, operations.attribution.ranges
    of_range, regions = _regions(ranges, rows)
    operators: list[tuple[Any, ...]] = []
    unknown: list[tuple[int, str, int]] = []
    frame = trace.shapes
    if frame is not None and len(frame):
        names = frame["name"].cat.categories
        kind = np.array([_kind(str(name)) for name in names], dtype=object)[frame["name"].cat.codes.to_numpy()]
        frame, kind = frame[kind != ""], kind[kind != ""]
        _, _, inner, step, _ = OwnerLookup(ranges).at(*(frame[name].to_numpy() for name in ("pid", "tid", "start_ns")))
        is_in_step = np.append(choice.shown, not len(choice.shown))[step]
        calls = [_Call.parse(text) for text in frame["arguments"].cat.categories]
        widths: dict[int, int] = {}
        l2 = _L2(_L2_BYTES)
        of_call: dict[tuple[int, int], _Work | None] = {}
        code, arguments = (frame[name].cat.codes.to_numpy() for name in ("name", "arguments"))
        order = np.argsort(frame["start_ns"].to_numpy(), kind="stable")
        is_counted = _outermost(frame, kind) & is_in_step
        phase = np.array([phase for _, phase, *_ in regions])[of_range[inner]]
        again = order[(phase == "recompute")[order]]
        if len(again) and len(trace.api) and trace.info.on_gpu:
            # activation checkpointing ends a recompute inside the last operator, which then launches nothing
            api = trace.api[["start_ns", "tid"]].assign(launch_ns=trace.api["start_ns"]).sort_values("start_ns")
            starts = frame[["start_ns", "tid"]].iloc[again]
            launch_ns = pd.merge_asof(starts, api, on="start_ns", by="tid", direction="forward")["launch_ns"].to_numpy()
            is_counted[again] &= launch_ns < frame["end_ns"].to_numpy()[again]
        for row in order[is_counted[order]].tolist():
            key, call, name = (code[row], arguments[row]), calls[arguments[row]], str(names[code[row]])
            if key not in of_call:
                of_call[key] = None if kind[row] == "unknown" else _Work.of(name.removeprefix("aten::"), call, widths)
            region, work = int(of_range[inner[row]]), of_call[key]
            if work is None:
                unknown.append((region, name, 1))
                continue
            dram = sum(map(l2.read, work.reads)) + sum(map(l2.write, work.writes))
            amounts = (work.flops, work.least_flops, sum(work.reads) + sum(work.writes), dram)
            operators.append((region, name, work.dtype, 1, *amounts))
    rows_of_tables: Any = zip((regions, operators, unknown), TABLES.values(), strict=True)
    tables = (pd.DataFrame(cells, columns=[*columns]) for cells, columns in rows_of_tables)
    named = f"the shapes in {trace.info.path}"
    return FlopsFile(named, max(choice.count, 1), "", "", *tables)


class _Work(NamedTuple):
    """What one call of an operator does, as in a file of counts."""

    dtype: str
    flops: float
    least_flops: float
    reads: list[int]
    writes: list[int]

    @classmethod
    def of(cls, name: str, call: _Call, widths: dict[int, int]) -> _Work | None:
        """The work of one call; None if its shapes do not give its operations, or are not recorded."""
        formula = _FORMULAS.get(name)
        reads, writes, share = list[int](), list[int](), 1.0
        try:
            flops = formula(call) if formula else 0
            is_backward = name.endswith("_backward")
            causal = _CAUSAL.get(name.removesuffix("_backward"))
            if causal is not None and call.value(causal[is_backward]):
                share = causal_share(*(call.shape(position + is_backward, 4)[2] for position in (0, 1)))
            single = [position for position, type_name in enumerate(call.types) if type_name != "TensorList"]
            tensors = [tensor for position in single for tensor in call.tensors(position)]
            reads, writes = _traffic(name, call, widths)
            widths |= {prod(tensor.dims): tensor.width for tensor in tensors}
        except (ValueError, TypeError, IndexError, KeyError, AttributeError):  # a form that is not foreseen
            if formula or "TensorList" in call.types:
                return None
            flops, tensors = 0, []
        dtypes = {tensor.dtype for tensor in tensors} if formula else set()
        dtype = next((dtype for dtype, _ in _TYPES.values() if dtype in dtypes and dtype), "")
        return cls(dtype, flops, flops * share, [size for size in reads if size], [size for size in writes if size])


def _kind(name: str) -> str:
    """``formula``, ``unknown`` for an operator that may multiply and has no formula, ``moves``, or '' for what counts
    nothing itself.
    """
    space, separator, plain = name.partition("::")
    if not separator or space in _NO_OPERATORS or not operator_kind(name):
        return ""
    if plain in _FORMULAS and space == "aten":
        return "formula"
    if operator_kind(name) == "multiplies":
        return "unknown"
    return "" if _COMPOSED.fullmatch(plain) or _MOVES_NOTHING.match(plain) else "moves"


def _outermost(frame: pd.DataFrame, kind: npt.NDArray[np.object_]) -> Bools:
    """Which calls count or are of unknown work. A call inside one of these is neither, and one that may multiply but
    contains a call with a formula stands for nothing itself, so that no work counts twice.
    """
    nesting = nest(*(frame[name].to_numpy() for name in ("start_ns", "end_ns", "tid")))
    parent, has_formula = np.append(nesting.parent, NONE), np.zeros(len(kind) + 1, dtype=bool)
    enclosing_calls = parent[:-1][kind == "formula"]
    while (enclosing_calls != NONE).any():
        has_formula[enclosing_calls[enclosing_calls != NONE]] = True
        enclosing_calls = parent[enclosing_calls]
    stands_for_all = (kind != "unknown") | ~has_formula[:-1]
    enclosing = np.append(inherit(np.where(stands_for_all, np.arange(len(kind)), NONE), nesting), NONE)
    outermost: Bools = stands_for_all & (enclosing[parent[:-1]] == NONE)
    return outermost


def _regions(ranges: Ranges, rows: pd.DataFrame) -> tuple[Int64Array, list[tuple[str, str, int, int, float]]]:
    """The number of the layer's or phase's range that each range is or is in, for `NONE` the last, and these ranges as
    in a file of counts, the first one outside all ranges.
    """
    layer, phase = ranges.is_one_of(LAYER_CATEGORIES).tolist(), ranges.is_one_of(PHASE_CATEGORIES).tolist()
    parent, name, texts = ranges.nesting.parent.tolist(), ranges.name.tolist(), ranges.phase_text.tolist()
    numbers: dict[tuple[str, str, int], int] = {(NO_LAYER, NO_PHASE, NONE): 0}
    keys = [*numbers]
    of_range = np.zeros(len(parent) + 1, dtype=np.int64)
    for row in np.argsort(ranges.nesting.depth, kind="stable").tolist():
        outer = int(of_range[parent[row]])
        if layer[row] or (phase[row] and keys[outer][0] == NO_LAYER):
            text = ranges.names[name[row]].text if layer[row] else NO_LAYER
            key = (text, texts[row], outer or NONE)
            if key not in numbers:
                numbers[key] = len(keys)
                keys.append(key)
            outer = numbers[key]
        of_range[row] = outer
    calls = dict(zip(zip(rows["layer"], rows["phase"], strict=True), rows["calls"], strict=True))
    return of_range, [(*key, calls.pop(key[:2], 0), math.nan) for key in keys]
