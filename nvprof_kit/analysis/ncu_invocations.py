"""Which launches of a configuration ncu is to measure, so that each kind of work among them is measured once.

ncu counts the launches of every name, grid, block and shared memory for themselves, and takes one set of numbers for
all: ``1|53`` measures the first and the 53rd of each. A high number is cheap, since few configurations come so often.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nvprof_kit.analysis.kernels import Kernels

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

LEAST_SHARE = 0.002
"""A kind of a smaller share of the GPU time has no launch measured for itself."""


def choose_invocations(kernels: Kernels, wanted: Bools, times: Ints) -> tuple[int, ...]:
    """The numbers of the launches to measure, ascending; the first is always among them.

    Args:
        kernels: The launches of the capture.
        wanted: Which signatures are of a chosen name, shape ``(s,)``.
        times: GPU time by signature, ``(s,)``.
    """
    early = kernels.early & wanted[kernels.signature]
    signature, number = kernels.signature[early], kernels.invocation[early]
    chosen = [1]
    while True:
        open_ = wanted & (times >= LEAST_SHARE * times.sum()) & ~_hit(signature, number, chosen, len(wanted))
        useful = open_[signature]
        if not useful.any():
            return tuple(sorted(chosen))
        candidates = np.unique(number[useful])
        pairs = np.unique(np.column_stack([number[useful], signature[useful]]), axis=0)
        gain = np.bincount(np.searchsorted(candidates, pairs[:, 0]), weights=times[pairs[:, 1]])
        price = np.bincount(np.searchsorted(candidates, number[np.isin(number, candidates)], side="left"))
        value = gain / np.maximum(price[: len(candidates)], 1)
        chosen.append(int(candidates[len(value) - 1 - int(np.argmax(value[::-1]))]))


def measured_by(kernels: Kernels, wanted: Bools, invocations: tuple[int, ...]) -> tuple[Bools, int]:
    """Which of the wanted signatures these numbers measure, and how many launches that are."""
    early = kernels.early & wanted[kernels.signature]
    signature, number = kernels.signature[early], kernels.invocation[early]
    launches = int(np.isin(number, invocations).sum())
    return wanted & _hit(signature, number, list(invocations), len(wanted)), launches


def _hit(signature: npt.NDArray[np.intp], number: Ints, chosen: list[int], count: int) -> Bools:
    hit = np.zeros(count, dtype=bool)
    hit[signature[np.isin(number, chosen)]] = True
    return hit
