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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.nesting import NONE, Int64Array, nest
from nvprof_kit._analysis.attribution.ranges import Elsewhere, Ranges
from nvprof_kit._analysis.attribution.warm_up import StepChoice
from nvprof_kit._trace.flops_file import OPERATORS, RANGES, UNKNOWN, FlopsFile
from nvprof_kit.names import LAYER_CATEGORIES, NO_LAYER, NO_PHASE, PHASE_CATEGORIES, operator_kind

if TYPE_CHECKING:
    import pandas as pd

_NO_OPERATORS = frozenset({"autograd", "inductor", "torch"})
"""Namespaces of events that the profiler records but that are not operators."""

_COMPOSED = re.compile(
    r"((cross_entropy|l1|nll)_loss(2d|_nd)?|(layer|rms|group|instance|batch)_norm|(feature_)?dropout_?|(log_)?softmax"
    r"|conv(_transpose)?[123]d|linear|matmul|einsum|tensordot|outer|scaled_dot_product_attention|gru|gru_cell|lstm"
    r"|lstm_cell|rnn_tanh|rnn_relu|to|type_as|contiguous|reshape|reshape_as|flatten|unflatten|expand_as|broadcast_to"
    r"|broadcast_tensors|chunk|split|tensor_split|narrow|movedim|meshgrid|tile|[hv]stack|concat|concatenate|pad|one_hot"
    r"|repeat_interleave|take_along_dim|clip_?|square|float_power|true_divide|divide|multiply|subtract|relu6|selu"
    r"|log_sigmoid|cosine_similarity|max_pool[12]d|stft|embedding_bag|embedding_backward)"
)
"""PyTorch operators that consist of others, which count."""

_MOVES_NOTHING = re.compile(
    r"^(_?empty|new_empty|resize|set_|lift|detach|alias|view|_unsafe_view|_?reshape_alias|as_strided|transpose|t$|permute"
    r"|expand$|slice$|select$|split|unsafe_split|unsqueeze|squeeze|unbind|diagonal$|unfold$|resolve_|real$|imag$|_conj$"
    r"|item$|_local_scalar_dense|is_|size$|stride$|numel|dim$|record_stream|result_type|can_cast|_has_|_nested_|_assert"
    r"|_fused_sdp_choice|_debug_has|output_nr|requires_grad|retain|data$|swapaxes|mT$|mH$|numpy_T|adjoint|ravel|view_as"
    r"|_version|_to_cpu|is$)"
)
"""PyTorch operators that only name memory."""

_TYPES = {
    **dict.fromkeys(("bool", "unsigned char", "signed char"), 1),
    **{f"c10::float8_{kind}": 1 for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    **dict.fromkeys(("short int", "short", "unsigned short", "c10::half", "c10::bfloat16"), 2),
    **dict.fromkeys(("int", "float", "unsigned int"), 4),
    **dict.fromkeys(("long int", "long", "double", "c10::complex<float>"), 8),
    "c10::complex<double>": 16,
}
"""Bytes of an element, by the profiler's name of its type."""

_CODES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 9: 8, 10: 16, 11: 1, 15: 2}
"""Bytes of an element, by PyTorch's number of its type, as a value of an argument."""

_NUMBERS = (
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


class _Tensor(NamedTuple):
    """A tensor among the arguments.

    Attributes:
        dims: Its shape.
        width: Bytes of an element.
        bytes: Bytes of its distinct elements.
        is_number: Whether its elements are floating point numbers.
    """

    dims: Shape
    width: int
    bytes: int
    is_number: bool


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

    def shape(self, position: int, rank: int) -> Shape:
        lengths = self.dims[position]
        if len(lengths) < rank or not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise ValueError(f"argument {position} has no shape")
        return list(lengths)

    def value(self, position: int) -> Any:
        return json.loads(str(self.concrete[position]).replace("True", "true").replace("False", "false"))

    def option(self, position: int, default: Any) -> Any:
        """A value that may be missing."""
        given = self.concrete[position] if position < len(self.concrete) else ""
        return self.value(position) if given not in ("", None) else default

    def tensors(self, position: int, widths: dict[int, int] | None = None) -> list[_Tensor]:
        """The tensors of an argument: none, one, or those of a list, the types of which are not recorded.

        Args:
            position: Of the argument.
            widths: Bytes of an element of the tensors before it, by their number of elements; of another number it
                is that of the last.

        Raises:
            ValueError: It is a list of so many that the profiler did not record their shapes.
        """
        type_name = str(self.types[position]).lower() if position < len(self.types) else ""
        dims, strides = (each[position] if position < len(each) else [] for each in (self.dims, self.strides))
        if type_name in _TYPES:
            return [_tensor(dims, strides, _TYPES[type_name], type_name)]
        if type_name != "tensorlist":
            return []
        if not dims and not position:
            raise ValueError("shapes that were not recorded")
        each_strides = strides if isinstance(strides, list) and len(strides) == len(dims) else [[]] * len(dims)
        last = next(reversed(widths.values()), 4) if widths else 4
        return [_tensor(shape, steps, (widths or {}).get(prod(shape), last), "float")
                for shape, steps in zip(dims, each_strides, strict=True)]  # fmt: skip


def _tensor(dims: Shape, strides: Shape, width: int, type_name: str) -> _Tensor:
    if not isinstance(dims, list) or not all(type(length) is int and length >= 0 for length in dims):
        raise ValueError(f"{dims} is no shape")
    steps = strides if isinstance(strides, list) and len(strides) == len(dims) else [1] * len(dims)
    elements = prod(length if step else min(length, 1) for length, step in zip(dims, steps, strict=True))
    return _Tensor(dims, width, elements * width, any(kind in type_name for kind in ("float", "half", "double")))


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
    return _conv(shape, weight, [*shape[:2], *_convolved_lengths(call)], bool(call.value(6)))


def _convolved_lengths(call: _Call) -> list[int]:
    shape, weight = call.shape(0, 3), call.shape(1, 3)
    stride, padding, dilation, more = (_spread(call.value(position), len(shape) - 2) for position in (3, 4, 5, 7))
    parts = zip(shape[2:], padding, dilation, weight[2:], stride, more, strict=True)
    if call.value(6):
        return [
            (length - 1) * step - 2 * pad + gap * (size - 1) + extra + 1
            for length, pad, gap, size, step, extra in parts
        ]
    return [(length + 2 * pad - gap * (size - 1) - 1) // step + 1 for length, pad, gap, size, step, _ in parts]


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
_FORMULAS: Mapping[str, Callable[[_Call], int]] = MappingProxyType(
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


_CAUSAL = {
    "flash_attention": (4, 11),
    "efficient_attention": (6, 11),
    "cudnn_attention": (6, 14),
    "flash_attention_for_cpu": (4, 7),
}
"""Position of ``is_causal`` among the arguments of each attention and of its backward."""

_OVERWRITES = re.compile(
    r"^(copy_|fill_|zero_|normal_|uniform_|random_|bernoulli_|exponential_|_foreach_(copy|zero)_)$"
)
_BY_ROWS = re.compile(r"^(_index_put_impl_|index_(add|copy|fill|put)_|scatter_(add_|reduce_)?)$")
_COMPARES = re.compile(r"^(eq|ne|lt|le|gt|ge|greater|less|logical_\w+|is(nan|inf|finite))$")
_REDUCES = re.compile(
    r"^(sum|mean|amax|amin|prod|var|std|logsumexp|any|all|max|min|argmax|argmin|norm|linalg_vector_norm)$"
)


def traffic_of(name: str, call: _Call, widths: dict[int, int], on_gpu: bool) -> tuple[list[int], list[int]]:
    """Bytes of each tensor that one call of an operator reads, and of each that it writes.

    Args:
        name: The operator.
        call: Its arguments.
        widths: As in `_Call.tensors`.
        on_gpu: Whether statistics of norms are in fp32, as on a GPU.
    """
    plain = name.removeprefix("aten::")
    arguments = [call.tensors(position, widths) for position in range(len(call.types))]
    tensors = [tensor for argument in arguments for tensor in argument]
    reads = [tensor.bytes for tensor in tensors]
    first = arguments[0] if arguments else []
    if plain.startswith("_fused_") and plain.endswith("_"):  # an optimizer: parameters, gradients, states, steps
        return reads, [tensor.bytes for argument in (*arguments[:1], *arguments[2:6]) for tensor in argument]
    if plain.endswith("_") and not plain.endswith("__"):
        writes = [tensor.bytes for tensor in first]
        if _BY_ROWS.match(plain):
            given = sum(tensor.bytes for argument in arguments[1:] for tensor in argument if tensor.is_number)
            return [min(writes[0], given), *reads[1:]], [min(writes[0], given)]
        return reads[len(first) :] if _OVERWRITES.match(plain) else reads, writes
    if plain.startswith("_foreach_"):
        return reads, [tensor.bytes for tensor in first if "norm" not in plain]
    if plain.endswith("_like") or plain in ("new_zeros", "new_ones", "new_full"):
        return [], [prod(first[0].dims if plain.endswith("_like") else call.value(1)) * first[0].width]
    rule = next((rule for pattern, rule in _OUTPUTS.items() if re.fullmatch(pattern, plain)), _elementwise)
    writes = rule(call, tensors, on_gpu) if tensors or rule is not _elementwise else []
    if plain in ("embedding", "index", "index_select", "gather", "take"):
        reads[0] = min(reads[0], writes[0])
    elif plain in ("nll_loss_forward", "nll_loss2d_forward"):
        reads[0] = min(reads[0], prod(tensors[1].dims) * tensors[0].width)
    elif plain in ("nll_loss_backward", "nll_loss2d_backward"):
        reads[1] = 0
    return reads, writes


def _elementwise(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
    shape = np.broadcast_shapes(*(tuple(tensor.dims) for tensor in tensors)) if len(tensors) > 1 else tensors[0].dims
    return [prod(shape) * _promoted(tensors)]


def _promoted(tensors: Sequence[_Tensor]) -> int:
    return max(tensors, key=lambda tensor: (tensor.is_number, bool(tensor.dims), tensor.width)).width


def _reduced(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
    tensor, *others = tensors
    if others:
        return _elementwise(call, tensors, on_gpu)  # the smaller of two
    given = [call.option(position, None) for position in (1, 2)]
    axis = given[0] if isinstance(given[0], int) else None
    named = next((axes for axes in given if isinstance(axes, list)), [] if axis is None else [axis])
    axes = named or range(len(tensor.dims))
    out = [length for axis, length in enumerate(tensor.dims) if axis not in {each % len(tensor.dims) for each in axes}]
    return [prod(out) * tensor.width]


def _normed(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
    dims, width = tensors[0].dims, tensors[0].width
    statistics = prod(dims[: len(dims) - len(call.value(1))]) * (4 if on_gpu else width)
    return [prod(dims) * width, *[statistics] * (2 if len(call.types) == 5 else 1)]


def _masked(positions: tuple[int, ...], mask: int) -> Callable[[_Call, Sequence[_Tensor], bool], list[int]]:
    """The gradients of these arguments, as far as a mask asks for them."""

    def gradients(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
        asked = call.option(mask, [True] * len(positions)) if mask else [True] * len(positions)
        chosen = [position for position, is_asked in zip(positions, asked, strict=True) if is_asked]
        return [prod(tensor.dims) * tensor.width for position in chosen for tensor in call.tensors(position)]

    return gradients


def _product(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
    (left, right), *_ = [tensors[-2:]]
    batch = max(left.dims[:-2], right.dims[:-2], key=len) if len(left.dims) + len(right.dims) != 5 else ()
    return [prod(batch) * left.dims[-2] * right.dims[-1] * left.width]


def _attended(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
    query, _, value = tensors[:3]
    rows = prod(query.dims[:3])
    return [rows * value.dims[3] * query.width, rows * 4]


def _convolved(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
    shape, weight = call.shape(0, 3), call.shape(1, 3)
    transposed = bool(call.value(6))
    channels = weight[1] * call.option(8, 1) if transposed else weight[0]
    return [shape[0] * channels * prod(_convolved_lengths(call)) * tensors[0].width]


def _sized(position: int, code: int) -> Callable[[_Call, Sequence[_Tensor], bool], list[int]]:
    """A result whose shape and the number of whose type are arguments' values."""

    def sized(call: _Call, tensors: Sequence[_Tensor], on_gpu: bool) -> list[int]:
        return [prod(call.value(position)) * _CODES.get(call.option(code, 6), 4)]

    return sized


_Outputs = Callable[[_Call, Sequence[_Tensor], bool], list[int]]
_OUTPUTS: Mapping[str, _Outputs] = MappingProxyType(
    {
        r"mm|_int_mm|bmm|addmm|_addmm_activation|baddbmm": _product,
        r"_grouped_mm": lambda call, tensors, _: [
            tensors[0].dims[-2] * tensors[1].dims[-1] * tensors[0].width
            * (tensors[2].dims[0] if len(tensors[0].dims) == len(tensors[1].dims) == 2 and len(tensors) > 2 else 1)
        ],
        r"_?convolution|convolution_overrideable": _convolved,
        r"convolution_backward": lambda call, tensors, _: [
            *_masked((1, 2), 0)(call, tensors, _)[: sum(call.value(10)[:2])],
            *([call.shape(0, 3)[1] * tensors[0].width] if call.value(10)[2] else []),
        ],
        r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?": _attended,
        r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?_backward": _masked((1, 2, 3), 0),
        r"_to_copy": lambda call, tensors, _: [
            prod(tensors[0].dims) * _CODES.get(call.option(1, -1), tensors[0].width)
        ],
        r"native_layer_norm|_fused_rms_norm": _normed,
        r"native_layer_norm_backward": lambda call, tensors, gpu: [
            size for size, asked in zip(
                [prod(tensors[1].dims) * tensors[1].width, *(tensor.bytes for tensor in tensors[4:6])],
                call.value(7), strict=False) if asked
        ],
        r"_fused_rms_norm_backward": _masked((1, 4), 5),
        r"native_group_norm": lambda call, tensors, gpu: [
            tensors[0].bytes, *[call.value(3) * call.value(6) * (4 if gpu else tensors[0].width)] * 2
        ],
        r"native_batch_norm|_native_batch_norm_legit.*": lambda call, tensors, _: [tensors[0].bytes],
        r"native_dropout": lambda call, tensors, _: [tensors[0].bytes, prod(tensors[0].dims)],
        r"native_dropout_backward": lambda call, tensors, _: [prod(tensors[0].dims) * tensors[0].width],
        r"_(log_)?softmax": lambda call, tensors, _: [
            prod(tensors[0].dims) * (4 if call.option(2, False) else tensors[0].width)
        ],
        r"_(log_)?softmax_backward_data": lambda call, tensors, _: [
            prod(tensors[0].dims) * _CODES.get(call.option(3, -1), tensors[0].width)
        ],
        r"embedding": lambda call, tensors, _: [prod(tensors[1].dims) * tensors[0].dims[-1] * tensors[0].width],
        r"embedding(_dense)?_backward": lambda call, tensors, _: [
            call.value(2) * tensors[0].dims[-1] * tensors[0].width
        ],
        r"index": lambda call, tensors, _: [prod(tensors[0].dims) * tensors[0].width],  # indices are not recorded
        r"index_select": lambda call, tensors, _: [
            prod(tensors[0].dims) // max(tensors[0].dims[call.value(1)], 1) * prod(tensors[1].dims) * tensors[0].width
        ],
        r"gather|take": lambda call, tensors, _: [prod(tensors[-1].dims) * tensors[0].width],
        r"nll_loss(2d)?_forward": lambda call, tensors, _: [tensors[0].width] * 2,
        r"nll_loss(2d)?_backward": lambda call, tensors, _: [prod(tensors[1].dims) * tensors[1].width],
        r"(mse|l1|smooth_l1|huber)_loss": lambda call, tensors, _: [tensors[0].width],
        _COMPARES.pattern: lambda call, tensors, gpu: [
            _elementwise(call, tensors, gpu)[0] // _promoted(tensors)
        ],
        _REDUCES.pattern: _reduced,
        r"cat|stack|_chunk_cat": lambda call, tensors, _: [
            sum(prod(tensor.dims) * tensor.width for tensor in tensors)
        ],
        r"(slice|select|diagonal)_backward": lambda call, tensors, _: [prod(call.value(1)) * tensors[0].width],
        r"zeros|ones|rand|randn": _sized(0, 1),
        r"full": _sized(0, 2),
        r"arange|scalar_tensor|nonzero|masked_select|randint|randperm|topk|multinomial|bincount|unique.*|histc": (
            lambda call, tensors, _: []
        ),
        r"sort": lambda call, tensors, _: [tensors[0].bytes, prod(tensors[0].dims) * 8],
        r"repeat": lambda call, tensors, _: [prod(tensors[0].dims) * prod(call.value(1)) * tensors[0].width],
        r"constant_pad_nd": lambda call, tensors, _: [
            prod(
                length + sum(call.value(1)[2 * back : 2 * back + 2])
                for back, length in enumerate(reversed(tensors[0].dims))
            ) * tensors[0].width
        ],
    }
)  # fmt: skip
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
    import pandas as pd

    trace, ranges = operations.trace, operations.attribution.ranges
    of_range, regions = _regions(ranges, rows)
    operators: list[tuple[Any, ...]] = []
    unknown: list[tuple[int, str, int]] = []
    frame = trace.shapes
    if frame is not None and len(frame):
        names = frame["name"].cat.categories
        kind = np.array([_kind(str(name)) for name in names], dtype=object)[frame["name"].cat.codes.to_numpy()]
        frame, kind = frame[kind != ""], kind[kind != ""]
        counts, is_unknown = _outermost(frame, kind)
        inner, is_in_step = _where(ranges, choice, frame)
        calls = [_Call.parse(text) for text in frame["arguments"].cat.categories]
        widths: dict[int, int] = {}
        l2, on_gpu = _L2(_L2_BYTES), trace.info.on_gpu
        of_call: dict[tuple[int, int], _Work | None] = {}
        code, arguments = (frame[name].cat.codes.to_numpy() for name in ("name", "arguments"))
        order = np.argsort(frame["start_ns"].to_numpy(), kind="stable")
        for row in order[((counts | is_unknown) & is_in_step)[order]].tolist():
            key, call, name = (code[row], arguments[row]), calls[arguments[row]], str(names[code[row]])
            if key not in of_call:
                of_call[key] = None if is_unknown[row] else _work_of(name, call, widths, on_gpu)
            region, work = int(of_range[inner[row]]), of_call[key]
            if work is None:
                unknown.append((region, name, 1))
                continue
            dram = sum(map(l2.read, work.reads)) + sum(map(l2.write, work.writes))
            amounts = (work.flops, work.least_flops, sum(work.reads) + sum(work.writes), dram)
            operators.append((region, name, work.dtype, 1, *amounts))
    tables = (pd.DataFrame(cells, columns=[*columns]) for cells, columns in
              ((regions, RANGES), (operators, OPERATORS), (unknown, UNKNOWN)))  # fmt: skip
    named = f"the shapes in {trace.info.path}"
    return FlopsFile(named, max(choice.count, 1), "", "", True, *tables)


class _Work(NamedTuple):
    """What one call of an operator does, as in a file of counts."""

    dtype: str
    flops: float
    least_flops: float
    reads: list[int]
    writes: list[int]


def _work_of(name: str, call: _Call, widths: dict[int, int], on_gpu: bool) -> _Work | None:
    """The work of one call; None if its shapes do not give its operations, or are not recorded."""
    flops = 0.0
    dtype = ""
    least = 1.0
    if name in _FORMULAS:
        try:
            flops = float(_FORMULAS[name](call))
        except (ValueError, TypeError, IndexError, KeyError):
            return None
        type_names = [str(argument).lower() for argument in call.types if argument != ""]
        dtype = next((dtype for dtype, pattern in _NUMBERS if any(re.search(pattern, text) for text in type_names)), "")
        least = _causal_share(name, call)
    try:
        reads, writes = traffic_of(name, call, widths, on_gpu)
        for position, type_name in enumerate(call.types):
            if type_name != "TensorList":
                widths |= {prod(tensor.dims): tensor.width for tensor in call.tensors(position)}
    except (ValueError, TypeError, IndexError, KeyError):  # a form of the operator that is not foreseen
        if "TensorList" in call.types and name not in _FORMULAS:
            return None
        reads, writes = [], []
    return _Work(dtype, flops, flops * least, [size for size in reads if size], [size for size in writes if size])


def _causal_share(name: str, call: _Call) -> float:
    """Share of the scores that a causal mask leaves, as in `nvprof_kit._instrument.flops.traffic.causal_share`."""
    kind, backward, _ = name.removeprefix("aten::_scaled_dot_product_").partition("_backward")
    if kind not in _CAUSAL or not call.option(_CAUSAL[kind][bool(backward)], False):
        return 1.0
    queries, keys = (call.shape(position + bool(backward), 4)[2] for position in (0, 1))
    square = min(queries, keys)
    return float((square * (square + 1) / 2 + max(queries - keys, 0) * keys) / max(queries * keys, 1))


def _kind(name: str) -> str:
    """``formula``, ``unknown`` for an operator that may multiply and has no formula, ``moves``, or '' for what counts
    nothing itself.
    """
    space, separator, plain = name.partition("::")
    if not separator or space in _NO_OPERATORS or not operator_kind(name):
        return ""
    if name in _FORMULAS:
        return "formula"
    if operator_kind(name) == "multiplies":
        return "unknown"
    return "" if _COMPOSED.fullmatch(plain) or _MOVES_NOTHING.search(plain) else "moves"


def _outermost(frame: Any, kind: Any) -> tuple[Any, Any]:
    """Which calls count, and which are of unknown work. A call inside one of either kind is neither, and one that
    contains a call that counts is not unknown, so that no work counts twice.
    """
    nesting = nest(*(frame[name].to_numpy() for name in ("start_ns", "end_ns", "tid")))
    has_formula, may_multiply = kind == "formula", kind == "unknown"
    holds, inside = np.zeros(len(kind) + 1, dtype=bool), np.zeros(len(kind) + 1, dtype=bool)
    levels = [np.flatnonzero(nesting.depth == level) for level in range(int(nesting.depth.max(initial=0)) + 1)]
    for here in reversed(levels):
        np.logical_or.at(holds, nesting.parent[here], has_formula[here] | holds[here])
    counts, unknown = np.zeros(len(kind), dtype=bool), np.zeros(len(kind), dtype=bool)
    for here in levels:
        free = ~inside[nesting.parent[here]]
        unknown[here] = free & may_multiply[here] & ~holds[here]
        counts[here] = free & ~may_multiply[here]
        inside[here] = ~free | unknown[here] | counts[here]
    return counts, unknown


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


def _regions(ranges: Ranges, rows: pd.DataFrame) -> tuple[Int64Array, list[tuple[str, str, int, int, float]]]:
    """The number of the layer's or phase's range that each range is or is in, for `NONE` the last, and these ranges as
    in a file of counts, the first one outside all ranges.
    """
    layer, phase = ranges.is_one_of(LAYER_CATEGORIES).tolist(), ranges.is_one_of(PHASE_CATEGORIES).tolist()
    parent, name, texts = ranges.nesting.parent.tolist(), ranges.name.tolist(), ranges.phase.tolist()
    numbers: dict[tuple[str, str, int], int] = {(NO_LAYER, NO_PHASE, NONE): 0}
    keys = [*numbers]
    of_range = np.zeros(len(parent) + 1, dtype=np.int64)
    for row in np.argsort(ranges.nesting.depth, kind="stable").tolist():
        outer = int(of_range[parent[row]])
        if layer[row] or (phase[row] and keys[outer][0] == NO_LAYER):
            text = ranges.names[name[row]].text if layer[row] else NO_LAYER
            key = (text, texts[row] or NO_PHASE, outer or NONE)
            if key not in numbers:
                numbers[key] = len(keys)
                keys.append(key)
            outer = numbers[key]
        of_range[row] = outer
    calls = {
        (layer, phase): number for layer, phase, number in rows[["layer", "phase", "calls"]].itertuples(index=False)
    }
    return of_range, [(*key, calls.pop(key[:2], 0), math.nan) for key in keys]
