"""Doctor checks of nsys and ncu against the driver. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from nvprof_kit._capture.machine import Machine
from nvprof_kit._capture.nsight_releases import cuda_of, cuda_of_driver, is_newest, known_trouble, numbers, release_for
from nvprof_kit._findings import Finding, checked


def examine_tools(machine: Machine) -> Iterator[Finding]:
    """Findings about nsys and ncu."""
    yield from _nsys(machine)
    yield from _ncu(machine)


def _nsys(machine: Machine) -> Iterator[Finding]:
    if machine.nsys is None:
        yield checked(
            "error",
            "nsys",
            f"NSYS={machine.nsys_named} cannot be run" if machine.nsys_named else "no nsys on PATH",
            "the recipes in recipes/nsys need it",
            "set NSYS to an executable nsys, or unset it and put nsys on PATH"
            if machine.nsys_named
            else "install Nsight Systems and put its bin folder on PATH, or set NSYS; without it: nvprof-kit record",
        )
        return
    yield from _beside_driver("nsys", machine.nsys, machine)


def _ncu(machine: Machine) -> Iterator[Finding]:
    if machine.ncu is None:
        yield checked(
            "note",
            "ncu",
            f"NCU={machine.ncu_named} cannot be run" if machine.ncu_named else "no ncu on PATH",
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
