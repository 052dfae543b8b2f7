"""What identifies an allocation: the label its program set, the call stack, its size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nvprof_kit.names import (
    LAYER_CATEGORIES,
    NO_LAYER,
    NO_PHASE,
    Category,
    parse_kineto_name,
    parse_memory_label,
    parse_range,
)

if TYPE_CHECKING:
    from nvprof_kit._trace.torch_memory.snapshot import Frames

BEFORE = "(before the history)"
"""Layer, stack and size of what was allocated before the history began."""

NO_STACK = "(no stack recorded)"
_DEPTH = 4
_INSIDE = ("/torch/", "<frozen ")
_ALLOCATOR = re.compile(
    r"^torch::unwind|^torch::CapturedTraceback|gather_with_cpp|CachingAllocator|CachingHostAllocator|GatheredContext"
    r"|^c10::(Storage|DataPtr|alloc|intrusive_ptr)|^\?*$"
)
"""Frames of the unwinder and the allocator, which are at the top of every stack with C++ frames."""
_DISPATCH = re.compile(
    r"^c10::(impl|Dispatcher|KernelFunction|BoxedKernel|OperatorHandle)|\bat::(_ops|detail|empty|native::empty|redispatch)"
    r"|\bwrapper_|\bcreate_out\b|::set_output_|^at::TensorBase |^at::Tensor c10::|^(__)?(clone|start_thread|libc_start)"
    r"|^execute_native_thread|^_?Py|^_start$"
)
"""Frames through which every operator reaches the allocator, and those that start a thread."""


def read_labels(labels: Iterable[str]) -> pd.DataFrame:
    """Layer, phase and step of each label, a row per label number."""
    table = pd.DataFrame(map(_read, labels), columns=["layer", "phase", "step"])
    return table.astype({"layer": "category", "phase": "category", "step": "Int64"})


def _read(label: str) -> tuple[str, str, int | None]:
    name, step = parse_memory_label(label)
    ours = parse_kineto_name(name)
    if ours is None:
        return NO_LAYER, NO_PHASE, step
    range_ = parse_range(*ours)
    if range_.category in LAYER_CATEGORIES:
        return range_.text, range_.category.value, step
    return NO_LAYER, NO_PHASE if range_.category is Category.STEP else range_.text, step


def stack_texts(stacks: Sequence[Frames], numbers: pd.Series[int]) -> list[str]:
    """The stack of each of these numbers in a line: the innermost `_DEPTH` frames outside PyTorch."""
    text_of = {number: _line(stacks[number] if number >= 0 else []) for number in numbers.unique().tolist()}
    return numbers.map(text_of).tolist()


def _line(frames: Frames) -> str:
    """The program's innermost frames; for a thread without Python, such as autograd's, those of the operators."""
    python = [frame for frame in frames if str(frame["filename"]).endswith((".py", ">")) or ".py:" in str(frame)]
    outside = [frame for frame in python if not any(package in str(frame["filename"]) for package in _INSIDE)]
    if outside or python:
        chosen = (outside or python)[:_DEPTH]
        named = [f"{str(frame['filename']).rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}" for frame in chosen]
    else:
        # C++ functions, without their arguments
        plain = (str(frame["name"]).replace("(anonymous namespace)::", "") for frame in frames)
        functions = [name.partition("(")[0].strip() or name for name in plain]
        functions = [name for name in functions if not _ALLOCATOR.search(name)]
        named = [name for name in functions if not _DISPATCH.search(name)] or functions
    return " < ".join(named[:_DEPTH]) or NO_STACK


def size_class(sizes: pd.Series[int]) -> list[str]:
    """The smallest power of two that is not below each size: ``<= 2 MiB``."""
    powers = np.ceil(np.log2(np.maximum(sizes.to_numpy(), 1))).astype(np.int64).tolist()
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    return [f"<= {2 ** (power % 10)} {units[power // 10]}" for power in powers]


def holder_table(allocations: pd.DataFrame, keys: Mapping[str, object], before: int) -> pd.DataFrame:
    """Bytes and blocks by keys, largest first, with a row for what was allocated before the history began."""
    names = list(keys)
    table = pd.DataFrame({**keys, "size_bytes": allocations["size_bytes"].to_numpy()})
    groups = table.groupby(names, observed=True, sort=False)["size_bytes"]
    holders = groups.agg(bytes="sum", blocks="size", largest_bytes="max").reset_index()
    holders = holders.astype(dict.fromkeys(names, "str")).sort_values("bytes", ascending=False, kind="stable")
    if before:
        first = {name: BEFORE if name == names[0] else "" for name in names}
        row = pd.DataFrame([{**first, "bytes": before, "blocks": 0, "largest_bytes": 0}])
        holders = pd.concat([holders, row]) if len(holders) else row
    holders["share"] = holders["bytes"] / max(int(holders["bytes"].sum()), 1)
    return holders.reset_index(drop=True)
