"""Facts about the machine, its tools and the program to profile, for `nvprof_kit._capture.doctor`.

Unknown facts are None or empty; nothing here raises or changes anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PATIENCE_S = 60
_GPU_FIELDS = ("name", "driver_version", "compute_cap", "mig.mode.current", "clocks.sm", "clocks.max.sm")
PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
"""Names of Python's executables."""

_PROBE = """
import json, sys
from importlib import metadata, util
def version(name):
    if util.find_spec(name.replace("-", "_")) is None: return None
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return "of unknown version"
versions = {name: version(name) for name in ("torch", "nvtx", "nvprof-kit")}
versions["python"] = "%d.%d" % sys.version_info[:2]
if versions["torch"]:
    try:
        import torch
        versions["cuda"] = torch.version.cuda
    except Exception as error: versions["broken"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(versions))
"""

Run = Callable[[Sequence[str]], "str | None"]
"""Runs a command and returns its output; None if it is missing or failed."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as reported by nvidia-smi; clocks in MHz, None if unknown."""

    name: str
    driver: str
    compute: str
    mig: bool
    clock: int | None
    max_clock: int | None


@dataclass(frozen=True)
class Program:
    """The Python program to profile.

    Attributes:
        interpreter: Command of its Python; None if the command does not run Python.
        versions: Of ``torch``, ``nvtx``, ``nvprof-kit``, ``python``; ``cuda`` of the torch build; ``broken`` is
            the reason if torch cannot be imported. None if the interpreter does not start.
        source: Source of its script; empty if there is none or it cannot be read.
        missing: The program and the script, as in the command, if they do not exist.
    """

    interpreter: str | None = None
    versions: Mapping[str, str | None] | None = None
    source: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Facts of a machine.

    Attributes:
        nsys: Version of Nsight Systems, for example ``2023.4.4``; None if not installed.
        ncu: Version of Nsight Compute; None if not installed.
        driver_cuda: The newest CUDA version that the driver supports, for example ``12.4``.
        gpus: The GPUs.
        perf_event_paranoid: The Linux kernel's setting.
        counters_for_admin: Whether the driver restricts performance counters to administrators; None without a driver.
        capabilities: The process's effective capabilities as a bit set.
        container: The kind of container; empty outside of containers.
        environment: Environment variables relevant to profilers.
        processes: Names of running processes that may be using the GPU's profiling interface.
        free_bytes: Free disk space by folder, for reports and nsys's temporary files.
        foreign_lock: ncu's lock file if it belongs to another user; else empty.
        program: The program to profile; None if not given.
    """

    nsys: str | None = None
    ncu: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    perf_event_paranoid: int | None = None
    counters_for_admin: bool | None = None
    capabilities: int = 0
    container: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    foreign_lock: str = ""
    program: Program | None = None


def run_command(command: Sequence[str]) -> str | None:
    """The output of a command; None if it is missing, fails or hangs."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def read_machine(
    command: Sequence[str] = (),
    *,
    root: Path = Path("/"),
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
) -> Machine:
    """Collect all facts.

    Args:
        command: Command line of the program to profile; empty if none.
        root: The folder that contains ``proc``.
        run: Function that runs tools.
        environ: The environment.
    """
    cuda = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)", run(["nvidia-smi"]) or "")
    for_admin = re.search(r"RmProfilingAdminOnly:\s*(\d)", text_in(root / "proc/driver/nvidia/params"))
    capabilities = re.search(r"CapEff:\s*([0-9a-fA-F]+)", text_in(root / "proc/self/status"))
    control_group = re.search(r"kubepods|docker|containerd|lxc", text_in(root / "proc/1/cgroup"))
    marks = {"run/.containerenv": "podman", ".dockerenv": "docker", ".singularity.d": "apptainer"}
    containers = [name for mark, name in marks.items() if (root / mark).exists()]
    containers += [control_group[0]] if control_group else []
    processes = {text_in(path).strip() for path in root.glob("proc/[0-9]*/comm")}
    temporary = environ.get("TMPDIR", "/tmp")
    lock = Path(temporary) / "nsight-compute-lock"
    return Machine(
        nsys=_version(run([environ.get("NSYS") or "nsys", "--version"])),
        ncu=_version(run([environ.get("NCU", "ncu"), "--version"])),
        driver_cuda=cuda[1] if cuda else None,
        gpus=_gpus(run(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"])),
        perf_event_paranoid=_number(text_in(root / "proc/sys/kernel/perf_event_paranoid")),
        counters_for_admin=None if for_admin is None else for_admin[1] == "1",
        capabilities=int(capabilities[1], 16) if capabilities else 0,
        container=containers[0] if containers else "",
        environment={name: value for name, value in environ.items() if name.startswith(_OF_PROFILERS)},
        processes=tuple(sorted(name for name in processes if name.startswith(("nv-hostengine", "dcgm", "dynolog")))),
        free_bytes={path: shutil.disk_usage(path).free for path in (os.getcwd(), temporary) if os.path.isdir(path)},
        foreign_lock=str(lock) if lock.exists() and not os.access(lock, os.W_OK) else "",
        program=_program(command, run) if command else None,
    )


def text_in(path: Path) -> str:
    """The text of a file; '' if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    match = re.search(r"-?\d+", text)
    return int(match[0]) if match else None


def _version(text: str | None) -> str | None:
    match = re.search(r"\b(20\d\d\.\d+(?:\.\d+)*)", text or "")
    return match[1] if match else None


def _gpus(listing: str | None) -> tuple[Gpu, ...]:
    rows = [[cell.strip() for cell in line.split(",")] for line in (listing or "").splitlines()]
    return tuple(
        Gpu(name, driver, compute, mig == "Enabled", _number(clock), _number(max_clock))
        for name, driver, compute, mig, clock, max_clock in (row for row in rows if len(row) == len(_GPU_FIELDS))
    )


_OF_PROFILERS = ("NVTX_INJECTION", "CUDA_INJECTION", "NSYS", "NCU", "NVPROF_KIT")


def _program(command: Sequence[str], run: Run) -> Program:
    """The first Python in a command line, possibly after a launcher, and its script."""
    script = next((word for word in command if word.endswith(".py")), None)
    source = text_in(Path(script)) if script else ""
    executable = shutil.which(command[0])
    python = next((word for word in command if PYTHON.fullmatch(Path(word).name)), None)
    if python is None and executable is not None:  # that of a script on the PATH, such as torchrun
        first = text_in(Path(executable)).partition("\n")[0]
        interpreter = first[2:].split() if first.startswith("#!") else []
        python = next((word for word in interpreter if PYTHON.fullmatch(Path(word).name)), None)
    missing: tuple[str, ...] = () if executable else (command[0],)
    if script and script != command[0] and not Path(script).exists():
        missing += (script,)
    if python is None:
        return Program(source=source, missing=missing)
    try:
        packages = json.loads(run([python, "-c", _PROBE]) or "null")
    except ValueError:
        packages = None
    return Program(python, packages, source, missing)
