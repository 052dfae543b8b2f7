"""Checks for problems that make a profile on this machine fail or mislead. Pure functions: facts in, findings out.

`doctor.toml` has what a finding says, by case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from nvprof_kit._capture.machine import Machine, Program
from nvprof_kit._capture.nsight_releases import cuda_of, cuda_of_driver, is_newest, known_trouble, numbers, release_for
from nvprof_kit._findings import Finding, by_severity, checked, of_case

_CAP_SYS_ADMIN, _CAP_PERFMON = 1 << 21, 1 << 38
_GIGABYTE = 10**9


case = partial(of_case, "nvprof_kit._capture", "doctor.toml")
"""The finding of a case of `doctor.toml`, with its facts, of another severity if one is given."""


def examine_machine(machine: Machine) -> tuple[Finding, ...]:
    """All findings, most severe first."""
    findings = [finding for check in CHECKS for finding in check(machine)]
    if machine.program is not None:
        findings += check_program(machine.program, machine)
    return by_severity(findings)


def check_gpu(machine: Machine) -> Iterator[Finding]:
    """The GPUs, and whether one is partitioned."""
    if not machine.gpus:
        yield case("no GPU" if machine.counters_for_admin is None else "GPU unknown")
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    driver = f"driver {machine.gpus[0].driver}" + (f", CUDA {machine.driver_cuda}" if machine.driver_cuda else "")
    yield checked("ok", "gpu", f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}: {names}, {driver}")
    if any(gpu.mig for gpu in machine.gpus):
        yield case("MIG")


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
    yield case("counters restricted", access=access)


def check_samples(machine: Machine) -> Iterator[Finding]:
    """Whether the CPU may be sampled."""
    level = machine.perf_event_paranoid
    if level is not None and level > 2 and not machine.capabilities & (_CAP_SYS_ADMIN | _CAP_PERFMON):
        yield case("CPU not sampled", level=level)


def check_other_profilers(machine: Machine) -> Iterator[Finding]:
    """Other profilers that hold the GPU or are attached to every program."""
    if machine.processes:
        yield case("profiler runs", processes=", ".join(machine.processes))
    if attached := sorted(name for name in machine.environment if "INJECTION" in name):
        yield case("profiler attached", variables=", ".join(attached), words=" ".join(attached))
    if machine.environment.get("NVPROF_KIT", "").strip().lower() == "off":
        yield case("ranges off")


def check_clocks(machine: Machine) -> Iterator[Finding]:
    """Whether the GPU's clock is reduced."""
    if slow := [gpu for gpu in machine.gpus if gpu.clock and gpu.max_clock and gpu.clock < 0.5 * gpu.max_clock]:
        yield case("clock reduced", gpu=slow[0])


def check_container(machine: Machine) -> Iterator[Finding]:
    """What a container may lack."""
    if machine.container and not machine.capabilities & _CAP_SYS_ADMIN:
        unsure = "cpu-samples" if machine.counters_for_admin is not None else "hardware counters and CPU samples"
        yield case("container", container=machine.container, unsure=unsure)


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Free disk for the report and for nsys's temporary data."""
    for folder, free in machine.free_bytes.items():
        if free < _GIGABYTE:
            yield case("disk", "error" if free < _GIGABYTE / 10 else "warning", folder=folder, megabytes=free / 1e6)


# ---------------------------------------------------------------- nsys and ncu against the driver


def check_nsys(machine: Machine) -> Iterator[Finding]:
    """Whether nsys is there, and as new as the driver."""
    named = machine.environment.get("NSYS")
    if machine.nsys is None:
        yield case("nsys does not run" if named else "no nsys", named=named)
    else:
        yield _beside_driver("nsys", machine.nsys, machine)


def check_ncu(machine: Machine) -> Iterator[Finding]:
    """Whether ncu is there, as new as the driver, and may lock its file."""
    named = machine.environment.get("NCU")
    if machine.ncu is None:
        yield case("no ncu", what=f"NCU={named} cannot be run" if named else "no ncu on PATH")
        return
    yield _beside_driver("ncu", machine.ncu, machine)
    if machine.foreign_lock:
        yield case("lock of ncu", lock=machine.foreign_lock)


def _beside_driver(tool: str, version: str, machine: Machine) -> Finding:
    """A tool older than the driver may not support it."""
    driver = machine.driver_cuda or (cuda_of_driver(machine.gpus[0].driver) if machine.gpus else None)
    cuda = cuda_of(tool, version)
    if driver is None or is_newest(tool, version) or (cuda and numbers(cuda) >= numbers(driver)):
        return checked("ok", tool, f"{tool} {version}")
    release = release_for(tool, driver)
    why, meanwhile = known_trouble(tool, version, driver) or ("", "")
    evidence = f"{tool} {version}{f' (of CUDA {cuda})' if cuda else ''} is older than the driver (CUDA {driver})"
    why = "it may not know this GPU or some calls, and drop kernels or refuse to run" + (f"; {why}" if why else "")
    fix = (
        f"install {f'{tool} {release}, which is that' if release else f'the {tool}'} of CUDA {driver}, or a newer one"
        + (f"; {meanwhile}" if meanwhile else "")
    )
    return checked("warning", tool, evidence, why, fix)


CHECKS = (
    *(check_gpu, check_nsys, check_ncu, check_counters, check_samples),
    *(check_other_profilers, check_clocks, check_container, check_disk),
)
"""What is checked of a machine, whatever the program."""


def check_program(program: Program, machine: Machine) -> Iterator[Finding]:
    """The program to profile: its words, its Python with torch and nvtx, and its script."""
    for word in program.missing:
        yield case("word missing", "warning" if word.endswith(".py") else "error", word=word)
    name, versions = program.interpreter, program.versions
    if name is not None and versions is not None:
        yield from _check_python(name, versions, machine)
    elif name is not None:
        yield case("Python does not start", name=name)
    elif not program.missing:
        yield case("no Python")
    if re.search(r"torch\.profiler|autograd\.profiler|nvprof_kit\.record\(", program.source):
        yield case("profiler in program")


def _check_python(name: str, versions: Mapping[str, str | None], machine: Machine) -> Iterator[Finding]:
    torch, cuda, nvtx = (versions.get(package) for package in ("torch", "cuda", "nvtx"))
    if not versions.get("nvprof-kit"):
        yield case("no nvprof-kit", name=name)
    if versions.get("broken"):
        yield case("torch broken", error=versions["broken"])
    elif torch and cuda is None and machine.gpus:
        yield case("torch without CUDA", torch=torch, name=name)
    elif torch and cuda and machine.driver_cuda and numbers(cuda)[:1] > numbers(machine.driver_cuda)[:1]:
        yield case("torch too new", torch=torch, cuda=cuda, driver=machine.driver_cuda)
    elif torch:
        yield checked("ok", "torch", f"torch {torch}" + (f" for CUDA {cuda}" if cuda else ""))
    if nvtx and machine.nsys and numbers(nvtx) >= (0, 2, 12) and numbers(machine.nsys)[:2] <= (2024, 2):
        yield case("nsys too old for nvtx", nvtx=nvtx, nsys=machine.nsys)
