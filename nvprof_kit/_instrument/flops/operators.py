"""What one operator costs: floating point operations by the formulas of PyTorch's own counter, and the type of number.

The formulas are those of `torch.utils.flop_counter`, with whatever the program registered there itself
(``register_flop_formula``), and a few that it lacks: a multiply-add is two operations, a causal mask halves nothing,
and what multiplies no matrices counts nothing. Work that no formula knows is unknown, which is not nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import addmm_flop, baddbmm_flop, flop_registry, mm_flop, sdpa_backward_flop, sdpa_flop

NOTHING_KNOWN = ""
"""Type of number of work without tensors of one."""

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.uint8: "int8",
}
"""What the tensor cores and their peaks are called by; eight-bit floats are told by their names."""

_COUNTS_NOTHING = frozenset(
    {"prim", "prims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"}
)
"""Namespaces of operators that multiply nothing: collectives and copies."""

_MULTIPLIES = re.compile(
    r"mm(?![aiy])|matmul|conv(?!ert)|attention|(?<!i)linear(?!1d|_comb)|^_trilinear$|_rnn|lstm_mps|^(add)?mv$|^v?dot$"
    r"|^_fft_|_cdist_|cholesky|triangular_solve|lu_solve|ormqr|geqrf|transformer_encoder"
    r"|^_?linalg_(?!vector_norm|cross|diagonal|check)"
)
"""Operators of PyTorch's that multiply matrices, by name; unknown where the counter has no formula for them."""

_ONLY_MOVES = re.compile(r"prepack$|_pack_|reorder|flatten_weight|_search$")
"""Of those, the ones that only prepare."""

_BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU", "hpu": "HPU", "meta": "Meta"}
"""What the dispatcher calls the kernels of a device."""


class Work(NamedTuple):
    """One run of an operator.

    Attributes:
        operator: Its name, ``aten::mm``.
        dtype: Type of the numbers it multiplies: ``bf16``, ``fp16``, ``fp32``, ``tf32``, ``fp8``, ``fp4``, ``int8``,
            ``fp64``, or PyTorch's own name of another; '' where it has no tensors.
        flops: Floating point operations, None where they are unknown.
    """

    operator: str
    dtype: str
    flops: int | None


class Kind(Enum):
    """How an operator's work is found."""

    FORMULA = "formula"
    INSIDE = "inside"  # it is made of other operators, and those are counted
    NOTHING = "nothing"
    UNKNOWN = "unknown"


def kind_of(operator: Any) -> Kind:
    """How the work of an operator (an ``OpOverload`` or a higher-order operator) is found."""
    if _formula(operator) is not None:
        return Kind.FORMULA
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return Kind.UNKNOWN
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return Kind.INSIDE
    return _kind_by_name(operator)


def kind_here(operator: Any, args: Iterable[Any]) -> Kind:
    """How the work of an operator is found that is made of others, unless these tensors have a kernel of their own."""
    for tensor in _tensors(args):
        key = _BACKENDS.get(tensor.device.type)
        if (
            tensor.is_nested
            or tensor.is_mkldnn
            or (key and torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))
        ):
            return _kind_by_name(operator)
    return Kind.INSIDE


def _kind_by_name(operator: Any) -> Kind:
    space, _, name = operator._schema.name.partition("::")
    if space == "aten":
        unknown = _MULTIPLIES.search(name) is not None and _ONLY_MOVES.search(name) is None
    else:
        unknown = space not in _COUNTS_NOTHING
    return Kind.UNKNOWN if unknown else Kind.NOTHING


def work_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """What one run of an operator cost.

    Args:
        operator: One that has a formula, or is unknown.
        args: What it was called with.
        kwargs: The same, by name.
        out: What it returned.
    """
    formula = _formula(operator)
    flops = None
    if formula is not None:
        try:
            flops = int(formula(*args, **kwargs, out_val=out))
        except Exception:  # a formula that does not know this form of the operator
            flops = None
    return Work(_name(operator), _dtype([*args, *kwargs.values()], operator), flops)


def _name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return str(schema.name) if schema is not None else f"higher_order::{operator.name()}"


def _formula(operator: Any) -> Any:
    packet = getattr(operator, "_overloadpacket", operator)
    return flop_registry.get(packet) or _OWN.get(packet)


def _grouped_mm_flop(a: Any, b: Any, *_args: Any, out_val: Any = None, **_kwargs: Any) -> int:
    """Groups of matrix products in one, as mixtures of experts have them: ``(rows, k)`` by ``(groups, k, n)``,
    ``(groups, rows, k)`` by ``(k, n)``, both in groups, or neither, where ``k`` is what is grouped.
    """
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _own_formulas() -> dict[Any, Any]:
    own = {
        "_scaled_dot_product_flash_attention_for_cpu": sdpa_flop,
        "_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop,
        "_addmm_activation": addmm_flop,
        "_int_mm": mm_flop,
        "addmm_": addmm_flop,
        "baddbmm_": baddbmm_flop,
        "_grouped_mm": _grouped_mm_flop,
        "_scaled_grouped_mm": _grouped_mm_flop,
    }
    return {getattr(torch.ops.aten, name): formula for name, formula in own.items() if hasattr(torch.ops.aten, name)}


_OWN = _own_formulas()
"""Formulas that PyTorch's counter lacks."""


def _dtype(values: Iterable[Any], operator: Any) -> str:
    """The narrowest type among the tensors: scales, sums and seeds beside the matrices are wider."""
    types = {tensor.dtype: tensor for tensor in _tensors(values) if _is_number(tensor.dtype)}
    if not types:
        return NOTHING_KNOWN
    narrowest = min(types, key=lambda dtype: dtype.itemsize)
    if narrowest is torch.float32 and _rounds_to_tf32(types[narrowest], operator):
        return "tf32"
    name = str(narrowest).removeprefix("torch.")
    return _TYPES.get(narrowest) or re.sub(r"float(\d)_.*", r"fp\1", name)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype in (torch.int8, torch.uint8)


def _rounds_to_tf32(tensor: torch.Tensor, operator: Any) -> bool:
    """Whether the GPU multiplies these 32-bit floats by its tensor cores, rounded to TF32."""
    if not tensor.is_cuda or torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (8, 0):
        return False
    backend: Any = torch.backends.cuda.matmul
    if "conv" in _name(operator):
        backend = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
    precision = getattr(backend, "fp32_precision", None)  # PyTorch 2.9 and newer
    return precision == "tf32" if precision not in (None, "none") else bool(_old_flag(backend))


def _old_flag(backend: Any) -> bool:
    try:
        return bool(getattr(backend, "allow_tf32", torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # the program mixes both ways of asking for it
        return False
