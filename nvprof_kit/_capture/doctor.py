"""Checks for problems that make a profile on this machine fail or mislead. Pure functions: facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from nvprof_kit._capture.machine import Machine, Program
from nvprof_kit._capture.nsight_releases import cuda_of, cuda_of_driver, is_newest, known_trouble, numbers, release_for
from nvprof_kit._findings import Finding, by_severity, checked

_CAP_SYS_ADMIN, _CAP_PERFMON = 1 << 21, 1 << 38
_GIGABYTE = 10**9


def examine_machine(machine: Machine) -> tuple[Finding, ...]:
    """All findings, most severe first."""
    findings = [finding for check in CHECKS for finding in check(machine)]
    if machine.program is not None:
        findings += check_program(machine.program, machine)
    return by_severity(findings)


def check_gpu(machine: Machine) -> Iterator[Finding]:
    """The GPUs, and whether one is partitioned."""
    if not machine.gpus and machine.counters_for_admin is not None:
        yield checked(
            "warning",
            "gpu",
            "the driver is loaded, but nvidia-smi is missing or finds no GPU",
            "it is unknown whether a GPU can be used, and which one",
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility, and --gpus all (recipes/nsys/container.sh)",
        )
        return
    if not machine.gpus:
        yield checked(
            "error",
            "gpu",
            "nvidia-smi finds no GPU",
            "without a GPU a capture has no kernels",
            "run on a machine with a GPU; in a container start it with --gpus all (recipes/nsys/container.sh)",
        )
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    driver = f"driver {machine.gpus[0].driver}" + (f", CUDA {machine.driver_cuda}" if machine.driver_cuda else "")
    yield checked("ok", "gpu", f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}: {names}, {driver}")
    if any(gpu.mig for gpu in machine.gpus):
        yield checked(
            "note",
            "mig",
            "a GPU is partitioned (MIG)",
            "GPU metrics show the whole GPU, and ncu can neither lock clocks nor measure units shared by instances",
            "measure on a GPU without MIG if that matters",
        )


def check_counters(machine: Machine) -> Iterator[Finding]:
    """Whether hardware counters may be read."""
    if machine.counters_for_admin is None:
        return
    if not machine.counters_for_admin or machine.capabilities & _CAP_SYS_ADMIN:
        yield checked("ok", "counters", "hardware counters are accessible")
        return
    if machine.container:
        fix = "start the container with --cap-add=SYS_ADMIN (recipes/nsys/container.sh), or allow access on the host: "
    else:
        fix = "run as root, or allow access for all users: "
    yield checked(
        "warning",
        "counters",
        "hardware counters are restricted to administrators (RmProfilingAdminOnly: 1)",
        "ncu and --gpu-metrics-devices fail with ERR_NVGPUCTRPERM; times per layer do not need them",
        f"{fix}echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-profiling.conf, "
        "rebuild the initramfs (update-initramfs -u, or dracut -f) and reboot",
    )


def check_samples(machine: Machine) -> Iterator[Finding]:
    """Whether the CPU may be sampled."""
    level = machine.perf_event_paranoid
    if level is None or level <= 2 or machine.capabilities & (_CAP_SYS_ADMIN | _CAP_PERFMON):
        return
    yield checked(
        "note",
        "cpu-samples",
        f"kernel.perf_event_paranoid is {level}",
        "nsys cannot sample the CPU above 2; the recipes do not ask it to",
        "sysctl -w kernel.perf_event_paranoid=2",
    )


def check_other_profilers(machine: Machine) -> Iterator[Finding]:
    """Other profilers that hold the GPU or are attached to every program."""
    if machine.processes:
        yield checked(
            "warning",
            "other-profilers",
            f"running: {', '.join(machine.processes)}",
            "DCGM's profiling metrics hold the hardware counters, so ncu and GPU metrics fail while it runs",
            "run dcgmi profile --pause, and dcgmi profile --resume afterward",
        )
    attached = [name for name in machine.environment if "INJECTION" in name]
    if attached:
        yield checked(
            "warning",
            "other-profilers",
            f"set in this environment: {', '.join(sorted(attached))}",
            "another profiler attaches to every program started from here, and CUDA serves one at a time",
            f"unset {' '.join(sorted(attached))}",
        )
    if machine.environment.get("NVPROF_KIT", "").strip().lower() == "off":
        yield checked(
            "warning", "ranges", "NVPROF_KIT=off", "no ranges are emitted, so no layer has a time", "unset NVPROF_KIT"
        )


def check_clocks(machine: Machine) -> Iterator[Finding]:
    """Whether the GPU's clock is reduced."""
    slow = [gpu for gpu in machine.gpus if gpu.clock and gpu.max_clock and gpu.clock < 0.5 * gpu.max_clock]
    if slow:
        yield checked(
            "note",
            "clocks",
            f"the SM clock is at {slow[0].clock} of {slow[0].max_clock} MHz",
            "an idle GPU clocks down and takes some steps to clock up, so the first steps are slower; under load it "
            "would mean power or thermal throttling",
            "skip warm-up steps: nvprof-kit profile --step 12; for comparisons lock the clocks: nvidia-smi "
            "--lock-gpu-clocks",
        )


def check_container(machine: Machine) -> Iterator[Finding]:
    """What a container may lack."""
    if machine.container and not machine.capabilities & _CAP_SYS_ADMIN:
        unsure = "cpu-samples" if machine.counters_for_admin is not None else "hardware counters and CPU samples"
        yield checked(
            "note",
            "container",
            f"in a container ({machine.container}) without CAP_SYS_ADMIN",
            f"kernels and ranges are recorded as usual; {unsure} may be refused",
            "start it as recipes/nsys/container.sh does",
        )


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Free disk for the report and for nsys's temporary data."""
    for folder, free in machine.free_bytes.items():
        if free < _GIGABYTE:
            yield checked(
                "error" if free < _GIGABYTE / 10 else "warning",
                "disk",
                f"{free / 1e6:.0f} MB free in {folder}",
                "a report grows by a few MB per step, and is lost if the disk fills up",
                "free some space, or use another folder: -o for the report, TMPDIR for nsys's temporary data",
            )


# ---------------------------------------------------------------- nsys and ncu against the driver


def check_nsys(machine: Machine) -> Iterator[Finding]:
    """Whether nsys is there, and as new as the driver."""
    if machine.nsys is None:
        named = machine.environment.get("NSYS")
        yield checked(
            "error",
            "nsys",
            f"NSYS={named} cannot be run" if named else "no nsys on PATH",
            "the recipes in recipes/nsys need it",
            "set NSYS to an executable nsys, or unset it and put nsys on PATH"
            if named
            else "install Nsight Systems and put its bin folder on PATH, or set NSYS; without it: nvprof-kit record",
        )
        return
    yield from _beside_driver("nsys", machine.nsys, machine)


def check_ncu(machine: Machine) -> Iterator[Finding]:
    """Whether ncu is there, as new as the driver, and may lock its file."""
    if machine.ncu is None:
        named = machine.environment.get("NCU")
        yield checked(
            "note",
            "ncu",
            f"NCU={named} cannot be run" if named else "no ncu on PATH",
            "hardware counters of each kernel need ncu; times per layer do not",
            "install Nsight Compute and put it on PATH",
        )
        return
    yield from _beside_driver("ncu", machine.ncu, machine)
    if machine.foreign_lock:
        yield checked(
            "warning",
            "ncu",
            f"{machine.foreign_lock} belongs to another user",
            "ncu locks this file while it measures, and fails if it cannot",
            "use a folder of your own: export TMPDIR=$HOME/tmp; mkdir -p $TMPDIR",
        )


def _beside_driver(tool: str, version: str, machine: Machine) -> Iterator[Finding]:
    """A tool older than the driver may not support it."""
    driver = machine.driver_cuda or (cuda_of_driver(machine.gpus[0].driver) if machine.gpus else None)
    cuda = cuda_of(tool, version)
    if driver is None or is_newest(tool, version) or (cuda and numbers(cuda) >= numbers(driver)):
        yield checked("ok", tool, f"{tool} {version}")
        return
    release = release_for(tool, driver)
    why, meanwhile = known_trouble(tool, version, driver) or ("", "")
    yield checked(
        "warning",
        tool,
        f"{tool} {version}{f' (of CUDA {cuda})' if cuda else ''} is older than the driver (CUDA {driver})",
        "it may not know this GPU or some calls, and drop kernels or refuse to run" + (f"; {why}" if why else ""),
        f"install {f'{tool} {release}, which is that' if release else f'the {tool}'} of CUDA {driver}, or a newer one"
        + (f"; {meanwhile}" if meanwhile else ""),
    )


CHECKS = (
    *(check_gpu, check_nsys, check_ncu, check_counters, check_samples),
    *(check_other_profilers, check_clocks, check_container, check_disk),
)
"""What is checked of a machine, whatever the program."""


def check_program(program: Program, machine: Machine) -> Iterator[Finding]:
    """The program to profile: its words, its Python with torch and nvtx, and its script."""
    for word in program.missing:
        yield checked(
            "warning" if word.endswith(".py") else "error",
            "program",
            f"'{word}' is not found, or cannot be run",
            "the program would not start here",
            "run this where the program will run, from its folder; a capture's name ends in .sqlite or .nsys-rep",
        )
    name, versions = program.interpreter, program.versions
    if name is not None and versions is not None:
        yield from _check_python(name, versions, machine)
    elif name is not None:
        why, fix = "the program would not start either", f"run {name} --version to see why"
        yield checked("error", "program", f"{name} does not start", why, fix)
    elif not program.missing:
        why, fix = "its packages were not checked", "name it: nvprof-kit doctor -- python train.py"
        yield checked("note", "program", "the command names no Python", why, fix)
    if re.search(r"torch\.profiler|autograd\.profiler|nvprof_kit\.record\(", program.source):
        yield checked(
            "warning",
            "other-profilers",
            "the program uses PyTorch's own profiler",
            "CUDA serves one profiler at a time: with both, one of them gets no kernels",
            "turn it off while nsys or ncu runs",
        )


def _check_python(name: str, versions: Mapping[str, str | None], machine: Machine) -> Iterator[Finding]:
    torch, cuda, nvtx = (versions.get(package) for package in ("torch", "cuda", "nvtx"))
    if not versions.get("nvprof-kit"):
        why, fix = "without it the program emits no ranges", f"{name} -m pip install nvprof-kit"
        yield checked("warning", "program", f"{name} has no nvprof-kit", why, fix)
    if versions.get("broken"):
        evidence = f"torch cannot be imported: {versions['broken']}"
        yield checked("error", "torch", evidence, "the program would not run", "reinstall torch")
    elif torch and cuda is None and machine.gpus:
        yield checked(
            "error",
            "torch",
            f"torch {torch} is a build without CUDA",
            "the program runs on the CPU, and the capture has no kernels",
            f"{name} -m pip install torch --index-url https://download.pytorch.org/whl/cu126 (or your CUDA's)",
        )
    elif torch and cuda and machine.driver_cuda and numbers(cuda)[:1] > numbers(machine.driver_cuda)[:1]:
        evidence = f"torch {torch} needs CUDA {cuda}, the driver supports {machine.driver_cuda}"
        fix = "update the driver, or install a torch build for an older CUDA"
        yield checked("error", "torch", evidence, "it will find no GPU", fix)
    elif torch:
        yield checked("ok", "torch", f"torch {torch}" + (f" for CUDA {cuda}" if cuda else ""))
    if nvtx and machine.nsys and numbers(nvtx) >= (0, 2, 12) and numbers(machine.nsys)[:2] <= (2024, 2):
        yield checked(
            "note",
            "nvtx",
            f"nvtx {nvtx} does not detect nsys {machine.nsys}",
            "nvprof-kit's own ranges are still recorded; those that other packages make with nvtx are not",
            "update nsys, or: pip install nvtx==0.2.11",
        )
