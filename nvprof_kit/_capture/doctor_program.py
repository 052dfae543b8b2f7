"""Doctor checks of the program to profile: its Python, torch, nvtx and script. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nvprof_kit._capture.machine import Machine, Program
from nvprof_kit._capture.nsight_releases import numbers
from nvprof_kit._findings import Finding, checked


def examine_program(program: Program, machine: Machine) -> list[Finding]:
    """All findings about the program, in the order of the checks."""
    if program.missing and program.interpreter is None:
        return [*_missing(program)]
    return [*_missing(program), *_python(program, machine), *_source(program)]


def _missing(program: Program) -> Iterator[Finding]:
    for word in program.missing:
        yield checked(
            "warning" if word.endswith(".py") else "error",
            "program",
            f"'{word}' is not found, or cannot be run",
            "the program would not start here",
            "run this where the program will run, from its folder; a capture's name ends in .sqlite or .nsys-rep",
        )


def _python(program: Program, machine: Machine) -> Iterator[Finding]:
    if program.interpreter is None:
        yield checked(
            "note",
            "program",
            "the command names no Python",
            "its packages were not checked",
            "name it: nvprof-kit doctor -- python train.py",
        )
        return
    name, versions = program.interpreter, program.found
    if versions is None:
        yield checked(
            "error",
            "program",
            f"{name} does not start",
            "the program would not start either",
            f"run {name} --version to see why",
        )
        return
    if not versions.get("nvprof-kit"):
        yield checked(
            "warning",
            "program",
            f"{name} has no nvprof-kit",
            "without it the program emits no ranges",
            f"{name} -m pip install nvprof-kit",
        )
    if versions.get("broken"):
        yield checked(
            "error",
            "torch",
            f"torch cannot be imported: {versions['broken']}",
            "the program would not run",
            "reinstall torch",
        )
    elif versions.get("torch"):
        yield from _torch(name, versions["torch"] or "", versions.get("cuda"), machine)
    yield from _nvtx(versions.get("nvtx"), machine)


def _torch(name: str, version: str, cuda: str | None, machine: Machine) -> Iterator[Finding]:
    if cuda is None and machine.gpus:
        yield checked(
            "error",
            "torch",
            f"torch {version} is a build without CUDA",
            "the program runs on the CPU, and the capture has no kernels",
            f"{name} -m pip install torch --index-url https://download.pytorch.org/whl/cu126 (or your CUDA's)",
        )
    elif cuda and machine.driver_cuda and numbers(cuda)[:1] > numbers(machine.driver_cuda)[:1]:
        yield checked(
            "error",
            "torch",
            f"torch {version} needs CUDA {cuda}, the driver supports {machine.driver_cuda}",
            "it will find no GPU",
            "update the driver, or install a torch build for an older CUDA",
        )
    else:
        yield checked("ok", "torch", f"torch {version}" + (f" for CUDA {cuda}" if cuda else ""))


def _nvtx(version: str | None, machine: Machine) -> Iterator[Finding]:
    if version and machine.nsys and numbers(version) >= (0, 2, 12) and numbers(machine.nsys)[:2] <= (2024, 2):
        yield checked(
            "note",
            "nvtx",
            f"nvtx {version} does not detect nsys {machine.nsys}",
            "nvprof-kit's own ranges are still recorded; those that other packages make with nvtx are not",
            "update nsys, or: pip install nvtx==0.2.11",
        )


def _source(program: Program) -> Iterator[Finding]:
    source = program.source
    if re.search(r"torch\.profiler|autograd\.profiler|from torch\.profiler|nvprof_kit\.record\(", source):
        yield checked(
            "warning",
            "other-profilers",
            "the program uses PyTorch's own profiler",
            "CUDA serves one profiler at a time: with both, one of them gets no kernels",
            "turn it off while nsys or ncu runs",
        )
    forks = re.search(r"num_workers\s*=\s*[1-9]|set_start_method\(.fork|os\.fork\(|import multiprocessing", source)
    if forks and not re.search(r"spawn|forkserver", source):
        yield checked(
            "note",
            "fork",
            f"the program starts processes ({forks[0].strip()}), by fork on Linux before Python 3.14",
            "nsys does not record forked processes; for DataLoader workers that only load data this does not matter",
            "if such a process uses the GPU: multiprocessing.set_start_method('spawn')",
        )
