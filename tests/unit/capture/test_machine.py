"""The doctor before a run: facts of a machine in, findings out; and how the facts are read."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nvprof_kit._capture.doctor import examine_machine
from nvprof_kit._capture.machine import Gpu, Machine, Program, read_machine

H200 = Gpu("NVIDIA H200", "580.65.06", "9.0", mig=False, clock=1980, max_clock=1980)
WELL = Machine(
    nsys="2025.3.2",
    ncu="2025.3.1",
    driver_cuda="13.0",
    gpus=(H200, H200),
    perf_event_paranoid=2,
    counters_for_admin=False,
    free_bytes={"/data": 10**12},
)
GOOD_PYTHON = {"torch": "2.11.0", "cuda": "13.0", "nvtx": "0.2.15", "nvprof-kit": "0.1.0", "python": "3.12"}
ADMIN = 1 << 21


def found(machine: Machine) -> dict[str, str]:
    """What is not well, by check."""
    return {finding.title: finding.severity for finding in examine_machine(machine) if finding.severity != "ok"}


def test_all_is_well():
    assert found(WELL) == {}
    assert found(replace(WELL, program=Program("python", GOOD_PYTHON, "train()"))) == {}


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"gpus": (), "driver_cuda": None, "counters_for_admin": None}, "GPU", "error"),
        ({"gpus": (), "driver_cuda": None}, "GPU", "warning"),
        ({"gpus": (replace(H200, mig=True),)}, "MIG", "note"),
        ({"nsys": None}, "nsys", "error"),
        ({"nsys": "2023.4.4"}, "nsys", "warning"),
        ({"nsys": "2021.3.1"}, "nsys", "warning"),
        ({"ncu": None}, "ncu", "note"),
        ({"ncu": "2024.1.1"}, "ncu", "warning"),
        ({"foreign_lock": "/tmp/nsight-compute-lock"}, "ncu", "warning"),
        ({"counters_for_admin": True}, "counters", "warning"),
        ({"perf_event_paranoid": 4}, "CPU samples", "note"),
        ({"processes": ("nv-hostengine",)}, "other profilers", "warning"),
        ({"environment": {"CUDA_INJECTION64_PATH": "/x.so"}}, "other profilers", "warning"),
        ({"environment": {"NVPROF_KIT": "off"}}, "ranges", "warning"),
        ({"gpus": (replace(H200, clock=345),)}, "clocks", "note"),
        ({"container": "docker"}, "container", "note"),
        ({"free_bytes": {"/data": 5 * 10**8}}, "disk", "warning"),
        ({"free_bytes": {"/data": 10**7}}, "disk", "error"),
    ],
)
def test_a_finding_has_a_reason_and_a_remedy(change, check, level):
    machine = replace(WELL, **change)
    assert found(machine) == {check: level}
    assert all(finding.why and finding.fix for finding in examine_machine(machine) if finding.severity != "ok")


@pytest.mark.parametrize(
    ("python", "source", "check", "level"),
    [
        (GOOD_PYTHON | {"cuda": None}, "", "torch", "error"),
        (GOOD_PYTHON | {"cuda": "14.1"}, "", "torch", "error"),
        (GOOD_PYTHON | {"broken": "ImportError: libcudart.so.12"}, "", "torch", "error"),
        (GOOD_PYTHON | {"nvprof-kit": None}, "", "program", "warning"),
        (None, "", "program", "error"),
        (GOOD_PYTHON, "from torch.profiler import profile", "other profilers", "warning"),
    ],
)
def test_the_program(python, source, check, level):
    assert found(replace(WELL, program=Program("python", python, source))) == {check: level}


def test_nvtx_that_takes_an_old_nsys_for_absent():
    python = GOOD_PYTHON | {"cuda": "12.4"}
    machine = replace(WELL, nsys="2024.2.3", driver_cuda="12.5", program=Program("python", python))
    assert found(machine) == {"nvtx": "note"}
    older = replace(machine, program=Program("python", python | {"nvtx": "0.2.11"}))
    assert found(older) == {}


def test_permission_is_a_matter_of_capabilities():
    assert found(replace(WELL, counters_for_admin=True, perf_event_paranoid=4, capabilities=ADMIN)) == {}


OLD = "of a whole run it then loses nearly all kernels"


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        ({"counters_for_admin": True}, "counters", "NVreg_RestrictProfilingToAdminUsers=0"),
        ({"counters_for_admin": True, "container": "docker"}, "counters", "--cap-add=SYS_ADMIN"),
        ({"perf_event_paranoid": 4}, "CPU samples", "sysctl -w kernel.perf_event_paranoid=2"),
        ({"nsys": "2024.2.3"}, "nsys", "install nsys 2025.3, which is that of CUDA 13.0"),
        # the driver says no CUDA, as in a container without its library: the branch 580 came with CUDA 13.0
        ({"nsys": "2024.2.3", "driver_cuda": None}, "nsys", "install nsys 2025.3"),
        # a driver newer than the table
        ({"driver_cuda": "14.1"}, "ncu", "install the ncu of CUDA 14.1, or a newer one"),
        ({"nsys": None, "environment": {"NSYS": "/nowhere/nsys"}}, "nsys", "NSYS=/nowhere/nsys cannot be run"),
        ({"nsys": "2023.4.4"}, "nsys", OLD),
        ({"nsys": "2023.4.4"}, "nsys", "nvprof-kit profile --step N"),
        ({"nsys": "2024.2.3"}, "nsys", f"not {OLD}"),
        ({"nsys": "2022.4.2", "driver_cuda": "12.4"}, "nsys", f"not {OLD}"),
        ({"gpus": (), "driver_cuda": None}, "GPU", "NVIDIA_DRIVER_CAPABILITIES"),
        ({"container": "podman"}, "container", "not counters"),  # open to everyone, as another finding says
        ({"container": "podman", "counters_for_admin": None}, "container", "hardware counters"),
    ],
)
def test_what_is_said_of_a_machine(change, check, said):
    (finding,) = (one for one in examine_machine(replace(WELL, **change)) if one.title == check)
    text = f"{finding.evidence} {finding.why} {finding.fix}"
    assert said.removeprefix("not ") not in text if said.startswith("not ") else said in text


SMI = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |"
ROWS = "NVIDIA H200, 580.65.06, 9.0, Disabled, 345, 1980\nNVIDIA H200, 580.65.06, 9.0, Enabled, [N/A], 1980\n"


def fake_run(command: Sequence[str]) -> str | None:
    match list(command):
        case ["nvidia-smi"]:
            return SMI
        case ["nvidia-smi", *_]:
            return ROWS
        case [_, "--version"] if command[0] == "nsys":
            return "NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0\n"
        case [_, "--version"]:
            return "NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 1)\n"
        case ["python3", "-c", _]:
            return json.dumps(GOOD_PYTHON)
    return None


def test_reading_a_machine(tmp_path):
    for name, text in {
        "proc/sys/kernel/perf_event_paranoid": "4\n",
        "proc/driver/nvidia/params": "RmLogonRC: 1\nRmProfilingAdminOnly: 1\n",
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000200000\n",
        "proc/77/comm": "nv-hostengine\n",
        ".dockerenv": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = tmp_path / "train.py"
    script.write_text("import torch")
    command = ["env", "torchrun", "--no-python", "python3", str(script)]
    environ = {"NVPROF_KIT": "on", "SECRET": "x", "TMPDIR": str(tmp_path)}
    machine = read_machine(command, root=tmp_path, run=fake_run, environ=environ)
    assert (machine.nsys, machine.ncu, machine.driver_cuda) == ("2023.4.4.54", "2025.3.1.0", "13.0")
    assert machine.gpus == (
        Gpu("NVIDIA H200", "580.65.06", "9.0", False, 345, 1980),
        Gpu("NVIDIA H200", "580.65.06", "9.0", True, None, 1980),
    )
    assert (machine.perf_event_paranoid, machine.counters_for_admin, machine.capabilities) == (4, True, ADMIN)
    assert (machine.container, machine.processes) == ("docker", ("nv-hostengine",))
    assert machine.environment == {"NVPROF_KIT": "on"} and str(tmp_path) in machine.free_bytes
    assert machine.program == Program("python3", GOOD_PYTHON, "import torch")


def test_a_lock_of_another_user(tmp_path, monkeypatch):
    def lock() -> str:
        return read_machine(root=tmp_path, run=fake_run, environ={"TMPDIR": str(tmp_path)}).foreign_lock

    assert lock() == ""
    (tmp_path / "nsight-compute-lock").touch()
    assert lock() == ""
    monkeypatch.setattr("os.access", lambda *_: False)
    assert lock() == str(tmp_path / "nsight-compute-lock")


def test_a_machine_without_anything(tmp_path):
    machine = read_machine(["./serve"], root=tmp_path, run=lambda _: None, environ={})
    assert machine == Machine(free_bytes=machine.free_bytes, program=Program(missing=("./serve",)))
    assert found(machine)["program"] == "error"
    assert found(machine)["GPU"] == found(machine)["nsys"] == "error"


@pytest.mark.slow
def test_the_probe_runs_in_a_real_python():
    import sys

    program = read_machine([sys.executable, "-m", "train"]).program
    assert program is not None and program.versions is not None
    assert program.versions["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
