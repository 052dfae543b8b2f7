"""What is true of PyTorch's operators, for a count that runs them and for one of recorded shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from nvprof_kit._toml import read_toml

_FACTS = read_toml("nvprof_kit", "operators.toml")
_MULTIPLIES, _PACKS = (re.compile("|".join(_FACTS[names])) for names in ("multiplies", "packs"))

OVERWRITES: Sequence[str] = _FACTS["overwrites"]
"""PyTorch's in-place operators that do not read what they overwrite."""

SELECTS: Mapping[str, str] = _FACTS["selects"]
"""PyTorch's operators that read only the selected elements of this argument."""

SCATTERS: Sequence[str] = _FACTS["scatters"]
"""PyTorch's in-place operators that touch only as many elements of ``self`` as they are given."""

_READ_AGAIN: Mapping[str, int] = _FACTS["read_again"]


def operator_kind(name: str) -> Literal["multiplies", "moves", ""]:
    """What an operator may do, by its name: ``multiplies`` matrices, as any of other libraries may, ``moves`` numbers,
    or '' for neither.
    """
    space, _, plain = name.partition("::")
    if space in _FACTS["no_work"]:
        return ""
    return "multiplies" if space != "aten" or (_MULTIPLIES.search(plain) and not _PACKS.search(plain)) else "moves"


def arguments_read_again(operator: str, output_mask: Sequence[bool] | None = None) -> int:
    """How many of an operator's first arguments PyTorch reads twice, because it runs two kernels on a GPU.

    Args:
        operator: Its name without namespace.
        output_mask: Which gradients a norm's backward computes.
    """
    if output_mask is not None and not (output_mask[0] and any(output_mask[1:])):
        return 0
    return _READ_AGAIN.get(operator, 0)


def causal_share(queries: int, keys: int) -> float:
    """Share of the scores of an attention that a causal mask leaves to compute."""
    square = min(queries, keys)
    return (square * (square + 1) / 2 + max(queries - keys, 0) * keys) / max(queries * keys, 1)
