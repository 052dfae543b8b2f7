"""Sources other than captures: Nsight Compute reports, memory snapshots, timer logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from nvprof_kit._api.capture import Capture, domain_of, read_rules
from nvprof_kit._trace.timer_log import TimerLogs, read_timer_logs
from nvprof_kit.errors import UsageError, require_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nvprof_kit._analysis.memory.memory import Memory
    from nvprof_kit._analysis.ncu.layers import NcuKernels, NcuLayers
    from nvprof_kit._analysis.timers import Timers
    from nvprof_kit._api.capture import Steps
    from nvprof_kit._result.result import RowOptions
    from nvprof_kit._trace.ncu.schema import NcuReport
    from nvprof_kit._trace.torch_memory.snapshot import Snapshot

MemoryView = Literal["layer", "stack", "size", "allocation", "step", "segment", "leak"]


def open_ncu(*paths: str | Path, rules: str | Path | None = None, domain: str | None = None) -> NcuReports:
    """Open Nsight Compute results.

    Args:
        paths: ncu reports (``.ncu-rep``), or ncu's raw or details page as ``.csv``; each may be packed as ``.xz``.
            Several files are combined.
        rules: How the program names its ranges, as in `nvprof_kit.open`.
        domain: NVTX domain of the ranges, as in `nvprof_kit.open`.

    Returns:
        The reports. Nothing is read until the first question.

    Raises:
        UsageError: No path is given, or ``rules`` is invalid.
    """
    return NcuReports(paths, rules=rules, domain=domain)


class NcuReports:
    """Opened Nsight Compute results. See `open_ncu` for the arguments."""

    def __init__(
        self, paths: Sequence[str | Path], *, rules: str | Path | None = None, domain: str | None = None
    ) -> None:
        if not paths:
            raise UsageError("no ncu report; needed one or more .csv or .ncu-rep")
        self.paths, self._rules = tuple(map(Path, paths)), rules
        self.domain = domain_of(read_rules(rules), domain)

    @cached_property
    def report(self) -> NcuReport:
        """The measurements; read on first access.

        Raises:
            CaptureError: A file cannot be read or lacks what is needed.
        """
        from nvprof_kit._trace.ncu.reader import together
        from nvprof_kit._trace.open import open_ncu

        return together([open_ncu(path, domain=self.domain) for path in self.paths])

    def layers(
        self, capture: Capture | str | Path | None = None, *, depth: int | None = None, **rows: Unpack[RowOptions]
    ) -> NcuLayers:
        """Hardware utilization of each layer: compute, memory and Tensor Core throughput, and what limits it.

        The counters are ncu's; percentages are averaged over kernels, weighted by GPU time.

        Args:
            capture: An nsys capture of the same program. Each measured kernel then stands for all its launches in the
                capture. A path is opened with the rules of the reports.
            depth: Levels of the model to print. [default: all]
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: A file cannot be read or lacks what is needed.
        """
        from nvprof_kit._analysis.kernels.signatures import NEEDED
        from nvprof_kit._analysis.ncu.layers import ncu_layers

        report, trace, sources = self.report, None, self.paths
        if capture is not None:
            if not isinstance(capture, Capture):
                capture = Capture(capture, rules=self._rules, domain=self.domain)
            trace, sources = capture._trace(NEEDED), (*self.paths, *capture.sources)
        return replace(ncu_layers(report, trace), sources=sources, depth=depth).selected(**rows)

    def kernels(self, **rows: Unpack[RowOptions]) -> NcuKernels:
        """All metrics of all measured kernels, one row per kernel.

        Args:
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: A file cannot be read or lacks what is needed.
        """
        from nvprof_kit._analysis.ncu.layers import NcuKernels, tidy

        return NcuKernels(tidy(self.report), self.report.warnings, sources=self.paths).selected(**rows)


def open_snapshot(path: str | Path) -> MemorySnapshot:
    """Open a snapshot of PyTorch's CUDA caching allocator.

    Args:
        path: A pickle written by `nvprof_kit.memory_snapshot` or ``torch.cuda.memory._dump_snapshot``.

    Returns:
        The snapshot. Nothing is read until the first question.
    """
    return MemorySnapshot(path)


class MemorySnapshot:
    """An opened snapshot of PyTorch's CUDA caching allocator. See `open_snapshot` for the argument."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def snapshot(self) -> Snapshot:
        """Its contents; read on first access."""
        from nvprof_kit._trace.open import open_snapshot

        return open_snapshot(self.path)

    def memory(
        self,
        by: MemoryView | None = None,
        *,
        device: int | None = None,
        steps: Steps = None,
        **rows: Unpack[RowOptions],
    ) -> Memory:
        """Which layers held GPU memory at the peak, how memory grew between steps, leaks, and fragmentation.

        Sizes are int64 bytes.

        Args:
            by: The table to print and to return from `Memory.to_frame`: holders of the peak by layer, stack or size;
                all allocations by layer; growth by step; segments; leaks. [default: all, and layer]
            device: Device ordinal. [default: the device with the most reserved memory]
            steps: Which steps the table of steps covers, as in `Capture.layers`. [default: all]
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: The file cannot be read, or has no data for the device.
            UsageError: None of the requested steps is in the snapshot.
        """
        require_choice(by, get_args(MemoryView), "by")
        snapshot = self.snapshot  # another process reads it while this one imports
        from nvprof_kit._analysis.memory.memory import memory

        result = replace(memory(snapshot, device), sources=(self.path,), view=by)
        if steps is not None:
            from nvprof_kit._analysis.attribution.steps import StepOptions, chosen_steps

            selected = chosen_steps(StepOptions.of(steps), result.step["step"].to_numpy(), str(self.path))
            result = replace(result, step=result.step[selected].reset_index(drop=True))
        return result.selected(**rows)


def open_timers(*paths: str | Path) -> TimerLog:
    """Open logs of `nvprof_kit.global_timer`.

    Args:
        paths: ``timer_rank*.log`` files, or folders that contain them.

    Returns:
        The logs. Nothing is read until the first question.
    """
    return TimerLog(paths)


class TimerLog:
    """Opened timer logs of all ranks. See `open_timers` for the arguments."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = tuple(map(Path, paths))

    @cached_property
    def logs(self) -> TimerLogs:
        """Their contents; read on first access.

        Raises:
            CaptureError: A log cannot be read.
        """
        return read_timer_logs(self.paths)

    def timers(
        self,
        by: Literal["rank", "call"] | None = None,
        *,
        collective: Sequence[str] = (),
        steps: Steps = None,
        **rows: Unpack[RowOptions],
    ) -> Timers:
        """How long the timed stages take on each rank, how much the ranks differ, and which rank the others wait for.

        Args:
            by: One row per stage and rank, or per call, instead of one per stage.
            collective: A stage that ends with a collective, for the verdict. Repeatable. [default: stages named after
                one, else backward]
            steps: Which calls of each stage to include, counted per rank from 0: 5:20, 5:, 7, or +3: to leave out the
                first three. [default: all]
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: A log cannot be read.
            UsageError: None of the requested calls is in the logs, or no stage has that name.
        """
        from nvprof_kit._analysis.attribution.steps import StepOptions
        from nvprof_kit._analysis.timers import timers

        require_choice(by, ("rank", "call"), "by")
        chosen = StepOptions.of(steps)
        answer = timers(self.logs, by, tuple(collective), chosen)
        return replace(answer, sources=self.sources).selected(**rows)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The input files. `save` refuses to overwrite them."""
        inside = (file for path in self.paths if path.is_dir() for file in path.iterdir())
        return (*self.paths, *inside)
