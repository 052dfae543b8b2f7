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
        evidence = "the driver is loaded, but nvidia-smi is missing or finds no GPU"
        why = "it is unknown whether a GPU can be used, and which one"
        fix = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility, and --gpus all (recipes/nsys/container.sh)"
        yield checked("warning", "gpu", evidence, why, fix)
        return
    if not machine.gpus:
        why = "without a GPU a capture has no kernels"
        fix = "run on a machine with a GPU; in a container start it with --gpus all (recipes/nsys/container.sh)"
        yield checked("error", "gpu", "nvidia-smi finds no GPU", why, fix)
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    driver = f"driver {machine.gpus[0].driver}" + (f", CUDA {machine.driver_cuda}" if machine.driver_cuda else "")
    yield checked("ok", "gpu", f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}: {names}, {driver}")
    if any(gpu.mig for gpu in machine.gpus):
        why = "GPU metrics show the whole GPU, and ncu can neither lock clocks nor measure units shared by instances"
        fix = "measure on a GPU without MIG if that matters"
        yield checked("note", "mig", "a GPU is partitioned (MIG)", why, fix)


def check_counters(machine: Machine) -> Iterator[Finding]:
    """Whether hardware counters may be read."""
    if machine.counters_for_admin is None:
        return
    if not machine.counters_for_admin or machine.capabilities & _CAP_SYS_ADMIN:
        yield checked("ok", "counters", "hardware counters are accessible")
        return
    access = "run as root, or allow access for all users"
    if machine.container:
        access = "start the container with --cap-add=SYS_ADMIN (recipes/nsys/container.sh), or allow access on the host"
    evidence = "hardware counters are restricted to administrators (RmProfilingAdminOnly: 1)"
    why = "ncu and --gpu-metrics-devices fail with ERR_NVGPUCTRPERM; times per layer do not need them"
    fix = (
        f"{access}: echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > "
        "/etc/modprobe.d/nvidia-profiling.conf, rebuild the initramfs (update-initramfs -u, or dracut -f) and reboot"
    )
    yield checked("warning", "counters", evidence, why, fix)


def check_samples(machine: Machine) -> Iterator[Finding]:
    """Whether the CPU may be sampled."""
    level = machine.perf_event_paranoid
    if level is None or level <= 2 or machine.capabilities & (_CAP_SYS_ADMIN | _CAP_PERFMON):
        return
    why = "nsys cannot sample the CPU above 2; the recipes do not ask it to"
    fix = "sysctl -w kernel.perf_event_paranoid=2"
    yield checked("note", "cpu-samples", f"kernel.perf_event_paranoid is {level}", why, fix)


def check_other_profilers(machine: Machine) -> Iterator[Finding]:
    """Other profilers that hold the GPU or are attached to every program."""
    if machine.processes:
        why = "DCGM's profiling metrics hold the hardware counters, so ncu and GPU metrics fail while it runs"
        fix = "run dcgmi profile --pause, and dcgmi profile --resume afterward"
        yield checked("warning", "other-profilers", f"running: {', '.join(machine.processes)}", why, fix)
    attached = [name for name in machine.environment if "INJECTION" in name]
    if attached:
        evidence = f"set in this environment: {', '.join(sorted(attached))}"
        why = "another profiler attaches to every program started from here, and CUDA serves one at a time"
        fix = f"unset {' '.join(sorted(attached))}"
        yield checked("warning", "other-profilers", evidence, why, fix)
    if machine.environment.get("NVPROF_KIT", "").strip().lower() == "off":
        why = "no ranges are emitted, so no layer has a time"
        fix = "unset NVPROF_KIT"
        yield checked("warning", "ranges", "NVPROF_KIT=off", why, fix)


def check_clocks(machine: Machine) -> Iterator[Finding]:
    """Whether the GPU's clock is reduced."""
    slow = [gpu for gpu in machine.gpus if gpu.clock and gpu.max_clock and gpu.clock < 0.5 * gpu.max_clock]
    if slow:
        evidence = f"the SM clock is at {slow[0].clock} of {slow[0].max_clock} MHz"
        why = (
            "an idle GPU clocks down and takes some steps to clock up, so the first steps are slower; under load it "
            "would mean power or thermal throttling"
        )
        fix = (
            "skip warm-up steps: nvprof-kit profile --step 12; for comparisons lock the clocks: nvidia-smi "
            "--lock-gpu-clocks"
        )
        yield checked("note", "clocks", evidence, why, fix)


def check_container(machine: Machine) -> Iterator[Finding]:
    """What a container may lack."""
    if machine.container and not machine.capabilities & _CAP_SYS_ADMIN:
        unsure = "cpu-samples" if machine.counters_for_admin is not None else "hardware counters and CPU samples"
        evidence = f"in a container ({machine.container}) without CAP_SYS_ADMIN"
        why = f"kernels and ranges are recorded as usual; {unsure} may be refused"
        fix = "start it as recipes/nsys/container.sh does"
        yield checked("note", "container", evidence, why, fix)


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Free disk for the report and for nsys's temporary data."""
    for folder, free in machine.free_bytes.items():
        if free < _GIGABYTE:
            why = "a report grows by a few MB per step, and is lost if the disk fills up"
            fix = "free some space, or use another folder: -o for the report, TMPDIR for nsys's temporary data"
            severity = "error" if free < _GIGABYTE / 10 else "warning"
            yield checked(severity, "disk", f"{free / 1e6:.0f} MB free in {folder}", why, fix)


# ---------------------------------------------------------------- nsys and ncu against the driver


def check_nsys(machine: Machine) -> Iterator[Finding]:
    """Whether nsys is there, and as new as the driver."""
    if machine.nsys is None:
        named = machine.environment.get("NSYS")
        evidence = f"NSYS={named} cannot be run" if named else "no nsys on PATH"
        why = "the recipes in recipes/nsys need it"
        fix = (
            "set NSYS to an executable nsys, or unset it and put nsys on PATH"
            if named
            else "install Nsight Systems and put its bin folder on PATH, or set NSYS; without it: nvprof-kit record"
        )
        yield checked("error", "nsys", evidence, why, fix)
        return
    yield from _beside_driver("nsys", machine.nsys, machine)


def check_ncu(machine: Machine) -> Iterator[Finding]:
    """Whether ncu is there, as new as the driver, and may lock its file."""
    if machine.ncu is None:
        named = machine.environment.get("NCU")
        evidence = f"NCU={named} cannot be run" if named else "no ncu on PATH"
        why = "hardware counters of each kernel need ncu; times per layer do not"
        fix = "install Nsight Compute and put it on PATH"
        yield checked("note", "ncu", evidence, why, fix)
        return
    yield from _beside_driver("ncu", machine.ncu, machine)
    if machine.foreign_lock:
        why = "ncu locks this file while it measures, and fails if it cannot"
        fix = "use a folder of your own: export TMPDIR=$HOME/tmp; mkdir -p $TMPDIR"
        yield checked("warning", "ncu", f"{machine.foreign_lock} belongs to another user", why, fix)


def _beside_driver(tool: str, version: str, machine: Machine) -> Iterator[Finding]:
    """A tool older than the driver may not support it."""
    driver = machine.driver_cuda or (cuda_of_driver(machine.gpus[0].driver) if machine.gpus else None)
    cuda = cuda_of(tool, version)
    if driver is None or is_newest(tool, version) or (cuda and numbers(cuda) >= numbers(driver)):
        yield checked("ok", tool, f"{tool} {version}")
        return
    release = release_for(tool, driver)
    why, meanwhile = known_trouble(tool, version, driver) or ("", "")
    evidence = f"{tool} {version}{f' (of CUDA {cuda})' if cuda else ''} is older than the driver (CUDA {driver})"
    why = "it may not know this GPU or some calls, and drop kernels or refuse to run" + (f"; {why}" if why else "")
    fix = (
        f"install {f'{tool} {release}, which is that' if release else f'the {tool}'} of CUDA {driver}, or a newer one"
        + (f"; {meanwhile}" if meanwhile else "")
    )
    yield checked("warning", tool, evidence, why, fix)


CHECKS = (
    *(check_gpu, check_nsys, check_ncu, check_counters, check_samples),
    *(check_other_profilers, check_clocks, check_container, check_disk),
)
"""What is checked of a machine, whatever the program."""


def check_program(program: Program, machine: Machine) -> Iterator[Finding]:
    """The program to profile: its words, its Python with torch and nvtx, and its script."""
    for word in program.missing:
        why = "the program would not start here"
        fix = "run this where the program will run, from its folder; a capture's name ends in .sqlite or .nsys-rep"
        severity = "warning" if word.endswith(".py") else "error"
        yield checked(severity, "program", f"'{word}' is not found, or cannot be run", why, fix)
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
        why = "CUDA serves one profiler at a time: with both, one of them gets no kernels"
        fix = "turn it off while nsys or ncu runs"
        yield checked("warning", "other-profilers", "the program uses PyTorch's own profiler", why, fix)


def _check_python(name: str, versions: Mapping[str, str | None], machine: Machine) -> Iterator[Finding]:
    torch, cuda, nvtx = (versions.get(package) for package in ("torch", "cuda", "nvtx"))
    if not versions.get("nvprof-kit"):
        why, fix = "without it the program emits no ranges", f"{name} -m pip install nvprof-kit"
        yield checked("warning", "program", f"{name} has no nvprof-kit", why, fix)
    if versions.get("broken"):
        evidence = f"torch cannot be imported: {versions['broken']}"
        yield checked("error", "torch", evidence, "the program would not run", "reinstall torch")
    elif torch and cuda is None and machine.gpus:
        why = "the program runs on the CPU, and the capture has no kernels"
        fix = f"{name} -m pip install torch --index-url https://download.pytorch.org/whl/cu126 (or your CUDA's)"
        yield checked("error", "torch", f"torch {torch} is a build without CUDA", why, fix)
    elif torch and cuda and machine.driver_cuda and numbers(cuda)[:1] > numbers(machine.driver_cuda)[:1]:
        evidence = f"torch {torch} needs CUDA {cuda}, the driver supports {machine.driver_cuda}"
        fix = "update the driver, or install a torch build for an older CUDA"
        yield checked("error", "torch", evidence, "it will find no GPU", fix)
    elif torch:
        yield checked("ok", "torch", f"torch {torch}" + (f" for CUDA {cuda}" if cuda else ""))
    if nvtx and machine.nsys and numbers(nvtx) >= (0, 2, 12) and numbers(machine.nsys)[:2] <= (2024, 2):
        why = "nvprof-kit's own ranges are still recorded; those that other packages make with nvtx are not"
        fix = "update nsys, or: pip install nvtx==0.2.11"
        yield checked("note", "nvtx", f"nvtx {nvtx} does not detect nsys {machine.nsys}", why, fix)
