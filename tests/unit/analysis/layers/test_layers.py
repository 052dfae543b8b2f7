"""Every number of the per-layer table of real captures, against an independent computation."""

import itertools
import tempfile
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force.layers import BruteForce
from support.captures.as_folder import as_folder
from support.captures.nsys_file import PUSH_POP, SCHEMAS, START_END, NsysFile, thread
from support.data import DATA, unpacked
from support.lane import examples

import nvprof_kit

CAPTURES = sorted(DATA.glob("*.sqlite.xz"))
GRAPHS = ("graph-2", "hooks-graph", "compile-graphs")
NUMBERS = ["calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns"]


class Case(NamedTuple):
    """A capture, unpacked, and what the independent computation knows of it: computed once for all tests."""

    path: Path
    truth: BruteForce


@pytest.fixture(scope="module", params=CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def capture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    plain = unpacked(request.param, tmp_path_factory.mktemp("captures") / request.param.stem)
    return Case(plain, BruteForce(plain))


@pytest.mark.parametrize("by_step", [False, True], ids=["all", "by-step"])
def test_every_number_equals_the_brute_force(capture, by_step):
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


def test_it_adds_up_to_the_golden_table(capture, golden):
    result = nvprof_kit.open(capture.path).layers(steps="all")
    golden(f"layers/{capture.path.stem}.csv", result.rows.to_csv(index=False))
    expected = sum(op["ns"] for op in capture.truth.operations())
    assert result.rows["gpu_self_ns"].sum() == result.summary.total_ns == expected
    assert sum(result.summary.by_how.values()) == expected
    assert ("graph node" in result.summary.by_how) == capture.path.stem.startswith(GRAPHS)
    if not capture.path.stem.startswith(("hooks-", "ddp", "fsdp")):  # whose wrapper works between layers, too
        outside = result.rows[(result.rows["layer"] == "(none)") & (result.rows["gpu_ops"] > 0)]
        loop = outside[outside["phase"].isin(["forward", "backward", "recompute"])]
        # the gradient of the loss is filled by one kernel
        assert set(loop["phase"]) <= {"backward"} and loop["gpu_ops"].sum() <= result.summary.all_steps
    for table in (result, nvprof_kit.open(capture.path).layers()):
        top = table.tree[table.tree["depth"] == 0]
        summary = table.summary
        assert top["total_ns"].sum() == table.rows["gpu_self_ns"].sum() == summary.total_ns
        assert summary.total_ns + summary.outside_ns + summary.left_out_ns == summary.capture_ns == expected
        # over the phases of each layer, in the shown steps, also where only the blocks of a model run again
        printed = table.tree[table.tree["layer"] != "(none)"].set_index("layer")["total_ns"]
        totals = table.rows[table.rows["layer"] != "(none)"].groupby("layer")["gpu_total_ns"].sum()
        assert totals.reindex(printed.index, fill_value=0).to_dict() == printed.to_dict()


RANGES = {"step": ["step 1", "step 2"], "phase": ["backward", "optimizer"], "forward": ["a", "a.b"]}
RANGES |= {"backward": ["a backward"], "recompute": ["a.b recompute"], "user": ["anything"]}
NAMES = st.sampled_from([(category, text) for category, texts in RANGES.items() for text in texts])


def trees(depth: int = 3) -> st.SearchStrategy[list[tuple[tuple[str, str], list[object]]]]:
    """Nested ranges: a list of (name, inner list)."""
    inner = st.just([]) if depth == 0 else st.deferred(lambda: trees(depth - 1))
    return st.lists(st.tuples(NAMES, inner), max_size=3)


def lay_out(file: NsysFile, tree: list[tuple[tuple[str, str], list[object]]], start: int, tid: int, pid: int) -> int:
    """Write the ranges with room for launches before, inside and after each; returns where they end."""
    for (category, text), inner in tree:
        begin = start + 10
        end = lay_out(file, inner, begin, tid, pid) + 10
        payload = int(text[-1]) if category == "step" else None
        file.range_(text, begin, end, category=category, tid=tid, pid=pid, payload=payload)
        start = end
    return start + 10


threads = st.tuples(st.integers(1, 2), st.integers(1, 3))  # process, thread
launch = st.tuples(threads, st.integers(0, 200), st.integers(0, 300), st.integers(0, 60), st.integers(0, 1))
launches = st.lists(launch, min_size=1, max_size=12)
replays = st.lists(st.tuples(threads, st.integers(121, 200)))
graphs = st.lists(st.tuples(threads, st.integers(0, 120), st.booleans(), replays), max_size=3)
"""Thread and moment of a node's creation, whether replays name a copy of it, and thread and moment of the replays."""


def rows_of(path: Path, by_step: bool = False) -> tuple[dict[Any, dict[str, Any]], dict[str, str]]:
    """The numbers of each row of the table, and the parent of each layer."""
    result = nvprof_kit.open(path).layers(steps="all", by="step" if by_step else None)
    keys = ["instance", "layer", "phase"] if by_step else ["layer", "phase"]
    rows = result.rows.astype(object).where(result.rows.notna(), None).to_dict("records")
    parent = dict(zip(result.tree["layer"], result.tree["parent"], strict=True))
    return {tuple(row[key] for key in keys): {name: row[name] for name in NUMBERS} for row in rows}, parent


def assert_brute_force(file: NsysFile, kind: str, *by_steps: bool) -> None:
    """The file and the folder that nsys makes of it have the rows of the independent computation."""
    file.write()
    truth = BruteForce(file.path)
    tables = as_folder(file.path, file.path.with_name("any_pqtdir"), kind)
    for path, by_step in itertools.product((file.path, tables), by_steps):
        ours, parent = rows_of(path, by_step)
        expected = truth.table(by_step, parent)
        assert ours == {key: {name: row[name] for name in NUMBERS} for key, row in expected.items()}


@settings(max_examples=examples(30))
@given(st.dictionaries(threads, trees(), min_size=1, max_size=4), launches, graphs, st.sampled_from([*SCHEMAS]))
def test_any_capture(by_thread, launched, replayed, schema):
    with tempfile.TemporaryDirectory() as folder:
        file = NsysFile(Path(folder) / "any.sqlite", schema)
        file.range_("theirs", 0, 100, domain="other", pid=2, category=None)  # so that ours has another id there
        file.range_("never", 100_000, 100_001)
        for (pid, tid), tree in by_thread.items():
            lay_out(file, tree, 0, tid, pid)
        ids = {1: count(1), 2: count(1)}  # those of two processes are the same
        for (pid, tid), call, start, length, device in launched:
            thread_of = {"tid": tid, "pid": pid, "correlation": next(ids[pid])}
            file.kernel(start, start + length, launched=(call, call + 1), device=device, **thread_of)
        for node, ((pid, creator), created, is_copy, calls) in enumerate(replayed, 1):
            file.graph_node(node, created, tid=creator, pid=pid)
            if is_copy:
                file.graph_node(node + 10, created + 1, original=node, tid=creator, pid=pid)
            for place, ((_, tid), moment) in enumerate(calls):
                id_ = next(ids[pid])
                file.call("cudaGraphLaunch_v10000", moment, moment + 1, tid=tid, pid=pid, correlation=id_)
                start = 500 + 20 * place
                file.kernel(start, start + 30, correlation=id_, node=node + 10 * is_copy, pid=pid)
        assert_brute_force(file, "parquet", False, True)


crossing = st.lists(
    st.tuples(st.sampled_from([PUSH_POP, START_END]), NAMES, st.integers(0, 60), st.integers(1, 60)), max_size=8
)


@settings(max_examples=examples(30))
@given(crossing, st.lists(st.tuples(st.integers(0, 130), st.integers(1, 9)), min_size=1, max_size=12))
def test_ranges_that_cross(ranges, launched):
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
        assert_brute_force(file, "arrow", False)


@pytest.fixture(params=SCHEMAS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "capture.sqlite", request.param)


def table(file: NsysFile) -> nvprof_kit.Layers:
    return nvprof_kit.open(file.write()).layers(steps="all")


def sums(result: nvprof_kit.Layers) -> dict[tuple[str, str], int]:
    rows = result.rows[result.rows["gpu_self_ns"] > 0]
    return dict(zip(zip(rows["layer"], rows["phase"], strict=True), rows["gpu_self_ns"], strict=True))


def test_the_phase_stands_in_the_category_or_else_in_the_text(file):
    file.range_("layers.0 backward", 0, 10, category="backward")
    file.range_("layers.1", 10, 20, category="backward")  # a capture whose text lacks the suffix
    file.range_("layers.2 backward", 20, 30, category=None)  # one without categories
    file.range_("optimizer", 30, 40, category=None)
    for n, start in enumerate((1, 11, 21, 31)):
        file.kernel(100 + n, 101 + n, launched=(start, start + 1))
    assert sums(table(file)) == {(f"layers.{n}", "backward"): 1 for n in range(3)} | {("(none)", "optimizer"): 1}


def test_the_models_order_even_where_the_window_begins_in_the_middle(file):
    names = ["model", "model.embed", "model.layers.9", "model.layers.10", "model.norm"]
    for start in (0, 1000):
        file.range_("model", start, start + 500)
        for n, name in enumerate(names[1:], 1):
            file.range_(name, start + n * 100, start + n * 100 + 50)
    events = file.rows["NVTX_EVENTS"]
    file.rows["NVTX_EVENTS"] = [row for row in events if not 0 <= int(str(row["start"])) < 250]  # first is layers.10
    file.kernel(5000, 5001, launched=(1001, 1002))
    tree = table(file).tree
    assert [name for name in tree["layer"] if name.startswith("model.layers")] == ["model.layers.9", "model.layers.10"]
    assert tree["layer"][0] == "model"
    assert tree["depth"].tolist()[:2] == [0, 1]


def built_outside(file: NsysFile) -> None:
    file.kernel(100, 110, correlation=file.call("cudaGraphLaunch_v10000", 60, 70), node=11)


def traced_whole(file: NsysFile) -> None:
    file.call("cudaGraphLaunch_v10000", 200, 210)  # its kernels are not in the capture


def without_launch(file: NsysFile) -> None:
    file.kernel(60, 1_500_060, correlation=5)


def run_on(file: NsysFile) -> None:
    for n in range(1, 10):
        file.range_(f"layers.{n}", n * 100, n * 100 + 50)


def run_on_and_launch(file: NsysFile) -> None:
    run_on(file)
    file.kernel(5001, 5002, launched=(930, 931))


def ends_elsewhere(file: NsysFile) -> None:
    file.range_("layers.1", 200, 300, style=START_END)
    file.rows["NVTX_EVENTS"][-1]["endGlobalTid"] = thread(9)
    file.kernel(500, 501, launched=(250, 251))
    file.kernel(510, 512, launched=(260, 261), tid=9)


def another_programs(file: NsysFile) -> None:
    file.range_("theirs", 0, 100, pid=2, domain="other", style=START_END)  # id 1 there, as ours is here
    file.rows["NVTX_EVENTS"][-1]["endGlobalTid"] = thread(9, 2)


@pytest.mark.parametrize(
    ("write", "more", "warning"),
    [
        (built_outside, {("layers.0", "forward"): 20}, "built outside the collected window"),
        (traced_whole, {}, "--cuda-graph-trace=node"),
        (without_launch, {("(none)", "other"): 1_500_000}, "so 1.500 ms of their time have no layer"),
        (run_on, {}, "9 of 10 ranges of layers begin after the last CUDA launch"),
        (run_on_and_launch, {("layers.9", "forward"): 1}, ""),
        (ends_elsewhere, {("layers.1", "forward"): 1, ("(none)", "other"): 2}, "1 ranges ended on another thread than"),
        (another_programs, {}, ""),
    ],
)
def test_what_a_capture_lacks_is_said(write, more, warning, file):
    file.range_("layers.0", 0, 100)
    file.kernel(50, 60, launched=(10, 11))
    write(file)
    result = table(file)
    assert sums(result) == {("layers.0", "forward"): 10, **more}
    assert sum(warning in one for one in result.warnings) == bool(warning)


def test_steps_that_run_on_after_the_last_launch_are_said_by_every_verb(file):
    for number in range(4):
        file.range_(f"step {number}", number * 100, number * 100 + 90, category="step", payload=number)
    file.kernel(50, 60, launched=(10, 11))
    capture, text = nvprof_kit.open(file.write()), "3 of 4 ranges of steps begin after the last CUDA launch"
    for answer in (capture.layers(), capture.breakdown(), capture.summary(), capture):
        assert any(warning.startswith(text) for warning in answer.warnings)


def test_time_outside_steps_is_said(file):
    """A capture that began in a step lacks its range, and those of the layers that were open."""
    file.kernel(500, 501, launched=(10, 11))
    file.range_("layers.7", 100, 150)
    file.kernel(510, 512, launched=(110, 111))
    file.range_("step 4", 200, 400, category="step", payload=4)
    file.kernel(520, 524, launched=(260, 261))
    file.range_("step 5", 600, 700, category="step", payload=5)
    capture = nvprof_kit.open(file.write())
    left_out = [warning for warning in capture.layers().warnings if "outside steps" in warning]
    assert left_out == ["42.9 % of the time is outside steps and left out; --steps all includes it"]
    assert not any("no length" in warning for warning in capture.layers(steps="5").warnings)


def test_correlation_ids_begin_anew_in_a_second_window_and_in_another_process(file):
    """Loading a module copies its constants: that it launches is not in the call's name, but in its id."""
    for number in (0, 1):
        file.range_(f"layers.{number}", 10_000 * number, 10_000 * number + 200)
        at = 10_000 * number + 110
        file.kernel(at + 900, at + 901 + number, launched=(at, at + 1), correlation=77)
    file.range_("layers.2", 0, 200, pid=2)
    file.call("cuModuleLoadData", 150, 151, pid=2, correlation=77)
    file.kernel(300, 330, pid=2, correlation=77, table="MEMCPY")
    assert sums(table(file)) == {(f"layers.{number}", "forward"): ns for number, ns in enumerate((1, 2, 30))}


@pytest.mark.parametrize("release", ["2023.4", "2024.2"])
def test_replayed_layers_agree_with_eager_ones(release):
    """But for attention, which adds a mask in the graph. Small layers vary by some percent, all together by one."""
    eager, replayed = (nvprof_kit.open(DATA / f"{name}-{release}.sqlite.xz").layers() for name in ("eager", "graph"))
    keys = ["layer", "phase"]
    both = eager.rows.merge(replayed.rows, on=keys, suffixes=("", "_replayed")).query(
        "gpu_ops > 0 and layer != '(none)'"
    )
    same = both[~both["layer"].str.endswith(("model", ".self_attn"))]
    steps, replays = eager.summary.steps, replayed.summary.steps
    assert len(same) > 35 and (same["gpu_ops"] / steps == same["gpu_ops_replayed"] / replays).all()
    times, replay_times = same["gpu_self_ns"] / steps, same["gpu_self_ns_replayed"] / replays
    assert ((replay_times - times).abs() <= (0.1 * times).clip(lower=1500)).all()
    assert replay_times.sum() == pytest.approx(times.sum(), rel=0.01)
