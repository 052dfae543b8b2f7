"""Which part of a program ``nvprof-kit record`` records, and that its trace survives the program's end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import execute

from nvprof_kit._capture.recorder.launch import PythonCommand, parse_python, record_program, runner_argv
from nvprof_kit._capture.recorder.launchers import ACCELERATE, TORCHRUN, Launch, parse_launch
from nvprof_kit._capture.recorder.record import RecordOptions
from nvprof_kit._capture.recorder.signals import waiting_signals
from nvprof_kit.errors import ToolError, UsageError

ROOT = Path(__file__).parents[4]

LOOP = """
import os, sys, time, torch
import nvprof_kit
model = torch.nn.Linear(4, 4)
nvprof_kit.annotate_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
nvprof_kit.annotate_optimizer(optimizer)
for number in range(6):
    model(torch.ones(2, 4)).sum().backward()
    with nvprof_kit.phase(f"after {number}"):
        optimizer.step()
"""

STEPS = """
import torch
import nvprof_kit
for number in range(6):
    with nvprof_kit.step(number):
        torch.ones(2) + 1
"""


def recorded(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nvprof_kit", "record", "-o", "run.json", *options, "--"]
    return execute(*command, sys.executable, "-c", program, cwd=folder)


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("nvprof-kit")]


def ours(trace: Path, kind: str) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if e.get("name", "").startswith(f"nvprof_kit:{kind}")})


@pytest.mark.slow
def test_a_schedule_counts_an_optimizers_steps(tmp_path: Path) -> None:
    done = recorded(tmp_path, LOOP, "--schedule", "2:4")
    assert (done.returncode, told(done)) == (
        0,
        ["nvprof-kit record: wrote run.json, steps 2 to 3; next: nvprof-kit layers run.json"],
    )
    assert ours(tmp_path / "run.json", "phase:after") == ["nvprof_kit:phase:after 2", "nvprof_kit:phase:after 3"]


def test_a_schedule_counts_the_steps_of_the_program_up_to_its_last(tmp_path: Path) -> None:
    done = recorded(tmp_path, STEPS, "--schedule", "5:6")
    assert done.stderr.splitlines() == told(done)  # none of the lines that Kineto logs
    assert (done.returncode, len(told(done))) == (0, 1)
    assert ours(tmp_path / "run.json", "step") == ["nvprof_kit:step:step 5"]


@pytest.mark.slow
@pytest.mark.parametrize(("work", "leaves", "status"), [("", "", 1), ("", "sys.exit(4)", 4), ("torch.ones(2)", "", 0)])
def test_a_recording_with_nothing_in_it_is_a_failure(tmp_path: Path, work: str, leaves: str, status: int) -> None:
    child = "import subprocess\nsubprocess.run([sys.executable, '-c', 'import torch; torch.ones(2)'], check=True)\n"
    done = recorded(tmp_path, f"import sys, torch\n{work or child}\n{leaves}\n")
    assert done.returncode == status, done.stderr
    assert (tmp_path / "run.json").exists() == bool(work)
    assert any("this process ran nothing of PyTorch" in line for line in told(done)) == (status == 1)


@pytest.mark.slow
def test_a_trace_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("mine")
    done = recorded(tmp_path, STEPS)
    assert (done.returncode, told(done)[0]) == (
        2,
        f"nvprof-kit: {tmp_path}/run.json exists; choose another name with -o, or replace it with --force",
    )
    assert (tmp_path / "run.json").read_text() == "mine"
    assert recorded(tmp_path, STEPS, "--force").returncode == 0
    assert len(ours(tmp_path / "run.json", "step")) == 6


GROWS = """
import torch
import nvprof_kit
kept = []
for number in range(9):
    with nvprof_kit.step(number):
        kept.append(torch.ones(1_000_000))  # 4 MB
"""


@pytest.mark.slow
def test_a_limit_ends_the_recording_and_not_the_program(tmp_path: Path) -> None:
    done = recorded(tmp_path, GROWS + "print('done')", "--max-memory", "10")
    assert done.stdout == "done\n"
    ended, wrote = told(done)
    assert ended.startswith("nvprof-kit record: the recording ended after ")
    assert "--max-memory sets the limit" in ended and wrote.startswith("nvprof-kit record: wrote run.json")
    assert "nvprof_kit:step:step 1" in (steps := ours(tmp_path / "run.json", "step")) and len(steps) < 9


@pytest.mark.slow
def test_a_limit_of_time_ends_a_program_without_steps(tmp_path: Path) -> None:
    program = "import time, torch\nfor _ in range(150): torch.ones(2) + 1; time.sleep(0.01)\nprint('done')"
    done = recorded(tmp_path, program, "--limit", "0.3")
    assert done.stdout == "done\n"
    assert told(done)[0] == "nvprof-kit record: the recording ended after 0.3 s, as --limit says; the program continues"
    names = [event.get("name") for event in json.loads((tmp_path / "run.json").read_text())["traceEvents"]]
    assert 0 < names.count("aten::ones") < 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(4)", 4),
        ("os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(5)'])", 5),
        ("os.kill(os.getpid(), 1)", -1),
    ],
)
def test_a_program_that_leaves_at_once_leaves_its_trace(end: str, status: int, tmp_path: Path) -> None:
    done = recorded(tmp_path, f"{STEPS}\nimport os, sys\n{end}")
    assert done.returncode == status
    assert len(ours(tmp_path / "run.json", "step")) == 6


def test_signals_wait_while_a_trace_is_written() -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), waiting_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("line", "launcher", "options", "program"),
    [
        ("-m torch.distributed.run --nproc-per-node 2 t.py --lr 3", TORCHRUN, "--nproc-per-node 2", "-u t.py --lr 3"),
        ("-m torch.distributed.run --standalone -m a.b -m c", TORCHRUN, "--standalone", "-u -m a.b -m c"),
        ("-m accelerate.commands.launch --cpu t.py -f", ACCELERATE, "--cpu", "-u t.py -f"),
    ],
)
def test_what_a_launcher_starts(line: str, launcher: object, options: str, program: str) -> None:
    if launcher is ACCELERATE:
        pytest.importorskip("accelerate")
    python = sys.executable
    found = parse_launch([python, *line.split()])
    assert found == Launch(python, launcher, tuple(options.split()), (python, *program.split()))  # type: ignore[arg-type]
    assert found.command(["x"])[-2:] == [found.launcher.without_python, "x"]


@pytest.mark.slow
def test_each_rank_of_a_launcher_leaves_a_trace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    done = execute(sys.executable, "-m", "nvprof_kit", "record", "--", *launch, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == ["run.rank0.json.gz", "run.rank1.json.gz"]


def test_launchers_that_cannot_be_recorded_are_refused() -> None:
    assert parse_launch(["python", "train.py", "torchrun"]) is None
    with pytest.raises(UsageError, match=r"deepspeed starts the ranks itself"):
        parse_launch(["deepspeed", "train.py"])
    with pytest.raises(UsageError, match=r"torch.distributed.run: unrecognized arguments: --nonsense"):
        parse_launch([sys.executable, "-m", "torch.distributed.run", "--nonsense", "train.py"])


@pytest.mark.parametrize(
    ("line", "interpreter", "target", "arguments"),
    [
        ("python train.py", "python", "train.py", ""),
        ("python3.11 -u train.py --lr 3 -m x", "python3.11 -u", "train.py", "--lr 3 -m x"),
        ("/a/b/python3 -m pkg.train -o y", "/a/b/python3", "-m pkg.train", "-o y"),
        ("python -X dev -W ignore -um pkg -- z", "python -X dev -W ignore -u", "-m pkg", "-- z"),
        ("python -Xdev -OO -mpkg a", "python -X dev -OO", "-m pkg", "a"),
        ("python -c code a b", "python", "-c code", "a b"),
        ("python --check-hash-based-pycs never t.py", "python --check-hash-based-pycs never", "t.py", ""),
        ("python3.14t t.py", "python3.14t", "t.py", ""),
    ],
)
def test_parse_python(line: str, interpreter: str, target: str, arguments: str) -> None:
    parts = (tuple(part.split()) for part in (interpreter, target, arguments))
    assert parse_python(line.split()) == PythonCommand(*parts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no program to record"),
        ("torchrun train.py", "torchrun is not a Python interpreter"),
        ("./train.py", "./train.py is not a Python interpreter"),
        ("python", "`python` names no program"),
        ("python -u", "`python -u` names no program"),
        ("python -", "`python -` names no program"),
    ],
)
def test_what_cannot_be_recorded(line: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_python(line.split())
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_runner_argv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    argv = runner_argv(
        Path("r.json"), RecordOptions(shapes=True), parse_python(["python", "-u", "train.py", "--lr", "3"])
    )
    settings = argv.pop(4)
    assert argv == ["python", "-u", "-m", "nvprof_kit._capture.recorder.runner", "train.py", "--lr", "3"]
    assert json.loads(settings) == {
        "path": f"{tmp_path}/r.json",
        "stacks": False,
        "shapes": True,
        "memory": False,
        "limits": {"schedule": "", "seconds": 0, "memory_mb": 500},
    }


@pytest.fixture
def script(tmp_path: Path) -> str:
    (path := tmp_path / "train.py").write_text("")
    return str(path)


def interpreter(tmp_path: Path, body: str) -> str:
    """An executable named like an interpreter."""
    (path := tmp_path / "python3").write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def refusal(*command: str, path: str = "run.json") -> tuple[str, int]:
    with pytest.raises((UsageError, ToolError)) as refused:
        record_program(Path(path), RecordOptions(), command)
    return str(refused.value), refused.value.exit_code


def test_an_interpreter_without_torch(script: str, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo torch >&2; exit 1")
    assert refusal(python, script) == (f"{python} has no torch; {python} -m pip install torch", 3)


def test_a_trace_that_cannot_be_written_is_found_out_before(script: str, tmp_path: Path) -> None:
    message, code = refusal(sys.executable, script, path=f"{tmp_path}/no/run.json")
    assert (message, code) == (f"{tmp_path}/no/run.json: no directory {tmp_path}/no; make it first", 2)
    assert "name it .json or .json.gz" in refusal(sys.executable, script, path="run.sqlite")[0]


def test_a_missing_interpreter(script: str) -> None:
    assert refusal("python9.99", script) == ("python9.99: no such interpreter on PATH", 3)
