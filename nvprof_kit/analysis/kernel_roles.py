"""Where one and the same launch does different work: told by the part of the model it works for, and by its times.

A role is a layer without its number, and a phase: every ``model.layers.N.mlp`` in its backward is one role. A place is
the how manieth launch of its signature it is in one call of the layer. Launches of one signature whose roles or places
take clearly different times are of different kinds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Role = tuple[str, str]
"""Layer, with ``*`` for every number in its path, and phase."""

Ints = npt.NDArray[np.int64]

PLACES = 64
"""Places that are told apart; further launches of a signature in one call of a layer count as the last of these."""

APART = 1.2
"""Roles are apart where one's median time is longer than another's by this factor."""

LEAST_SHARE = 0.001
"""Signatures of a smaller share of the GPU time are not divided: their times are too short to tell."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def role_of(owner: tuple[str, str]) -> Role:
    """The role of a layer and phase: ``("layers.3.mlp", "forward")`` gives ``("layers.*.mlp", "forward")``."""
    return _NUMBER.sub("*", owner[0]), owner[1]


def divide_by_role(signature: Ints, role: Ints, duration: Ints) -> tuple[Ints, list[tuple[int, tuple[int, ...]]]]:
    """Divide signatures whose roles, or roles and places, are apart.

    Args:
        signature: Which signature each launch has, shape ``(k,)``.
        role: Which role each launch has, ``(k,)``.
        duration: Time of each launch, ``(k,)``.

    Returns:
        Of each launch its kind, shape ``(k,)``; and of each kind its signature, and its roles where the signature was
        divided, none where it was not.
    """
    width = int(role.max(initial=0)) + 1
    cell = signature * width + role
    order = np.lexsort((duration, cell))
    cells, first, counts = np.unique(cell[order], return_index=True, return_counts=True)
    medians = duration[order][first + counts // 2]
    times = np.bincount(signature, weights=duration)
    by_signature: dict[int, list[tuple[int, int]]] = {}
    for one, median in zip(cells.tolist(), medians.tolist(), strict=True):
        by_signature.setdefault(one // width, []).append((median, one % width))
    kinds: list[tuple[int, tuple[int, ...]]] = []
    kind_of_cell: dict[int, int] = {}
    for one, roles in by_signature.items():
        groups = _groups(roles) if times[one] >= LEAST_SHARE * times.sum() else [[place for _, place in roles]]
        for group in groups:
            kind_of_cell.update({one * width + place: len(kinds) for place in group})
            kinds.append((one, tuple(group) if len(groups) > 1 else ()))
    of_cell = np.array([kind_of_cell[one] for one in cells.tolist()], dtype=np.int64)
    return of_cell[np.searchsorted(cells, cell)], kinds


def _groups(roles: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Roles by their median times, those that are not apart from the quickest of a group together."""
    groups: list[list[int]] = []
    least = 0
    for median, place in sorted(roles):
        if not groups or median > APART * least:
            groups.append([])
            least = median
        groups[-1].append(place)
    return groups
