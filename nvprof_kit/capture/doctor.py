"""Why a profile on this machine would fail or mislead: facts in, findings out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nvprof_kit.capture.machine import Machine, Program
from nvprof_kit.findings import Finding, by_gravity

_CAP_SYS_ADMIN, _CAP_PERFMON = 1 << 21, 1 << 38
_GIGABYTE = 10**9

NSYS_CUDA = {
    "2022.4": "12.0",
    "2023.1": "12.1",
    "2023.2": "12.2",
    "2023.3": "12.3",
    "2023.4": "12.4",
    "2024.2": "12.5",
    "2024.4": "12.6",
    "2024.6": "12.8",
    "2025.1": "12.9",
    "2025.3": "13.0",
}
"""Release of Nsight Systems to the CUDA toolkit that it came with."""

NCU_CUDA = {
    "2022.4": "12.0",
    "2023.1": "12.1",
    "2023.2": "12.2",
    "2023.3": "12.3",
    "2024.1": "12.4",
    "2024.2": "12.5",
    "2024.3": "12.6",
    "2025.1": "12.8",
    "2025.2": "12.9",
    "2025.3": "13.0",
}
"""Release of Nsight Compute to the CUDA toolkit that it came with."""


def examine_machine(machine: Machine) -> tuple[Finding, ...]:
    """Every finding, gravest first."""
    checks = (_gpu, _nsys, _ncu, _permission, _sampling, _other_clients, _clocks, _setting, _disk)
    found = [finding for check in checks for finding in check(machine)]
    if machine.program is not None:
        found += _program(machine.program, machine)
    return by_gravity(found)


def _gpu(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding(
            "error",
            "GPU",
            "nvidia-smi finds no GPU",
            "a capture has no kernels then",
            "run on a machine with a GPU; in a container start it with --gpus all (recipes/nsys/container.sh)",
        )
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    driver = f"driver {machine.gpus[0].driver}" + (f", CUDA {machine.driver_cuda}" if machine.driver_cuda else "")
    yield Finding("ok", "GPU", f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}: {names}, {driver}")
    old = [gpu for gpu in machine.gpus if _numbers(gpu.compute) < (7, 0)]
    if old:
        yield Finding(
            "warning",
            "GPU",
            f"{old[0].name} has compute capability {old[0].compute}",
            "ncu and GPU metrics need 7.0 and 7.5",
            "use nsys without --gpu-metrics-devices",
        )
    if any(gpu.mig for gpu in machine.gpus):
        yield Finding(
            "note",
            "MIG",
            "a GPU is divided (MIG)",
            "GPU metrics show the whole GPU, and ncu cannot fix clocks nor measure units shared between instances",
            "measure on an undivided GPU where that matters",
        )


def _nsys(machine: Machine) -> Iterator[Finding]:
    if machine.nsys is None:
        yield Finding(
            "error",
            "nsys",
            "no nsys on PATH",
            "the recipes in recipes/nsys run it",
            "install Nsight Systems and put its bin folder on PATH, or set NSYS; without it: nvprof-kit record",
        )
        return
    yield from _beside_driver("nsys", machine.nsys, NSYS_CUDA, machine)


def _ncu(machine: Machine) -> Iterator[Finding]:
    if machine.ncu is None:
        yield Finding(
            "note",
            "ncu",
            "no ncu on PATH",
            "hardware counters of each kernel come from it; times per layer do not need it",
            "install Nsight Compute and put it on PATH",
        )
        return
    yield from _beside_driver("ncu", machine.ncu, NCU_CUDA, machine)


def _beside_driver(tool: str, version: str, toolkits: dict[str, str], machine: Machine) -> Iterator[Finding]:
    """A tool older than the driver may not know what the driver does."""
    older = [cuda for release, cuda in toolkits.items() if _numbers(release) <= _numbers(version)[:2]]
    newest = _numbers(version)[:2] >= max(map(_numbers, toolkits))
    if machine.driver_cuda and not newest and (not older or _numbers(older[-1]) < _numbers(machine.driver_cuda)):
        of = f" (of CUDA {older[-1]})" if older else ""
        yield Finding(
            "warning",
            tool,
            f"{tool} {version}{of} is older than the driver (CUDA {machine.driver_cuda})",
            "it may meet calls or a GPU that it does not know, and drop kernels or refuse",
            f"install the {tool} of CUDA {machine.driver_cuda} or a newer one",
        )
    else:
        yield Finding("ok", tool, f"{tool} {version}")


def _permission(machine: Machine) -> Iterator[Finding]:
    if machine.counters_for_admin is None:
        return
    if not machine.counters_for_admin or machine.capabilities & _CAP_SYS_ADMIN:
        yield Finding("ok", "counters", "hardware counters may be read")
        return
    if machine.container:
        mend = "start the container with --cap-add=SYS_ADMIN (recipes/nsys/container.sh), or open them on the host: "
    else:
        mend = "run as root, or open them for all: "
    yield Finding(
        "warning",
        "counters",
        "hardware counters are for administrators only (RmProfilingAdminOnly: 1)",
        "ncu and --gpu-metrics-devices fail with ERR_NVGPUCTRPERM; times per layer do not need them",
        f"{mend}echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' > /etc/modprobe.d/nvidia-profiling.conf, "
        "rebuild the initramfs (update-initramfs -u, or dracut -f) and reboot",
    )


def _sampling(machine: Machine) -> Iterator[Finding]:
    level = machine.perf_event_paranoid
    if level is None or level <= 2 or machine.capabilities & (_CAP_SYS_ADMIN | _CAP_PERFMON):
        return
    yield Finding(
        "note",
        "CPU samples",
        f"kernel.perf_event_paranoid is {level}",
        "nsys cannot sample the CPU above 2; the recipes do not ask it to",
        "sysctl -w kernel.perf_event_paranoid=2",
    )


def _other_clients(machine: Machine) -> Iterator[Finding]:
    if machine.processes:
        yield Finding(
            "warning",
            "other profilers",
            f"running: {', '.join(machine.processes)}",
            "DCGM's profiling metrics hold the hardware counters, so ncu and GPU metrics fail meanwhile",
            "dcgmi profile --pause, and --resume afterwards",
        )
    attached = [name for name in machine.environment if "INJECTION" in name]
    if attached:
        yield Finding(
            "warning",
            "other profilers",
            f"set here: {', '.join(sorted(attached))}",
            "another profiler attaches to every program started from here, and CUDA serves one at a time",
            f"unset {' '.join(sorted(attached))}",
        )
    if "KINETO_USE_DAEMON" in machine.environment:
        yield Finding(
            "note",
            "other profilers",
            "KINETO_USE_DAEMON is set",
            "PyTorch's profiler can be started from outside, and nsys then loses the GPU's events",
            "unset KINETO_USE_DAEMON",
        )
    if machine.environment.get("NVPROF_KIT", "").strip().lower() == "off":
        yield Finding(
            "warning", "ranges", "NVPROF_KIT=off", "no range is emitted, so no layer has a time", "unset NVPROF_KIT"
        )


def _clocks(machine: Machine) -> Iterator[Finding]:
    if len({gpu.max_clock for gpu in machine.gpus}) > 1 or len({gpu.name for gpu in machine.gpus}) > 1:
        yield Finding(
            "note",
            "clocks",
            "GPUs of several kinds",
            "their times cannot be compared",
            "CUDA_VISIBLE_DEVICES of one kind",
        )
    slow = [gpu for gpu in machine.gpus if gpu.clock and gpu.max_clock and gpu.clock < 0.5 * gpu.max_clock]
    if slow:
        yield Finding(
            "note",
            "clocks",
            f"SM clock now {slow[0].clock} MHz of {slow[0].max_clock}",
            "an idle GPU clocks down and needs some steps to come up, so the first steps are slower; under load it "
            "would mean a limit on power or heat",
            "leave warm-up steps out: profile.sh --step 12; for comparisons fix clocks: nvidia-smi --lock-gpu-clocks",
        )


def _setting(machine: Machine) -> Iterator[Finding]:
    if machine.container and not machine.capabilities & _CAP_SYS_ADMIN:
        yield Finding(
            "note",
            "container",
            f"in a container ({machine.container}) without CAP_SYS_ADMIN",
            "kernels and ranges are recorded as always; hardware counters and CPU samples may be refused",
            "start it as recipes/nsys/container.sh does",
        )
    if machine.wsl:
        yield Finding(
            "note",
            "WSL",
            "Linux under Windows",
            "hardware counters are opened in Windows: NVIDIA Control Panel, Developer, GPU performance counters",
            "allow them to all users there; context switches cannot be traced",
        )


def _disk(machine: Machine) -> Iterator[Finding]:
    for folder, free in machine.free_bytes.items():
        if free < _GIGABYTE:
            yield Finding(
                "error" if free < _GIGABYTE / 10 else "warning",
                "disk",
                f"{free / 1e6:.0f} MB free in {folder}",
                "a report grows by some MB for each step, and a full disk leaves none",
                "free some, or use another folder: -o for the report, TMPDIR for what nsys keeps meanwhile",
            )


def _program(program: Program, machine: Machine) -> list[Finding]:
    return [*_python(program, machine), *_source(program)]


def _python(program: Program, machine: Machine) -> Iterator[Finding]:
    if program.interpreter is None:
        yield Finding("note", "program", "the command names no Python", "its packages were not looked at", "")
        return
    name, found = program.interpreter, program.found
    if found is None:
        yield Finding(
            "error", "program", f"{name} does not start", "the program would not either", f"see: {name} --version"
        )
        return
    if not found.get("nvprof-kit"):
        yield Finding(
            "warning",
            "program",
            f"{name} has no nvprof-kit",
            "its ranges come from there",
            f"{name} -m pip install nvprof-kit",
        )
    if found.get("broken"):
        yield Finding(
            "error",
            "torch",
            f"torch cannot be imported: {found['broken']}",
            "the program would not run",
            "install it again",
        )
    elif found.get("torch"):
        yield from _torch(name, found["torch"] or "", found.get("cuda"), machine)
    yield from _nvtx(found.get("nvtx"), machine)


def _torch(name: str, version: str, cuda: str | None, machine: Machine) -> Iterator[Finding]:
    if cuda is None and machine.gpus:
        yield Finding(
            "error",
            "torch",
            f"torch {version} is a build without CUDA",
            "the program runs on the CPU, and the capture has no kernels",
            f"{name} -m pip install torch --index-url https://download.pytorch.org/whl/cu126 (or your CUDA's)",
        )
    elif cuda and machine.driver_cuda and _numbers(cuda)[:1] > _numbers(machine.driver_cuda)[:1]:
        yield Finding(
            "error",
            "torch",
            f"torch {version} needs CUDA {cuda}, the driver has {machine.driver_cuda}",
            "it will find no GPU",
            "update the driver, or install the torch of an older CUDA",
        )
    else:
        yield Finding("ok", "torch", f"torch {version}" + (f" for CUDA {cuda}" if cuda else ""))


def _nvtx(version: str | None, machine: Machine) -> Iterator[Finding]:
    if version and machine.nsys and _numbers(version) >= (0, 2, 12) and _numbers(machine.nsys)[:2] <= (2024, 2):
        yield Finding(
            "note",
            "nvtx",
            f"nvtx {version} takes nsys {machine.nsys} for absent",
            "our own ranges are recorded all the same; ranges that other packages make with nvtx are not",
            "update nsys, or: pip install nvtx==0.2.11",
        )


def _source(program: Program) -> Iterator[Finding]:
    source = program.source
    if re.search(r"torch\.profiler|autograd\.profiler|from torch\.profiler|nvprof_kit\.record\(", source):
        yield Finding(
            "warning",
            "other profilers",
            "the program uses PyTorch's own profiler",
            "CUDA serves one profiler at a time: with both, one of them gets no kernels",
            "switch it off while nsys or ncu runs",
        )
    forks = re.search(r"num_workers\s*=\s*[1-9]|set_start_method\(.fork|os\.fork\(|import multiprocessing", source)
    if forks and not re.search(r"spawn|forkserver", source):
        yield Finding(
            "note",
            "fork",
            f"the program starts processes ({forks[0].strip()}), by fork on Linux before Python 3.14",
            "nsys does not record a process that was forked; dataloader workers that only load lose nothing",
            "where such a process uses the GPU: multiprocessing.set_start_method('spawn')",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
