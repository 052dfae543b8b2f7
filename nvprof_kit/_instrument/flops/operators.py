"""FLOPs and dtype of one operator.

The formulas are those of `torch.utils.flop_counter`, those that the program registered there
(``register_flop_formula``), and a few additions. A multiply-add is two operations, a causal mask does not reduce the
count, and operators without matrix multiplication count as 0. Without a formula, the count is unknown, not 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.utils.flop_counter import addmm_flop, baddbmm_flop, flop_registry, mm_flop, sdpa_backward_flop, sdpa_flop

from nvprof_kit._operators import operator_kind

_TYPES = {"bfloat16": "bf16", "uint8": "int8"}
"""Names that Tensor Core peaks have for dtypes; other floats are ``fp`` and their bits."""

Kind = Literal["formula", "composite", "multiplies", "moves", ""]
"""How the FLOPs of an operator are determined: by its formula; by the operators that it consists of; not at all, since
it may multiply and has none; as none, since it only moves, adds or compares; '' for communication and what is not of
the GPU.
"""


def kind_of(operator: Any) -> Kind:
    """How the FLOPs of an operator (an ``OpOverload`` or a higher-order operator) are determined."""
    if _formula(operator) is not None:
        return "formula"
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return "multiplies"
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return "composite"
    return operator_kind(operator._schema.name)


def kind_here(operator: Any, args: Iterable[Any]) -> Kind:
    """The same for a composite operator, unless these tensors have a kernel of their own for it."""
    for tensor in _tensors(args):
        key = torch._C._dispatch_key_for_device(tensor.device.type)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        if tensor.is_nested or tensor.is_mkldnn or has_kernel:
            return operator_kind(operator._schema.name)
    return "composite"


def work_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[str, int | None]:
    """The type of the numbers that one run of an operator multiplies, and its FLOPs, None if they are unknown.

    The type is ``bf16``, ``fp16``, ``fp32``, ``tf32``, ``fp8``, ``fp4``, ``int8``, ``fp64``, or PyTorch's name of
    another; '' if the operator has no tensors.

    Args:
        operator: An operator with a formula, or an unknown one.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    formula = _formula(operator)
    flops = None
    if formula is not None:
        try:
            flops = int(formula(*args, **kwargs, out_val=out))
        except Exception:  # the formula does not support this form of the operator
            flops = _grouped_query_flops(name_of(operator), args)
    types = {
        tensor.dtype: tensor
        for tensor in _tensors([*args, *kwargs.values()])
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in (torch.int8, torch.uint8)
    }
    if not types:
        return "", flops
    narrowest = min(types, key=lambda dtype: dtype.itemsize)  # scales, sums and seeds are wider than the matrices
    if narrowest is torch.float32 and _rounds_to_tf32(types[narrowest], operator):
        return "tf32", flops
    name = str(narrowest).removeprefix("torch.")
    return _TYPES.get(name) or re.sub(r"^float(\d+).*", r"fp\1", name), flops


def name_of(operator: Any) -> str:
    """The operator's name, ``aten::mm``."""
    schema = getattr(operator, "_schema", None)
    return str(schema.name) if schema is not None else f"higher_order::{operator.name()}"


def _formula(operator: Any) -> Any:
    packet = getattr(operator, "_overloadpacket", operator)
    return flop_registry.get(packet) or _OWN.get(packet)


def _grouped_query_flops(name: str, args: tuple[Any, ...]) -> int | None:
    """Fused attention with fewer heads of keys and values than of queries, which the counter of PyTorch 2.11
    refuses; None for any other operator.
    """
    backward = name.endswith("attention_backward")
    if not name.startswith("aten::_scaled_dot_product_") or not (backward or name.endswith("attention")):
        return None
    query, key, value = args[backward : backward + 3]
    if not query.dim() == key.dim() == value.dim() == 4 or query.shape[1] % key.shape[1]:
        return None
    batch, heads, queries, width = query.shape
    products = 3 * width + 2 * value.shape[3] if backward else width + value.shape[3]
    return int(2 * batch * heads * queries * key.shape[2] * products)


def _grouped_mm_flop(a: Any, b: Any, *_args: Any, out_val: Any = None, **_kwargs: Any) -> int:
    """Grouped matrix multiplication, as in a mixture of experts.

    The operands are ``(rows, k)`` and ``(groups, k, n)``, ``(groups, rows, k)`` and ``(k, n)``, both 3D, or both 2D
    with the groups along ``k``.
    """
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


_OWN = {
    getattr(torch.ops.aten, name): formula
    for name, formula in {
        "_scaled_dot_product_flash_attention_for_cpu": sdpa_flop,
        "_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop,
        "_addmm_activation": addmm_flop,
        "_int_mm": mm_flop,
        "addmm_": addmm_flop,
        "baddbmm_": baddbmm_flop,
        "_grouped_mm": _grouped_mm_flop,
        "_scaled_grouped_mm": _grouped_mm_flop,
    }.items()
    if hasattr(torch.ops.aten, name)
}
"""Formulas missing from PyTorch's counter."""


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _rounds_to_tf32(tensor: torch.Tensor, operator: Any) -> bool:
    """Whether the GPU multiplies these fp32 tensors on Tensor Cores in TF32."""
    if not tensor.is_cuda or torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (8, 0):
        return False
    backend: Any = torch.backends.cuda.matmul
    if "conv" in name_of(operator):
        backend = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
    precision = getattr(backend, "fp32_precision", None)  # PyTorch 2.9 or later
    if precision not in (None, "none"):
        return bool(precision == "tf32")
    try:
        return bool(getattr(backend, "allow_tf32", torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # the program mixes the old and new APIs for TF32
        return False
