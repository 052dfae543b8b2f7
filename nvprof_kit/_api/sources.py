"""The other files that are opened: reports of Nsight Compute, memory snapshots, logs of timers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nvprof_kit._api.capture import Capture, domain_of, read_rules
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._results.memory import Memory
    from nvprof_kit._results.ncu import NcuKernels, NcuLayers
    from nvprof_kit._results.timers import Timers
    from nvprof_kit._trace.ncu.schema import NcuReport
    from nvprof_kit._trace.timer_log import TimerLogs
    from nvprof_kit._trace.torch_memory.snapshot import Snapshot

MemoryView = Literal["layer", "stack", "size", "allocation", "step", "segment", "leak"]


def open_ncu(*paths: str | Path, rules: str | Path | None = None, domain: str | None = None) -> NcuReports:
    """Open what Nsight Compute measured.

    Args:
        paths: ncu's raw or details page as .csv, or an .ncu-rep, each also packed as .xz; several are taken together.
        rules: How the program names its ranges, as in `nvprof_kit.open`.
        domain: NVTX domain of the ranges, as in `nvprof_kit.open`.
    """
    return NcuReports(paths, rules=rules, domain=domain)


class NcuReports:
    """What Nsight Compute measured. See `open_ncu` for the arguments."""

    def __init__(
        self, paths: Sequence[str | Path], *, rules: str | Path | None = None, domain: str | None = None
    ) -> None:
        if not paths:
            raise UsageError("no report of ncu; needed one or more .csv or .ncu-rep")
        self.paths, self._rules = tuple(map(Path, paths)), rules
        self.domain = domain_of(read_rules(rules), domain)

    @cached_property
    def report(self) -> NcuReport:
        """The measurements, read when they are first needed."""
        from nvprof_kit._trace.ncu.open import open_ncu, together

        return together([open_ncu(path, domain=self.domain) for path in self.paths])

    def layers(self, capture: Capture | str | Path | None = None, *, depth: int | None = None) -> NcuLayers:
        """What each layer did to the GPU: how busy it kept compute, memory and tensor cores, and what bound it.

        Args:
            capture: nsys capture of the same program, to spread the measurements over; a path is opened with the rules
                of the reports.
            depth: Levels of the model that are printed; None for all.

        Raises:
            CaptureError: A file cannot be read or lacks what is needed.
        """
        from nvprof_kit._analysis.kernels.signatures import NEEDED
        from nvprof_kit._analysis.ncu.layers import ncu_layers
        from nvprof_kit._results.ncu import NcuLayers

        report = self.report
        if capture is None:
            trace, sources = None, self.paths
        else:
            if not isinstance(capture, Capture):
                capture = Capture(capture, rules=self._rules, domain=self.domain)
            trace, sources = capture._trace(NEEDED), (*self.paths, *capture.sources)
        return NcuLayers(**vars(ncu_layers(report, trace)), sources=sources, report=report, depth=depth)

    def kernels(self) -> NcuKernels:
        """Every metric of every measured kernel."""
        from nvprof_kit._analysis.ncu.layers import tidy
        from nvprof_kit._results.ncu import NcuKernels

        return NcuKernels(tidy(self.report), self.report.warnings, sources=self.paths)


def read_beside(capture: Path) -> list[Path]:
    """What else is read where it lies beside a capture: SQLite's journals, a file of counts."""
    from nvprof_kit._trace.flops_file import find_flops

    counts = find_flops(capture)
    return [capture.with_name(f"{capture.name}{end}") for end in ("-wal", "-journal")] + ([counts] if counts else [])


def open_snapshot(path: str | Path) -> MemorySnapshot:
    """Open a memory snapshot.

    Args:
        path: A pickle by `nvprof_kit.memory_snapshot` or ``torch.cuda.memory._dump_snapshot``.
    """
    return MemorySnapshot(path)


class MemorySnapshot:
    """A snapshot of PyTorch's allocator. See `open_snapshot` for the argument."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def snapshot(self) -> Snapshot:
        """What it holds, read when it is first needed."""
        from nvprof_kit._trace.torch_memory.snapshot import read_snapshot

        return read_snapshot(self.path)

    def memory(
        self, by: MemoryView | None = None, *, device: int | None = None, steps: StepOptions | None = None
    ) -> Memory:
        """Who held the GPU's memory at the peak, how it grew from step to step, what was left behind, how it lies.

        Args:
            by: The one table to print and to give; None prints all, and gives ``layer``.
            device: Device ordinal; None for the one with the most reserved memory.
            steps: Which steps the table ``step`` is of; None for all.

        Raises:
            CaptureError: The file cannot be read, or has nothing of this device.
            UsageError: None of the steps asked for is in it.
        """
        snapshot = self.snapshot  # another process reads it while this one imports
        from nvprof_kit._analysis.attribution.steps import chosen_steps
        from nvprof_kit._analysis.memory.memory import memory
        from nvprof_kit._results.memory import Memory

        result = memory(snapshot, device)
        if steps is not None and steps.selects:
            kept = chosen_steps(steps, result.steps["step"].to_numpy(), str(self.path))
            result = replace(result, steps=result.steps[kept].reset_index(drop=True))
        return Memory(**vars(result), sources=(self.path,), snapshot=snapshot, by=by)


def open_timers(*paths: str | Path) -> TimerLog:
    """Open what `nvprof_kit.global_timer` wrote.

    Args:
        paths: The ``timer_rank*.log`` files, or folders that hold them.
    """
    return TimerLog(paths)


class TimerLog:
    """The timed stages of all ranks. See `open_timers` for the arguments."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = tuple(map(Path, paths))

    @cached_property
    def logs(self) -> TimerLogs:
        """What they hold, read when it is first needed."""
        from nvprof_kit._trace.timer_log import read_timer_logs

        return read_timer_logs(self.paths)

    def timers(
        self,
        by: Literal["rank", "call"] | None = None,
        *,
        collective: Sequence[str] = (),
        warm_up: int = 1,
        steps: StepOptions | None = None,
    ) -> Timers:
        """How long the timed stages take on every rank, how far the ranks are apart, and which one the others wait for.

        Args:
            by: A row for each stage and rank, or for each single call, instead of one for each stage.
            collective: Stages that end with a collective; empty for those named after one, else ``backward``.
            warm_up: First calls of each stage left out of the verdict.
            steps: Which calls of each stage to look at, counted by each rank from 0; None for all.

        Raises:
            CaptureError: A log cannot be read.
            UsageError: None of these calls is in it.
        """
        from nvprof_kit._analysis.attribution.steps import ALL_STEPS
        from nvprof_kit._analysis.timers import TimersOptions, timers
        from nvprof_kit._results.timers import Timers

        result = timers(self.logs, TimersOptions(by == "rank", tuple(collective), warm_up, steps or ALL_STEPS))
        return Timers(**vars(result), sources=self.sources, by_call=by == "call")

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that it is made of: nothing is ever written over one of them."""
        inside = (file for path in self.paths if path.is_dir() for file in path.iterdir())
        return (*self.paths, *inside)
