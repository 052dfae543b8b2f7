"""Every number of the per-layer table of real captures, against an independent computation."""

from __future__ import annotations

import itertools
import lzma
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force.layers import BruteForce
from support.captures.as_folder import as_folder
from support.captures.nsys_file import PUSH_POP, START_END, NsysFile
from support.golden import Golden
from support.lane import examples

import nvprof_kit

DATA = Path(__file__).parents[3] / "data"
CAPTURES = sorted(DATA.glob("*.sqlite.xz"))
NUMBERS = ["calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns"]


class Case(NamedTuple):
    """A capture, unpacked, and what the independent computation knows of it: computed once for all tests."""

    path: Path
    truth: BruteForce


@pytest.fixture(scope="module", params=CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def capture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    plain = tmp_path_factory.mktemp("captures") / request.param.stem
    plain.write_bytes(lzma.decompress(request.param.read_bytes()))
    return Case(plain, BruteForce(plain))


@pytest.mark.parametrize("by_step", [False, True], ids=["all", "by-step"])
def test_every_number_equals_the_brute_force(capture: Case, by_step: bool) -> None:
    result = nvprof_kit.open(capture.path).layers(steps="all", by="step" if by_step else None)
    rows = result.rows
    expected = capture.truth.table(by_step, dict(zip(result.tree["layer"], result.tree["parent"], strict=True)))
    keys = ["instance", "layer", "phase"] if by_step else ["layer", "phase"]
    plain = rows.astype(object).where(rows.notna(), None)
    ours = {tuple(row[key] for key in keys): row for row in plain.to_dict("records")}
    assert set(ours) == {key for key, row in expected.items() if row["calls"] or row["gpu_total_ns"]}
    for key, row in ours.items():
        assert {name: row[name] for name in NUMBERS} == {name: expected[key][name] for name in NUMBERS}, key
        assert row["share"] == pytest.approx(expected[key]["share"], abs=1e-12)


def test_it_adds_up(capture: Case) -> None:
    result = nvprof_kit.open(capture.path).layers(steps="all")
    expected = sum(op["ns"] for op in capture.truth.operations())
    assert result.rows["gpu_self_ns"].sum() == result.summary.total_ns == expected
    assert sum(result.summary.by_how.values()) == expected
    shown = nvprof_kit.open(capture.path).layers()
    for table in (result, shown):
        top = table.tree[table.tree["depth"] == 0]
        summary = table.summary
        assert top["total_ns"].sum() == table.rows["gpu_self_ns"].sum() == summary.total_ns
        assert summary.total_ns + summary.outside_ns + summary.left_out_ns == summary.capture_ns == expected


CAPTURES_GOLDEN = sorted((Path(__file__).parents[3] / "data").glob("*.sqlite.xz"))


SHARED = {
    "ddp": 0.98,  # DDP copies its gradient buckets after the backward pass of every layer
    "fsdp": 0.9,  # FSDP gathers what the root holds (embedding, head) before the first layer's backward begins
}
"""Captures in which the wrapper of the whole model works in them, too: the least share in a layer, and why."""


ANNOTATED = [path for path in CAPTURES_GOLDEN if not path.name.startswith("hooks-")]


@pytest.mark.parametrize("capture", CAPTURES_GOLDEN, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_the_table_is_the_golden_one(capture: Path, golden: Golden) -> None:
    found = nvprof_kit.open(capture).layers(steps="all").rows.to_csv(index=False)
    golden(f"layers/{capture.name.replace('.sqlite.xz', '.csv')}", found)


@pytest.mark.parametrize("capture", ANNOTATED, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_all_of_forward_and_backward_is_in_a_layer_but_the_first_gradient(capture: Path) -> None:
    """``loss.backward()`` fills the gradient of the loss by one kernel, which belongs to no layer."""
    result = nvprof_kit.open(capture).layers(steps="all")
    loop = result.rows[result.rows["phase"].isin(["forward", "backward", "recompute"])]
    outside = loop[loop["layer"] == "(none)"]
    least = next((share for name, share in SHARED.items() if capture.name.startswith(name)), None)
    if least is not None:
        assert loop["gpu_self_ns"].sum() - outside["gpu_self_ns"].sum() >= least * loop["gpu_self_ns"].sum()
        return
    assert outside.loc[outside["phase"] != "backward", "gpu_ops"].sum() == 0
    assert outside["gpu_ops"].sum() <= result.summary.all_steps


FORMATS = [path for path in CAPTURES_GOLDEN if path.name.startswith(("checkpoint", "graph-", "generate", "ddp-"))]


@pytest.mark.parametrize("capture", FORMATS, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def test_the_totals_of_the_rows_add_up_to_the_printed_ones(capture: Path) -> None:
    """Over the phases of each layer, in the shown steps: also for a model of which only the blocks run again."""
    result = nvprof_kit.open(capture).layers(by="step")
    printed = result.tree[result.tree["layer"] != "(none)"].set_index("layer")["total_ns"]
    rows = result.rows
    totals = rows[rows["layer"] != "(none)"].groupby("layer")["gpu_total_ns"].sum()
    assert totals.reindex(printed.index, fill_value=0).to_dict() == printed.to_dict()


NUMBERS_PROPERTY = ("calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns")


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
                tuple(row[key] for key in keys): {name: row[name] for name in NUMBERS_PROPERTY}
                for row in rows.astype(object).where(rows.notna(), None).to_dict("records")
            }
            expected = {
                key: {name: row[name] for name in NUMBERS_PROPERTY} for key, row in truth.table(by_step, parent).items()
            }
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
                (row["layer"], row["phase"]): {name: row[name] for name in NUMBERS_PROPERTY}
                for row in rows.to_dict("records")
            }
            expected = {
                key: {name: row[name] for name in NUMBERS_PROPERTY} for key, row in truth.table(parent=parent).items()
            }
            assert ours == expected
