"""The lane of this run: the usual one, the fast one with NVPROF_KIT_FAST=1, or the full one with NVPROF_KIT_FULL=1."""

import os
from collections import defaultdict
from pathlib import PurePath
from typing import Any

import pytest

FAST = os.environ.get("NVPROF_KIT_FAST") == "1"
"""Run the tests that `fast_lane` names, in two minutes."""

FULL = os.environ.get("NVPROF_KIT_FULL") == "1"
"""Run the tests marked ``full`` too, every test of nsys with every release, and many random cases."""

CAPTURES = {
    # annotated: checkpointed, compiled to CUDA graphs, of a job, with memory
    *("checkpoint-2023.4", "compile-graphs-parts-2024.2", "hooks-ddp-2024.2", "caching-2024.2"),
    # of PyTorch's profiler, of other programs, without any range
    *("fsdp.rank0", "video", "kineto-modules", "emit-nvtx-2024.2", "qwen3-capture", "bert", "llama-graph", "decode"),
    # jobs: data and pipeline parallel
    *("ddp-layer", "pipeline-host"),
}
"""Of a test that runs for several captures, the fast lane runs these."""


def examples(usual: int) -> int:
    """Number of random cases of a property test: ten times as many in the full lane, a tenth in the fast one."""
    return 10 * usual if FULL else max(usual // 10, 2) if FAST else usual


def fast_lane(items: list[pytest.Item]) -> list[pytest.Item]:
    """Without what is slow, a browser, a GPU, and nsys but in tests marked ``fast``; of each test a few cases."""
    cases_of_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "fast" in marks or not marks & {"slow", "browser", "gpu", "nsys"}:
            cases_of_test[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for cases in cases_of_test.values() for item in _few(cases)}
    return [item for item in items if item in chosen]


def _few(cases: list[Any]) -> list[Any]:
    """Two cases, or of several those of `CAPTURES`, or where there are none the first and the last."""
    if len(cases) <= 2:
        return cases
    of_captures = [case for case in cases if not CAPTURES.isdisjoint(map(_stem, case.callspec.params.values()))]
    return of_captures or [cases[0], cases[-1]]


def _stem(value: object) -> str:
    """The name of a capture, given by its path or its name."""
    return PurePath(str(value)).name.partition(".sqlite")[0].partition(".json")[0]
