"""ranks profile: which ranks are profiled, under every launcher's environment, and a real torchrun and nsys."""

import os
import re
from pathlib import Path

import pytest
from support.cli import executable, torchrun
from support.nsys import read
from support.recipes import VERBS, dry_run, python, ranges

TRAIN = """
import os, pathlib, signal, sys, time
import nvprof_kit
rank, killed = int(os.environ["RANK"]), int(sys.argv[1])
for number in range(3):
    with nvprof_kit.step(number), nvprof_kit.layer_range(f"rank {rank}"):
        time.sleep(0.01)
pathlib.Path(f"done{rank}").touch()
while len(list(pathlib.Path().glob("done*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.05)
if killed >= 0:
    time.sleep(1)  # nsys takes the ranges over now and then
if rank == killed:
    os.kill(os.getpid(), signal.SIGKILL)
if killed >= 0:
    time.sleep(100)  # as in a collective; the launcher ends it
"""


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [("all", range(10)), ("0", [0]), ("0,3", [0, 3]), ("2-4", [2, 3, 4]), ("1-8:3", [1, 4, 7]), ("0,7-9:2", [0, 7, 9])],
)
def test_any_subset_of_ranks(ranks, chosen, tmp_path):
    def profiled(rank: int) -> bool:
        done = dry_run("ranks", "--ranks", ranks, "--", "true", cwd=tmp_path, RANK=str(rank), NSYS="nsys")
        assert done.returncode == 0, done.stderr
        return done.stdout.startswith("nsys profile")

    assert [rank for rank in range(10) if profiled(rank)] == list(chosen)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "LOCAL_RANK": "1"},  # torchrun, accelerate, deepspeed
        {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"},  # srun
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},  # mpirun of Open MPI
        {"PMI_RANK": "3", "MPI_LOCALRANKID": "1"},  # mpirun of MPICH and Intel MPI
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "RANK": "3", "LOCAL_RANK": "1"},  # torchrun below srun
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    ],
)
def test_every_launcher(variables, tmp_path):
    done = dry_run("ranks", "-r", "3", "--preset", "metrics", "--", "true", cwd=tmp_path, NSYS="nsys", **variables)
    assert re.search(r"--output=run-\S+-rank3-\d{8}-\d{6} true\n$", done.stdout), done.stdout + done.stderr
    assert "--gpu-metrics-devices=1 " in done.stdout


def three_ranks(tmp_path: Path, nsys: str, *argv: str, killed: int = -1) -> int:
    """Three ranks over gloo; gives torchrun's exit status."""
    command = ["--no-python", *VERBS["ranks"], *argv, "-x", "--trace=nvtx", "--", *python(TRAIN, tmp_path, str(killed))]
    done = torchrun(3, *command, cwd=tmp_path, check=False, NSYS=nsys)
    (tmp_path / "said").write_text(done.stdout + done.stderr)
    return done.returncode


def reports(tmp_path: Path) -> dict[int, list[str]]:
    """The layers in each rank's export."""
    found = {}
    for path in tmp_path.glob("run-*.sqlite"):
        rank = re.search(r"-rank(\d+)-\d{8}-\d{6}$", path.stem)
        assert rank and path.with_suffix(".nsys-rep").exists()
        found[int(rank[1])] = sorted(set(ranges(path)) - {"step 0", "step 1", "step 2"})
    return found


@pytest.mark.slow
@pytest.mark.nsys
@pytest.mark.parametrize(("chosen", "words"), [({0, 2}, ("-r", "0,2")), ({0, 1, 2}, ("-r", "all", "--step", "1"))])
def test_a_common_id_in_names_and_captures(chosen, words, nsys, tmp_path):
    pytest.importorskip("torch")
    assert three_ranks(tmp_path, nsys, *words) == 0, (tmp_path / "said").read_text()
    assert reports(tmp_path) == {rank: [f"rank {rank}"] for rank in chosen}
    ids = set()
    for path in tmp_path.glob("run-*.sqlite"):
        rank = int(path.stem.split("-rank")[1].split("-")[0])
        (mark,) = (event for event in read(path) if event.kind == 34)
        start, run_id = mark.text.split(" run ")
        assert (start, mark.payload) == (f"rank {rank} of 3", rank)
        assert path.name.startswith(f"run-{run_id}-{os.uname().nodename}-rank{rank}-")
        ids.add(run_id)
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "my/run"}, "run-my_run-"),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}, "run-x.restart1-"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "run-7.0-"),
        ({"NVPROF_KIT_RUN_ID": "ours", "SLURM_JOB_ID": "7"}, "run-ours-"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, "run-PID."),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, f"run-{os.uname().nodename}-"),
    ],
)
def test_where_the_id_comes_from(variables, name, tmp_path):
    done = dry_run("ranks", "--", "true", cwd=tmp_path, NSYS="nsys", RANK="0", **variables)
    assert f"--output={name.replace('PID', str(os.getppid()))}" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.nsys
def test_a_rank_that_is_killed(nsys, tmp_path):
    pytest.importorskip("torch")
    assert three_ranks(tmp_path, nsys, "--ranks", "all", killed=1) != 0
    assert reports(tmp_path) == {0: ["rank 0"], 1: ["rank 1"], 2: ["rank 2"]}, (tmp_path / "said").read_text()
    assert not list(tmp_path.glob(".run*.partial"))


@pytest.mark.parametrize(
    ("visible", "local", "device"),
    [
        ("", "1", "1"),
        ("4,5,6", "1", "5"),
        ("7", "3", "7"),
        (" 2, 3", "1", "3"),
        ("GPU-b", "0", "6"),
        ("GPU-x", "0", "GPU-x"),
    ],
)
def test_the_metrics_are_those_of_the_gpu_that_the_rank_sees(visible, local, device, tmp_path):
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho '5, GPU-aaaa'\necho '6, GPU-bbbb'\n")
    variables = {"RANK": "9", "LOCAL_RANK": local, "CUDA_VISIBLE_DEVICES": visible}
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = ("-r", "all", "-p", "metrics", "--", "true")
    done = dry_run("ranks", *words, cwd=tmp_path, NSYS="nsys", PATH=path, **variables)
    assert f"--gpu-metrics-devices={device} " in done.stdout, done.stdout + done.stderr
