"""Checks for problems that make a profile on this machine fail or mislead. Pure functions: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from nvprof_kit._capture.doctor_program import examine_program
from nvprof_kit._capture.doctor_tools import examine_tools
from nvprof_kit._capture.machine import Machine
from nvprof_kit._capture.nsight_releases import numbers
from nvprof_kit._findings import Finding, by_severity, checked

_CAP_SYS_ADMIN, _CAP_PERFMON = 1 << 21, 1 << 38
_GIGABYTE = 10**9


def examine_machine(machine: Machine) -> tuple[Finding, ...]:
    """All findings, most severe first."""
    checks = (_gpu, examine_tools, _permission, _sampling, _other_clients, _clocks, _setting, _disk)
    findings = [finding for check in checks for finding in check(machine)]
    if machine.program is not None:
        findings += examine_program(machine.program, machine)
    return by_severity(findings)


def _gpu(machine: Machine) -> Iterator[Finding]:
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
    old = [gpu for gpu in machine.gpus if numbers(gpu.compute) < (7, 0)]
    if old:
        yield checked(
            "warning",
            "gpu",
            f"{old[0].name} has compute capability {old[0].compute}",
            "ncu needs 7.0 or newer, GPU metrics need 7.5",
            "use nsys without --gpu-metrics-devices",
        )
    if any(gpu.mig for gpu in machine.gpus):
        yield checked(
            "note",
            "mig",
            "a GPU is partitioned (MIG)",
            "GPU metrics show the whole GPU, and ncu can neither lock clocks nor measure units shared by instances",
            "measure on a GPU without MIG if that matters",
        )


def _permission(machine: Machine) -> Iterator[Finding]:
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


def _sampling(machine: Machine) -> Iterator[Finding]:
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


def _other_clients(machine: Machine) -> Iterator[Finding]:
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
    if "KINETO_USE_DAEMON" in machine.environment:
        yield checked(
            "note",
            "other-profilers",
            "KINETO_USE_DAEMON is set",
            "PyTorch's profiler can be started from outside, and nsys then loses the GPU's events",
            "unset KINETO_USE_DAEMON",
        )
    if machine.environment.get("NVPROF_KIT", "").strip().lower() == "off":
        yield checked(
            "warning", "ranges", "NVPROF_KIT=off", "no ranges are emitted, so no layer has a time", "unset NVPROF_KIT"
        )


def _clocks(machine: Machine) -> Iterator[Finding]:
    if len({gpu.max_clock for gpu in machine.gpus}) > 1 or len({gpu.name for gpu in machine.gpus}) > 1:
        yield checked(
            "note",
            "clocks",
            "GPUs of different models",
            "their times cannot be compared",
            "set CUDA_VISIBLE_DEVICES to GPUs of one model",
        )
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


def _setting(machine: Machine) -> Iterator[Finding]:
    if machine.container and not machine.capabilities & _CAP_SYS_ADMIN:
        unsure = "cpu-samples" if machine.counters_for_admin is not None else "hardware counters and CPU samples"
        yield checked(
            "note",
            "container",
            f"in a container ({machine.container}) without CAP_SYS_ADMIN",
            f"kernels and ranges are recorded as usual; {unsure} may be refused",
            "start it as recipes/nsys/container.sh does",
        )
    if machine.wsl:
        yield checked(
            "note",
            "wsl",
            "Linux on Windows",
            "hardware counters are enabled in Windows: NVIDIA Control Panel, Developer, GPU performance counters",
            "allow access for all users there; context switches cannot be traced",
        )


def _disk(machine: Machine) -> Iterator[Finding]:
    for folder, free in machine.free_bytes.items():
        if free < _GIGABYTE:
            yield checked(
                "error" if free < _GIGABYTE / 10 else "warning",
                "disk",
                f"{free / 1e6:.0f} MB free in {folder}",
                "a report grows by a few MB per step, and is lost if the disk fills up",
                "free some space, or use another folder: -o for the report, TMPDIR for nsys's temporary data",
            )
