"""Stacks for viewers of flame graphs: by the wire, and by ``go tool pprof`` where there is one."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.captures.nsys_file import NsysFile
from support.protobuf import fields, varints

import nvprof_kit
from nvprof_kit._analysis.stacks import frames

DATA = Path(__file__).parents[3] / "data"
Sample = tuple[tuple[str, ...], tuple[int, ...], dict[str, str]]


def samples(packed: bytes) -> list[Sample]:
    """Stack from its root, values and labels of each sample."""
    profile = fields(gzip.decompress(packed))
    strings = [one.decode() for one in profile[6]]
    assert strings[0] == "" and len(set(strings)) == len(strings)
    assert [tuple(strings[fields(one)[key][0]] for key in (1, 2)) for one in profile[1]] == [
        ("gpu_time", "nanoseconds"),
        ("gpu_ops", "count"),
    ]
    functions = {fields(one)[1][0]: strings[fields(one)[2][0]] for one in profile[5]}
    places = {fields(one)[1][0]: functions[fields(fields(one)[4][0])[1][0]] for one in profile[4]}
    found = []
    for one in map(fields, profile[2]):
        labels = [tuple(strings[fields(label)[key][0]] for key in (1, 2)) for label in one[3]]
        stack = tuple(places[place] for place in varints(one[1][0]))[::-1]
        found.append((stack, tuple(varints(one[2][0])), dict(labels)))
    return found


@pytest.fixture
def capture(tmp_path: Path) -> nvprof_kit.Capture:
    file = NsysFile(tmp_path / "run.sqlite")
    for number in (0, 1):
        at = 1000 * number
        file.range_(f"step {number}", at, at + 900, category="step", payload=number)
        file.range_("model.layers.0.mlp", at + 10, at + 40)
        file.kernel(at + 100, at + 300, launched=(at + 14, at + 18), name="gemm<a; b>")
        file.kernel(at + 300, at + 310, launched=(at + 20, at + 21), name="gemm<a; b>")
        file.kernel(at + 600, at + 620, launched=(at + 70, at + 75), table="MEMCPY", memory=(0, 2), size=400)
    return nvprof_kit.open(file.write())


MLP = ("model", "layers", "layers.0", "mlp", "forward", "gemm<a; b>")


def test_stacks_values_and_labels(capture: nvprof_kit.Capture) -> None:
    # the kernel: 200 + 10 in each of two steps; the copy: 20 in each
    (kernel, copy) = samples(capture.pprof().data)
    assert kernel == (MLP, (420, 4), {"layer": "model.layers.0.mlp", "phase": "forward", "class": "gemm"})
    assert copy[0][0] == "(none)" and copy[0][2] == "memcpy HtoD" and copy[1] == (40, 2) and copy[2]["class"] == "copy"


def test_a_period_is_given(capture: nvprof_kit.Capture) -> None:
    """Pyroscope opens no file without one ("PeriodType is nil"): each unit of the values is one nanosecond."""
    profile = fields(gzip.decompress(capture.pprof().data))
    strings = [one.decode() for one in profile[6]]
    kind = fields(profile[11][0])
    assert [strings[kind[key][0]] for key in (1, 2)] == ["gpu_time", "nanoseconds"] and profile[12] == [1]


def test_names_are_one_line(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("two\nlines\x1b[31m", 0, 50)
    file.kernel(100, 300, launched=(14, 18), name='k"\n\t"')
    ((stack, _, labels),) = samples(nvprof_kit.open(file.write()).pprof().data)
    assert labels["layer"] == "two lines\ufffd[31m" and "\n" not in "".join(stack)


def test_one_step(capture: nvprof_kit.Capture) -> None:
    assert [values for _, values, _ in samples(capture.pprof(step=1).data)] == [(210, 2), (20, 1)]
    with pytest.raises(nvprof_kit.UsageError, match="no step 5"):
        capture.pprof(step=5)


def test_some_steps(capture: nvprof_kit.Capture) -> None:
    later = nvprof_kit.StepOptions(skip=1)
    assert [values for _, values, _ in samples(capture.pprof(steps=later).data)] == [(210, 2), (20, 1)]
    with pytest.raises(nvprof_kit.UsageError, match=r"one step \(--step\) and several"):
        capture.pprof(step=1, steps=later)
    with pytest.raises(nvprof_kit.UsageError, match="none of the requested steps"):
        capture.perfetto(steps=nvprof_kit.StepOptions(first=7))


def test_folded_lines(capture: nvprof_kit.Capture, tmp_path: Path) -> None:
    lines = capture.export(tmp_path / "run.folded").read_text().splitlines()
    assert lines[0] == "model;layers;layers.0;mlp;forward;gemm<a: b> 420"
    assert lines[1].startswith("(none);") and lines[1].endswith(" 40") and len(lines) == 2


@pytest.mark.parametrize(
    ("layer", "stack"),
    [
        ("(none)", ("(none)",)),
        ("h", ("h",)),
        ("0.1", ("0", "0.1")),  # a Sequential in a Sequential
        ("blocks.0.norms.0", ("blocks", "blocks.0", "norms", "norms.0")),
    ],
)
def test_frames(layer: str, stack: tuple[str, ...]) -> None:
    assert frames(layer, "forward", "k") == (*stack, "forward", "k")


@pytest.mark.parametrize("name", ["graph-2023.4", "checkpoint-2023.4"])
def test_real_captures_add_up(name: str) -> None:
    capture = nvprof_kit.open(DATA / f"{name}.sqlite.xz")
    rows = capture.layers().to_frame()
    found: dict[tuple[str, str], list[int]] = {}
    for _, (ns, ops), labels in samples(capture.pprof().data):
        sums = found.setdefault((labels["layer"], labels["phase"]), [0, 0])
        sums[0], sums[1] = sums[0] + ns, sums[1] + ops
    own = rows[rows["gpu_ops"] > 0]
    assert found == {(row.layer, row.phase): [row.gpu_self_ns, row.gpu_ops] for row in own.itertuples()}


def test_go_tool_pprof_reads_it(tmp_path: Path) -> None:
    go = shutil.which("go") or pytest.skip("no go on PATH (apt-get install golang-go)")
    capture = nvprof_kit.open(DATA / "graph-2023.4.sqlite.xz")
    path = capture.export(tmp_path / "run.pb.gz")
    rows = capture.layers().to_frame()
    asked = [go, "tool", "pprof", "-top", "-cum", "-nodecount=100000", "-nodefraction=0", "-unit=nanoseconds"]
    for index, column in (("gpu_time", "gpu_self_ns"), ("gpu_ops", "gpu_ops")):
        ran = subprocess.run([*asked, f"-sample_index={index}", path], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "File: graph-2023.4.sqlite.xz" in ran.stdout
        sums = {line.split(None, 5)[5]: re.match(r"\d+", line.split()[3])[0] for line in ran.stdout.splitlines()[1:]
                if re.match(r"\s*\d+(ns)?\s+[\d.]+%", line)}  # fmt: skip
        backward = rows.loc[rows["phase"] == "backward", column].sum()
        assert int(sums["backward"]) == backward > 0
