"""The per-layer table of tiny captures, with its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import SCHEMAS, NsysFile

import nvprof_kit


def table(file: NsysFile, *, by_step: bool = False, **opening: Any) -> nvprof_kit.Layers:
    return nvprof_kit.open(file.write(), **opening).layers(steps="all", by="step" if by_step else None)


def numbers(result: nvprof_kit.Layers, *columns: str) -> dict[tuple[Any, ...], Any]:
    """Chosen columns by the row's key."""
    keys = [name for name in ("step", "layer", "phase") if name in result.rows]
    rows = result.rows.astype(object).where(result.rows.notna(), None).to_dict("records")
    return {
        tuple(row[key] for key in keys): tuple(row[c] for c in columns) if len(columns) > 1 else row[columns[0]]
        for row in rows
    }


@pytest.fixture(params=SCHEMAS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> NsysFile:
    return NsysFile(tmp_path / "capture.sqlite", request.param)


def test_self_total_busy_and_cpu(file: NsysFile) -> None:
    file.range_("layers.0", 100, 200)
    file.range_("layers.0.mlp", 140, 180)
    file.kernel(300, 310, launched=(110, 115))  # 10 ns of layers.0 itself
    file.kernel(310, 330, launched=(150, 155))  # 20 ns of the mlp
    file.kernel(320, 350, launched=(160, 165), stream=8)  # 30 ns of the mlp, 10 of them beside the kernel before
    file.kernel(400, 440, launched=(250, 255))  # 40 ns of nobody
    result = table(file)
    assert numbers(result, "calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns") == {
        ("layers.0", "forward"): (1, 1, 10, 60, 50, 100),  # total 10+20+30, busy 300..350
        ("layers.0.mlp", "forward"): (1, 2, 50, 50, 40, 40),  # busy 310..350
        ("(none)", "other"): (0, 1, 40, 40, 40, 0),
    }
    assert numbers(result, "share") == {
        ("layers.0", "forward"): 0.1,
        ("layers.0.mlp", "forward"): 0.5,
        ("(none)", "other"): 0.4,
    }
    assert result.summary.total_ns == 100
    assert result.summary.layer_ns == 60
    assert result.summary.by_how == {"launch": 60, "none": 40}


def test_the_phase_stands_in_the_category_or_else_in_the_text(file: NsysFile) -> None:
    file.range_("layers.0 backward", 0, 10, category="backward")
    file.range_("layers.1", 10, 20, category="backward")  # a capture whose text lacks the suffix
    file.range_("layers.2 backward", 20, 30, category=None)  # one without categories
    file.range_("optimizer", 30, 40, category=None)
    for n, start in enumerate((1, 11, 21, 31)):
        file.kernel(100 + n, 101 + n, launched=(start, start + 1))
    assert numbers(table(file), "gpu_self_ns") == {
        ("layers.0", "backward"): 1,
        ("layers.1", "backward"): 1,
        ("layers.2", "backward"): 1,
        ("(none)", "optimizer"): 1,
    }


def test_a_layer_has_a_row_for_each_phase_that_only_layers_inside_it_ran_in(file: NsysFile) -> None:
    """A checkpointed model: its blocks run again, the model does not. ``model.layers`` is a prefix, not a module."""
    for step, start in enumerate((0, 1000)):
        file.range_(f"step {step}", start, start + 1000, category="step", payload=step)
        file.range_("model", start, start + 100)
        file.range_("model backward", start + 100, start + 300, category="backward")
        for block in (0, 1):
            file.range_(f"model.layers.{block}", start + 10 + 20 * block, start + 20 + 20 * block)
            file.kernel(start + 400 + block, start + 401 + block, launched=(start + 11 + 20 * block,) * 2)
            if step:  # 4 and 8 ns, 2 of them beside each other
                name = f"model.layers.{block} recompute"
                file.range_(name, start + 110, start + 120, category="recompute", tid=block)
                begin = start + 500 + 2 * block
                file.kernel(begin, begin + (8 if block else 4), launched=(start + 111,) * 2, tid=block, stream=block)
    columns = "calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns"
    found = numbers(table(file), *columns)
    assert list(found) == [
        ("model", "forward"),
        ("model", "backward"),
        ("model", "recompute"),
        *((f"model.layers.{block}", phase) for block in (0, 1) for phase in ("forward", "recompute")),
    ]
    assert found["model", "recompute"] == (0, 0, 0, 12, 10, 0)
    assert found["model", "forward"] == (2, 0, 0, 4, 4, 200)
    by_step = numbers(table(file, by_step=True), *columns)
    assert by_step[1, "model", "recompute"] == (0, 0, 0, 12, 10, 0)
    assert (0, "model", "recompute") not in by_step


def test_a_graph_replay_is_no_call_of_a_layer_that_only_layers_inside_it_ran_in(file: NsysFile) -> None:
    file.range_("layers.0", 0, 100)
    file.range_("layers.0.mlp recompute", 200, 300, category="recompute")
    file.graph_node(1, 210)
    launch = file.call("cudaGraphLaunch_v10000", 1010, 1020)
    file.kernel(1100, 1110, correlation=launch, node=1)
    assert numbers(table(file), "calls", "gpu_self_ns", "gpu_total_ns") == {
        ("layers.0", "forward"): (1, 0, 0),
        ("layers.0", "recompute"): (0, 0, 10),
        ("layers.0.mlp", "recompute"): (2, 10, 10),  # its capture and a replay
    }


def test_a_graph_replay_belongs_to_the_layers_it_was_captured_in_and_the_step_that_launched_it(file: NsysFile) -> None:
    file.range_("layers.0", 0, 100)
    file.range_("layers.0.mlp", 50, 90)
    file.graph_node(1, 10)  # captured in layers.0
    file.graph_node(2, 60)  # captured in its mlp
    file.graph_node(11, 200)  # the executable nodes, listed twice as nsys does
    file.graph_node(11, 201, original=1)
    file.graph_node(12, 202, original=2)
    for step, start in enumerate((1000, 2000)):
        file.range_(f"step {step}", start, start + 500, category="step", payload=step)
        launch = file.call("cudaGraphLaunch_v10000", start + 10, start + 20)
        file.kernel(start + 100, start + 110, correlation=launch, node=11)
        file.kernel(start + 110, start + 140, correlation=launch, node=12)
    columns = ("calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns")
    result = table(file, by_step=True)
    assert numbers(result, *columns) == {
        (0, "layers.0", "forward"): (1, 1, 10, 40),
        (0, "layers.0.mlp", "forward"): (1, 1, 30, 30),
        (1, "layers.0", "forward"): (1, 1, 10, 40),
        (1, "layers.0.mlp", "forward"): (1, 1, 30, 30),
        (None, "layers.0", "forward"): (1, 0, 0, 0),  # the capture itself ran nothing
        (None, "layers.0.mlp", "forward"): (1, 0, 0, 0),
    }
    assert result.summary.by_how == {"graph node": 80}
    assert numbers(table(file), *columns)["layers.0", "forward"] == (3, 2, 20, 80)


def test_a_graph_built_outside_the_window_belongs_to_its_launch_and_is_warned_of(file: NsysFile) -> None:
    file.range_("layers.0", 0, 100)
    launch = file.call("cudaGraphLaunch_v10000", 10, 20)
    file.kernel(100, 110, correlation=launch, node=11)
    result = table(file)
    assert numbers(result, "gpu_self_ns") == {("layers.0", "forward"): 10}
    assert any("built outside the collected window" in warning for warning in result.warnings)


def test_whole_graph_tracing_names_the_flag_to_use(file: NsysFile) -> None:
    file.range_("layers.0", 0, 100)
    file.kernel(50, 60, launched=(10, 11))
    file.call("cudaGraphLaunch_v10000", 200, 210)  # its kernels are not in the capture
    assert any("--cuda-graph-trace=node" in warning for warning in table(file).warnings)


def test_operations_without_a_launching_call_are_kept_and_warned_of(file: NsysFile) -> None:
    file.range_("layers.0", 0, 100)
    file.kernel(50, 60, launched=(10, 11))
    file.kernel(60, 1_500_060, correlation=5)
    result = table(file)
    assert numbers(result, "gpu_self_ns") == {("layers.0", "forward"): 10, ("(none)", "other"): 1_500_000}
    (warning,) = (one for one in result.warnings if "calls that are not in the capture" in one)
    assert warning.startswith("1 of 2 operations were launched by")
    assert "so 1.500 ms of their time have no layer" in warning


def test_one_domain_under_different_ids_in_two_processes(file: NsysFile) -> None:
    file.range_(
        "noise", 0, 100, domain="other", pid=2, category=None
    )  # so that ours has id 2 there, and id 1 is theirs
    file.range_("layers.0", 0, 100, pid=1)
    file.range_("layers.0", 0, 100, pid=2)
    for pid in (1, 2):
        file.kernel(200, 210, launched=(30, 31), pid=pid)
    assert numbers(table(file), "calls", "gpu_self_ns") == {("layers.0", "forward"): (2, 20)}


def test_the_models_order_even_where_the_window_begins_in_the_middle(file: NsysFile) -> None:
    names = ["model", "model.embed", "model.layers.9", "model.layers.10", "model.norm"]
    for start in (0, 1000):
        file.range_("model", start, start + 500)
        for n, name in enumerate(names[1:], 1):
            file.range_(name, start + n * 100, start + n * 100 + 50)
    file.rows["NVTX_EVENTS"] = [
        row for row in file.rows["NVTX_EVENTS"] if not 0 <= int(str(row["start"])) < 250
    ]  # seen first: layers.10
    file.kernel(5000, 5001, launched=(1001, 1002))
    tree = table(file).tree
    assert [name for name in tree["layer"] if name.startswith("model.layers")] == ["model.layers.9", "model.layers.10"]
    assert tree["layer"][0] == "model"
    assert tree["depth"].tolist()[:2] == [0, 1]


def test_layers_that_run_on_after_the_last_launch_tell_of_lost_ones(file: NsysFile) -> None:
    for n in range(10):
        file.range_(f"layers.{n}", n * 100, n * 100 + 50)
    file.kernel(5000, 5001, launched=(10, 11))
    assert any(
        warning.startswith("9 of 10 ranges of layers begin after the last CUDA launch")
        for warning in table(file).warnings
    )
    file.kernel(5001, 5002, launched=(930, 931))
    assert not table(file).warnings
