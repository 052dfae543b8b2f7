"""Which part of a program ``nvprof-kit record`` records, and that its trace survives the program's end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import NVPROF_KIT, execute

from nvprof_kit._capture.recorder.record import waiting_signals

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
def test_a_schedule_counts_an_optimizers_steps(tmp_path):
    done = recorded(tmp_path, LOOP, "--schedule", "2:4")
    wrote = "nvprof-kit record: wrote run.json, steps 2 to 3; next: nvprof-kit layers run.json"
    assert (done.returncode, told(done)) == (0, [wrote])
    assert ours(tmp_path / "run.json", "phase:after") == ["nvprof_kit:phase:after 2", "nvprof_kit:phase:after 3"]


@pytest.mark.slow
def test_a_schedule_counts_the_steps_of_the_program_up_to_its_last(tmp_path):
    done = recorded(tmp_path, STEPS, "--schedule", "5:6")
    assert done.stderr.splitlines() == told(done)  # none of the lines that Kineto logs
    assert (done.returncode, len(told(done))) == (0, 1)
    assert ours(tmp_path / "run.json", "step") == ["nvprof_kit:step:step 5"]


@pytest.mark.slow
@pytest.mark.parametrize(("work", "leaves", "status"), [("", "", 1), ("", "sys.exit(4)", 4), ("torch.ones(2)", "", 0)])
def test_a_recording_with_nothing_in_it_is_a_failure(tmp_path, work, leaves, status):
    child = "import subprocess\nsubprocess.run([sys.executable, '-c', 'import torch; torch.ones(2)'], check=True)\n"
    done = recorded(tmp_path, f"import sys, torch\n{work or child}\n{leaves}\n")
    assert done.returncode == status, done.stderr
    assert (tmp_path / "run.json").exists() == bool(work)
    assert any("this process ran nothing of PyTorch" in line for line in told(done)) != bool(work)


@pytest.mark.slow
def test_a_trace_that_exists_is_replaced_only_by_force(tmp_path):
    (tmp_path / "run.json").write_text("mine")
    done = recorded(tmp_path, STEPS)
    refusal = f"nvprof-kit: {tmp_path}/run.json exists; choose another name with -o, or replace it with --force"
    assert (done.returncode, told(done)[0]) == (2, refusal)
    assert (tmp_path / "run.json").read_text() == "mine"
    assert recorded(tmp_path, "raise SystemExit(3)", "--force").returncode == 3  # and records nothing
    assert (tmp_path / "run.json").read_text() == "mine"
    assert recorded(tmp_path, STEPS, "--force").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
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
def test_a_limit_ends_the_recording_and_not_the_program(tmp_path):
    done = recorded(tmp_path, GROWS + "print('done')", "--max-memory", "10")
    assert done.stdout == "done\n"
    ended, wrote = told(done)
    assert ended.startswith("nvprof-kit record: the recording ended after ")
    assert "--max-memory sets the limit" in ended and wrote.startswith("nvprof-kit record: wrote run.json")
    assert "nvprof_kit:step:step 1" in (steps := ours(tmp_path / "run.json", "step")) and len(steps) < 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(status=4)", 4),
        ("os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(5)'])", 5),
        *((f"os.kill(os.getpid(), {number})", -number) for number in (1, 2, 15)),
    ],
)
def test_a_program_that_leaves_at_once_leaves_its_trace(end, status, tmp_path):
    done = recorded(tmp_path, f"{STEPS}\nimport os, sys\n{end}")
    assert done.returncode == status
    assert len(ours(tmp_path / "run.json", "step")) == 6


@pytest.mark.slow
def test_a_program_that_is_killed_is_not_recorded_and_its_status_is_kept(tmp_path):
    done = recorded(tmp_path, "import os, torch\nos.kill(os.getpid(), 9)")
    assert (done.returncode, told(done), [*tmp_path.iterdir()]) == (-9, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--schedule", "2:4")])
def test_processes_that_run_beside_each_other_leave_a_trace_each(options, tmp_path):
    meets = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    )
    (tmp_path / "program.py").write_text(f"{STEPS}\n{meets}")
    both = f"{sys.executable} program.py a b & {sys.executable} program.py b a & wait"
    done = execute(*NVPROF_KIT, "record", *options, "--", "sh", "-c", both, cwd=tmp_path)
    assert done.returncode == 0 and len([*tmp_path.glob("run*.json.gz")]) == 2, done.stderr


def test_signals_wait_while_a_trace_is_written():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has another
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
        signal.signal(signal.SIGINT, interrupt)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "accelerate_loop.py"],
        [
            "sh",
            "-c",
            f"for rank in 0 1; do PMI_RANK=$rank PMI_SIZE=2 {sys.executable} accelerate_loop.py deepspeed; done",
        ],
    ],
    ids=["torchrun", "as mpirun"],
)
def test_each_rank_of_a_launcher_leaves_a_trace(launch, tmp_path):
    (tmp_path / "accelerate_loop.py").write_text(STEPS)  # which is no launcher
    done = execute(*NVPROF_KIT, "record", "--", *launch, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == ["run.rank0.json.gz", "run.rank1.json.gz"]


@pytest.mark.parametrize(
    ("options", "command", "status", "message"),
    [
        ([], [], 2, "no program to record; needed: nvprof-kit record -- python train.py"),
        ([], ["python9.99", "train.py"], 127, "'python9.99' is not found, or is no program that can be run"),
        (["-o", "run.sqlite"], ["true"], 2, "{here}/run.sqlite: a recording is a Kineto trace; name it .json or"),
        (["--schedule", "soon"], ["true"], 2, "soon"),
        ([], ["true"], 1, "nothing was recorded, run.json.gz is not written"),
    ],
)
def test_what_is_not_recorded(options, command, status, message, tmp_path):
    done = execute(*NVPROF_KIT, "record", *options, "--", *command, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert message.format(here=tmp_path) in done.stderr
