"""Any well-formed capture: every number equals the slow computation, and nothing is lost."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force.layers import BruteForce
from support.captures.as_folder import as_folder
from support.captures.nsys_file import PUSH_POP, START_END, NsysFile
from support.lane import examples

import nvprof_kit

NUMBERS = ("calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns")
NAMES = st.sampled_from(
    [
        ("step", "step 1"),
        ("step", "step 2"),
        ("phase", "backward"),
        ("phase", "optimizer"),
        ("forward", "a"),
        ("forward", "a.b"),
        ("backward", "a backward"),
        ("recompute", "a.b recompute"),
        ("user", "anything"),
    ]
)


def trees(depth: int = 3) -> st.SearchStrategy[list[tuple[tuple[str, str], list[object]]]]:
    """Nested ranges: a list of (name, inner list)."""
    inner = st.just([]) if depth == 0 else st.deferred(lambda: trees(depth - 1))
    return st.lists(st.tuples(NAMES, inner), max_size=3)  # type: ignore[arg-type]


def lay_out(file: NsysFile, tree: list[tuple[tuple[str, str], list[object]]], start: int, tid: int, pid: int) -> int:
    """Write the ranges with room for launches before, inside and after each; returns where they end."""
    for (category, text), inner in tree:
        begin = start + 10
        end = lay_out(file, inner, begin, tid, pid) + 10  # type: ignore[arg-type]
        payload = int(text[-1]) if category == "step" else None
        file.range_(text, begin, end, category=category, tid=tid, pid=pid, payload=payload)
        start = end
    return start + 10


threads = st.tuples(st.integers(1, 2), st.integers(1, 3))  # process, thread
launches = st.lists(
    st.tuples(threads, st.integers(0, 200), st.integers(0, 300), st.integers(0, 60), st.integers(0, 1)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(30))
@given(st.dictionaries(threads, trees(), min_size=1, max_size=4), launches)
def test_any_capture(
    by_thread: dict[tuple[int, int], list[object]], launched: list[tuple[tuple[int, int], int, int, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = NsysFile(Path(folder) / "any.sqlite")
        file.range_("never", 100_000, 100_001)
        for (pid, tid), tree in by_thread.items():
            lay_out(file, tree, 0, tid, pid)  # type: ignore[arg-type]
        for (pid, tid), call, start, length, device in launched:
            file.kernel(start, start + length, launched=(call, call + 1), tid=tid, pid=pid, device=device)
        file.write()
        truth = BruteForce(file.path)
        tables = as_folder(file.path, Path(folder) / "any_pqtdir")
        for path, by_step in itertools.product((file.path, tables), (False, True)):
            keys = ["instance", "layer", "phase"] if by_step else ["layer", "phase"]
            result = nvprof_kit.open(path).layers(steps="all", by="step" if by_step else None)
            rows, parent = result.rows, dict(zip(result.tree["layer"], result.tree["parent"], strict=True))
            ours = {
                tuple(row[key] for key in keys): {name: row[name] for name in NUMBERS}
                for row in rows.astype(object).where(rows.notna(), None).to_dict("records")
            }
            expected = {key: {name: row[name] for name in NUMBERS} for key, row in truth.table(by_step, parent).items()}
            assert ours == expected


crossing = st.lists(
    st.tuples(st.sampled_from([PUSH_POP, START_END]), NAMES, st.integers(0, 60), st.integers(1, 60)), max_size=8
)


@settings(max_examples=examples(30))
@given(crossing, st.lists(st.tuples(st.integers(0, 130), st.integers(1, 9)), min_size=1, max_size=12))
def test_ranges_that_cross(
    ranges: list[tuple[int, tuple[str, str], int, int]], launched: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = NsysFile(Path(folder) / "any.sqlite")
        file.range_("never", 100_000, 100_001)
        for number, (style, (category, text), start, length) in enumerate(ranges):
            # no two begin or end at the same moment: which of them would be the inner one, nothing tells
            begin, end = 100 * start + number, 100 * (start + length) + 50 + number
            file.range_(text, begin, end, category=category, style=style)
        for number, (call, length) in enumerate(launched):
            file.kernel(
                20_000 + 10 * number, 20_000 + 10 * number + length, launched=(100 * call + 20, 100 * call + 21)
            )
        file.write()
        truth = BruteForce(file.path)
        for path in (file.path, as_folder(file.path, Path(folder) / "any_pqtdir", "arrow")):
            result = nvprof_kit.open(path).layers(steps="all")
            rows, parent = result.rows, dict(zip(result.tree["layer"], result.tree["parent"], strict=True))
            ours = {
                (row["layer"], row["phase"]): {name: row[name] for name in NUMBERS} for row in rows.to_dict("records")
            }
            expected = {key: {name: row[name] for name in NUMBERS} for key, row in truth.table(parent=parent).items()}
            assert ours == expected
