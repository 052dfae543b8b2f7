"""The front door: a capture that is opened once and answers many questions.

Each table is read from the file when a question first needs it. Operations are attributed to layers once; all questions
share the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nvprof_kit._analysis.diff.gates import parse_gate
from nvprof_kit._api.tables import Tables, optional_columns, run_query
from nvprof_kit._result.result import Plot, RowOptions
from nvprof_kit._result.writer import Document
from nvprof_kit._toml import read_toml
from nvprof_kit._trace.files.kinds import CAPTURES, NEEDED, expect, recognised
from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit.errors import CaptureError, UsageError, require_choice, require_positive
from nvprof_kit.issues import Issue, as_issues
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack

    from nvprof_kit._analysis.advise.advise import Advice
    from nvprof_kit._analysis.attribution.attribution import Operations
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.diff.diff import Diff
    from nvprof_kit._analysis.flops.flops import Flops
    from nvprof_kit._analysis.foreign.rules import Rules
    from nvprof_kit._analysis.layers.layers import Layers
    from nvprof_kit._analysis.metrics import Metrics
    from nvprof_kit._analysis.ncu.plan import NcuPlan
    from nvprof_kit._analysis.summary.summary import Summary
    from nvprof_kit._analysis.timeline import Timeline
    from nvprof_kit._ranks.verdict import Judged
    from nvprof_kit._report.page.page import Sheet
    from nvprof_kit._trace.schema import CaptureInfo, Trace

    Steps = StepOptions | int | str | range | None
    """Which steps: ``3``, ``"3:5"``, ``range(3, 5)``; None for the default of the question."""

Columns = Literal["class", "phase", "memory"]
SummaryView = Literal["device", "overview", "model", "distributed", "operator", "kernel", "memory", "user"]
BreakdownView = Literal["steps", "idle", "communication", "copies", "launches", "queue", "critical-path"]
TraceForm = Literal["json.gz", "json"]
SectionSet = Literal["basic", "detailed", "full", "source", "roofline", "nvlink", "pmsampling", "default"]
"""ncu's sets of sections, 2020 to 2026 (`ncu --list-sets`)."""

MANY_OPERATIONS = 200_000
"""Captures with more operations get no findings in a report, because finding them takes long."""

NEEDS: Mapping[str, Sequence[str]] = read_toml("nvprof_kit._api", "needs.toml")
"""What each question reads of a capture beyond what is always read."""

LARGE_BYTES = 100_000_000
"""In a larger file, count the operations before reading the columns that only findings need."""


def open(  # what the package offers as `nvprof_kit.open`
    path: str | Path, *, rules: str | Path | None = None, domain: str | None = None, model: str | Path | None = None
) -> Capture:
    """Open a capture.

    Args:
        path: An nsys export (``.sqlite``, or a folder of ``nsys export --type=parquetdir``), an nsys report
            (``.nsys-rep``, exported once), or a PyTorch profiler trace (``.json``, ``.json.gz``); a file may be packed
            as ``.xz``. It is never written to.
        rules: How the captured program names its NVTX ranges, if it is not nvprof_kit that emitted them: deepspeed,
            emit-nvtx, megatron-lm, nemo, sglang, tensorrt-llm, torch-nvtx, vllm, or a TOML file, which may have rules
            for the classes of kernels too.
        domain: NVTX domain of the ranges; separate several with commas; '' or default is the default domain. [default:
            that of the rules, nvprof_kit without rules]
        model: The model's ``config.json`` of Hugging Face: checks the number of blocks, and names those found by the
            order of kernels. Never needed.

    Returns:
        The capture. Its tables are read when a question first needs them.

    Raises:
        CaptureError: The file does not exist, or is no capture.
        UsageError: ``rules`` is neither a preset nor a file, a rule is invalid, or ``model`` tells no number of layers.
    """
    return Capture(path, rules=rules, domain=domain, model=model)


class Capture:
    """An opened capture. See `open` for the arguments.

    Each question is a method. A method reads the tables it needs; later calls reuse them. Attribution (which layer
    launched each GPU operation) is computed once. A method raises `CaptureError` if the file is damaged or lacks the
    data it needs.

    Attributes:
        path: The capture file.
        domain: NVTX domain of the ranges.
        is_last_question: Whether the next question may free what the capture has read, because no other one follows.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rules: str | Path | Rules | None = None,
        domain: str | None = None,
        model: str | Path | None = None,
    ) -> None:
        self.path, self._model_file = Path(path), model
        self._rules = read_rules(rules)
        self._kernel_rules = () if self._rules is None else self._rules.kernels
        self._model = None
        if model is not None:
            from nvprof_kit._analysis.structure.model_config import read_model_config

            self._model = read_model_config(Path(model))
        self.domain = domain_of(self._rules, domain)
        self._rule_files = tuple(
            Path(path_or_preset)
            for path_or_preset in (rules, model)
            if isinstance(path_or_preset, (str, Path)) and Path(path_or_preset).is_file()
        )
        self._read: set[str] = set()
        self._graphs: Path | None = None
        self._attributed_ops: Operations | None = None
        self.is_last_question = False
        self._operators: pd.DataFrame | None = None
        if not self.path.exists():
            raise CaptureError(f"{path}: no such file")
        expect(path, CAPTURES, NEEDED)
        if recognised(self.path) is None:
            self._operations(cpu_only=True)  # of what is not known, a reader says what is wrong

    def __repr__(self) -> str:
        """Which capture this is."""
        return f"<nvprof_kit.Capture {str(self.path)!r}>"

    def __enter__(self) -> Capture:
        """The capture; it is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the capture."""
        self.close()

    def close(self) -> None:
        """Release the memory of what was read. A later question reads it again."""
        self._attributed_ops, self._operators = None, None
        self._read.clear()
        self.__dict__.pop("tables", None)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The input files. `save` refuses to overwrite them."""
        return (self.path, *self._rule_files)

    @property
    def info(self) -> CaptureInfo:
        """The recording tool and its version, the GPUs, the processes, and the warnings."""
        return self._operations(cpu_only=True).trace.info

    @property
    def warnings(self) -> tuple[Issue, ...]:
        """What may be missing or distorted in this capture; each sentence says what to do about it."""
        return self.info.warnings

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step, in order of time: step number, start and end in ns since the start of the capture, and
        wall and busy time.
        """
        from nvprof_kit._analysis.attribution.steps import step_times

        operations = self._operations(cpu_only=True)
        return step_times(operations.trace, operations.attribution)

    # ---------------------------------------------------------------- questions

    def layers(
        self,
        *,
        by: Literal["step"] | None = None,
        depth: int | None = None,
        columns: Columns | Sequence[Columns] = (),
        process: int | None = None,
        with_: str | Path | None = None,
        steps: Steps = None,
        **rows: Unpack[RowOptions],
    ) -> Layers:
        """GPU and CPU time of each layer by phase, and the time outside all layers.

        Args:
            by: One row per step, layer and phase, instead of one per layer and phase.
            depth: Levels of the model in the printed table and the plot. [default: all]
            columns: Add columns: the time split by kernel class, or by phase of the loop (prefill, decode), both not
                with ``by``; or the memory of each layer, if the capture has memory marks or memory events. Repeatable.
            process: The rank of one process of a capture with several. [default: all, added up]
            with_: For a PyTorch trace of CUDA graph replays, the trace recorded while the graphs were captured: its
                modules and operators name the kernels of the replays.
            steps: Which steps to include, by number: 5:20 is 5 to 19, 5: is 5 and later, 7 is one step; +3: leaves out
                the first three of the capture; all is the whole capture, with warm-up and what ran outside steps.
                [default: all steps but warm-up]
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: Memory is asked for and the capture has no memory data; or ``with_`` is no PyTorch trace of a
                graph's capture, or the capture none of replays.
            UsageError: None of the requested steps is in the capture, no process has the rank, or time is split both
                by step and by class or phase.
        """
        if with_ is not None:
            named = self._like(self.path)
            named._graphs, named._rule_files = Path(with_), (*self._rule_files, Path(with_))
            return named.layers(by=by, depth=depth, columns=columns, process=process, steps=steps, **rows)
        added = (columns,) if isinstance(columns, str) else tuple(columns)
        require_choice(by, ("step",), "by")
        for name in added:
            require_choice(name, get_args(Columns), "columns")
        memory, splits = "memory" in added, tuple(name for name in added if name != "memory")
        if by and splits:
            raise UsageError("--columns splits the time of all steps; leave --by step out, or name steps by --steps")
        operations = self._operations((*NEEDS["layers"], *(NEEDS["memory"] if memory else ())), cpu_only=True)
        from nvprof_kit._analysis.attribution.attribution import Operations
        from nvprof_kit._analysis.layers.layers import layers
        from nvprof_kit._trace.flops_file import find_flops, read_flops
        from nvprof_kit._trace.jobs.finding import of_process

        if process is not None:
            operations = Operations(of_process(operations.trace, self.path, process), self._kernel_rules)
        result = layers(operations, steps=_steps(steps), by_step=by == "step", memory=memory, splits=splits)
        sources, counts = self.sources, find_flops(self.path)
        if counts is not None and "step" not in result.rows:
            from nvprof_kit._analysis.flops.work import with_limits

            try:
                result = with_limits(result, operations, read_flops(counts))
                sources = (*sources, counts, *(result.peaks.files if result.peaks else ()))
            except CaptureError as error:  # the times are complete without limits
                result = replace(result, warnings=(*result.warnings, Issue.of("counts", 0.0, error=error)))
        return replace(result, sources=sources, depth=depth).selected(**rows)

    def breakdown(
        self, view: BreakdownView | None = None, *, steps: Steps = None, **rows: Unpack[RowOptions]
    ) -> Breakdown:
        """Split the time of each step on each GPU into compute, exposed communication, exposed copies and idle time.

        Exposed means not overlapped by compute, as in HTA's communication-computation overlap. Idle time is split by
        cause. All times are int64 nanoseconds.

        Args:
            view: The table to print and to return from `Breakdown.to_frame`. [default: all, and steps]
            steps: As in `layers`.
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            UsageError: The view is unknown, or none of the requested steps is in the capture.
        """
        require_choice(view, get_args(BreakdownView), "view")
        operations = self._operations(NEEDS["breakdown"])
        from nvprof_kit._analysis.breakdown.breakdown import breakdown

        result = breakdown(operations, _steps(steps))
        return replace(result, sources=self.sources, view=view).selected(**rows)

    def summary(
        self,
        view: SummaryView | Sequence[SummaryView] = (),
        *,
        by: Literal["step"] | None = None,
        sort: str = "",
        top: int | None = None,
        steps: Steps = None,
    ) -> Summary:
        """Summarize the capture in up to eight views.

        Each row has the number of calls, and total, avg, max, min, p50, p95 (nanoseconds) and ratio of CPU and GPU
        time.

        Args:
            view: A view. Repeatable. [default: all]
            by: One set of rows per step, instead of one over all steps.
            sort: Column to sort by, in descending order, named as in csv: gpu_p95_ns, calls, ...
            top: Maximum number of rows of each printed view. [default: 12]
            steps: As in `layers`.

        Raises:
            UsageError: A view or column is unknown, or none of the requested steps is in the capture.
        """
        views = (view,) if isinstance(view, str) else tuple(view)
        for name in views:
            require_choice(name, get_args(SummaryView), "view")
        require_choice(by, ("step",), "by")
        chosen = _steps(steps)
        from nvprof_kit._analysis.attribution.steps import ALL_STEPS

        needed = NEEDS["kernels" if set(views) == {"kernel"} and chosen == ALL_STEPS else "summary"]
        operations = self._operations(set(needed) - ({"duration_ns"} if "calls" in self._read else set()))
        from nvprof_kit._analysis.summary.summary import summary

        result = summary(operations, views, by_step=by == "step", sort=sort, steps=chosen)
        if sort and not any(sort in table for table in result.views.values()):
            columns = dict.fromkeys(str(name) for table in result.views.values() for name in table)
            raise UsageError(f"--sort {sort}: no such column; available: {', '.join(columns)}")
        return replace(result, sources=self.sources).selected(top=top)

    def kernels(self, *, sort: str = "", top: int | None = None, steps: Steps = None) -> Summary:
        """The kernels with their class, calls and times, the costliest first: the view ``kernel`` of `summary`."""
        return self.summary("kernel", sort=sort, top=top, steps=steps)

    def advise(self, *, steps: Steps = None, job: Judged | None = None, **rows: Unpack[RowOptions]) -> Advice:
        """List what could be made faster, each with its evidence and a fix, ranked by the time it could save.

        Args:
            steps: As in `layers`.
            job: The run that this capture is a rank of. Its slowest rank is then reported first, and time spent waiting
                for that rank is not counted as a possible saving in communication.
            rows: Which findings to print and write, as in `Result.selected`.

        Raises:
            UsageError: None of the requested steps is in the capture.
        """
        operations = self._operations(NEEDS["advise"])
        from nvprof_kit._analysis.advise.advise import advise
        from nvprof_kit._trace.flops_file import find_flops

        slowest = job.verdict.finding() if job is not None else None
        limits = None
        if find_flops(self.path):
            with suppress(CaptureError):  # the other findings need no counts
                limits = self.flops(steps=steps)
        result = advise(operations, _steps(steps), slowest=slowest, limits=limits)
        return replace(result, sources=self.sources).selected(**rows)

    def flops(
        self,
        counts: str | Path | None = None,
        *,
        peak: Mapping[str, float] | None = None,
        depth: int | None = None,
        steps: Steps = None,
        **rows: Unpack[RowOptions],
    ) -> Flops:
        """Floating point operations, achieved FLOP/s and model FLOPs utilization (MFU) of each layer.

        MFU is achieved FLOP/s divided by the GPU's peak, as defined in the PaLM paper (arXiv:2204.02311).

        Args:
            counts: A file written by `nvprof_kit.count_flops`. The default is ``NAME.flops.json`` next to the capture;
                without that file, the input shapes of a PyTorch trace recorded with ``record_shapes=True`` are used.
            peak: Peak of the GPU in operations per second by data type, such as ``{"bf16": 989e12}``, which precedes
                the built-in table. On the command line bf16=989e12. Repeatable.
            depth: Levels of the model in the printed table. [default: all]
            steps: As in `layers`.
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: No counts were found, or the file is damaged.
            UsageError: None of the requested steps is in the capture.
        """
        from nvprof_kit._trace.flops_file import find_flops, flops_beside, flops_of_rank, read_flops

        options: dict[str, Any] = {"peaks": peak or {}, "steps": _steps(steps)}
        file = find_flops(self.path) if counts is None else flops_of_rank(counts, self.path)
        flop_counts = None if file is None else read_flops(file)  # first: it tells of a mistake at once
        operations = self._operations((*NEEDS["flops"], *(["shapes"] if file is None else [])))
        if file is None and (operations.trace.shapes is None or operations.trace.shapes.empty):
            flops_beside(self.path)  # says what is missing
        from nvprof_kit._analysis.flops.flops import flops

        answer = flops(operations, flop_counts, **options)
        sources = (*self.sources, *([] if file is None else [file]), *(answer.peaks.files if answer.peaks else ()))
        return replace(answer, sources=sources, depth=depth).selected(**rows)

    def metrics(self, *, depth: int | None = None, steps: Steps = None, **rows: Unpack[RowOptions]) -> Metrics:
        """How busy each layer keeps SMs, Tensor Cores, DRAM, NVLink and PCIe, from nsys GPU Metrics samples.

        Figures are percentages of the maximum throughput, as in nsys's GPU Metrics rows. A layer with fewer than 20
        samples has none.

        Args:
            depth: Levels of the model in the printed table. [default: all]
            steps: As in `layers`.
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: The capture has no GPU Metrics samples (``nsys profile --gpu-metrics-device``).
            UsageError: None of the requested steps is in the capture.
        """
        operations = self._operations(NEEDS["metrics"])
        from nvprof_kit._analysis.metrics import metrics

        answer = metrics(operations, steps=_steps(steps))
        return replace(answer, sources=self.sources, depth=depth).selected(**rows)

    def diff(
        self,
        new: Capture | str | Path | Sequence[Capture | str | Path],
        *,
        base: Sequence[Capture | str | Path] = (),
        fail_on: Sequence[str] = (),
        allow_undecided: bool = False,
        run_noise: float | None = None,
        steps: Steps = None,
        anyway: bool = False,
        view: Literal["rows", "kernels"] = "rows",
        **rows: Unpack[RowOptions],
    ) -> Diff:
        """Compare with another capture: what became slower or faster.

        A difference counts as a change only if it exceeds the noise between steps and between runs.

        Args:
            new: The other capture, or several runs of the other program. Paths are opened with this capture's rules and
                domain.
            base: Further runs of this capture's program.
            fail_on: Gates, such as step:+5%: whether the target became slower by more. `Diff.held` says if all hold.
                Repeatable.
            allow_undecided: Whether a gate holds if the captures are too noisy to decide it.
            run_noise: Standard deviation of GPU time between runs of one program, in %: the least where several runs a
                side measure it [default: 0.75], what is assumed where a side has one run [default: 2].
            steps: As in `layers`.
            anyway: Compare captures that would be refused; the reason becomes a warning.
            view: The table that `Diff.to_frame` returns.
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: The captures cannot be compared: different GPU, tool or part of the loop, or too few steps.
            UsageError: A gate matches no row, or none of the requested steps is in a capture.
        """
        require_choice(view, ("rows", "kernels"), "view")
        gates = [parse_gate(limit) for limit in fail_on]
        news = [new] if isinstance(new, (Capture, str, Path)) else new
        sides = [
            [capture if isinstance(capture, Capture) else self._like(capture) for capture in side]
            for side in ((self, *base), news)
        ]
        before, after = ([capture._operations(NEEDS["diff"]) for capture in side] for side in sides)
        from nvprof_kit._analysis.diff.diff import diff

        result = diff(
            before,
            after,
            gates,
            steps=_steps(steps),
            run_noise=None if run_noise is None else _in_range("run_noise", run_noise) / 100,
            allow_undecided=allow_undecided,
            anyway=anyway,
        )
        sources = tuple(source for side in sides for capture in side for source in capture.sources)
        return _with_work(replace(result, sources=sources, view=view)).selected(**rows)

    def plot(self, *, depth: int | None = None, steps: Steps = None) -> Plot:
        """Draw one step over time: layers above the GPU's streams, with idle gaps.

        The colors are those that readers with color blindness can tell apart.

        Args:
            depth: Levels of the model to draw. [default: all]
            steps: As in `layers`; the step of median length among them is drawn.

        Raises:
            UsageError: None of the requested steps is in the capture.
        """
        require_positive(depth, "depth")
        drawn, info = self._timeline(_steps(steps), typical=True)
        from nvprof_kit._report.plots.timeline import timeline_figure

        return Plot(timeline_figure(drawn, info.gpus, depth), drawn.ops, info.warnings, sources=self.sources)

    def report(self, other: Capture | str | Path | None = None, *, steps: Steps = None) -> Document:
        """Make one self-contained HTML page: findings, layers, timeline of the steps, kernels, idle causes, warnings.

        Findings and idle causes are those of captures with up to 200,000 GPU operations.

        Args:
            other: A capture to compare with this one; the page then has both.
            steps: As in `layers`; the timeline has only these. [default: all steps but warm-up, on the timeline all]

        Returns:
            The page, which loads nothing from the network; `Document.save` writes it. If a FLOP count next to a capture
            does not match the capture, a warning says so.
        """
        captures = [self] if other is None else [self, other if isinstance(other, Capture) else self._like(other)]
        sheets = [capture._sheet(_steps(steps), len(captures)) for capture in captures]
        from nvprof_kit._report.page.page import report_page

        sources = tuple(source for capture in captures for source in capture.sources)
        warnings = as_issues("flops", [warning for _, unfit in sheets for warning in unfit])
        return Document(report_page([sheet for sheet, _ in sheets]), (".html", ".htm"), sources, warnings)

    def export(self, *, data_format: TraceForm = "json.gz", steps: Steps = None) -> Document:
        """Make a trace for the Perfetto UI, with layers, phases, streams and idle gaps as tracks.

        Args:
            data_format: Plain or gzipped JSON; the UI opens both.
            steps: Include only these steps, and what ran between consecutive ones. [default: the whole capture]

        Raises:
            UsageError: None of the requested steps is in the capture.
        """
        require_choice(data_format, get_args(TraceForm), "data_format")
        timeline, info = self._timeline(_steps(steps))
        from nvprof_kit._report.export import SUFFIXES, trace_events

        content = partial(trace_events, timeline, info, data_format)
        return Document(content, SUFFIXES[data_format], self.sources, info.warnings)

    def _timeline(self, steps: StepOptions, *, typical: bool = False) -> tuple[Timeline, CaptureInfo]:
        """What ran in some steps, or in the whole capture; or in a typical one of the steps."""
        operations = self._operations(NEEDS["timeline"])
        from nvprof_kit._analysis.attribution.steps import chosen_steps, step_times, typical_step
        from nvprof_kit._analysis.timeline import timeline

        trace, attribution = operations.trace, operations.attribution
        number, chosen = attribution.ranges.steps, None
        if steps.selects:
            chosen = chosen_steps(steps, number, str(self.path))
        if typical and len(number):
            times = step_times(trace, attribution)
            chosen = times.index == typical_step(times if chosen is None else times[chosen])
        return timeline(trace, attribution, chosen), trace.info

    def ncu_plan(
        self,
        *,
        share: float = 0.9,
        layer: str = "",
        every_layer: bool = False,
        set: SectionSet = "basic",
        script: str | Path | None = None,
        **rows: Unpack[RowOptions],
    ) -> NcuPlan:
        """Choose the fewest kernel launches that represent most of the GPU time, to measure them with Nsight Compute.

        If counts lie beside the capture, they represent the GPU time above the least time for the counted work.

        Args:
            share: Fraction of that time to represent, above 0 and at most 1.
            layer: Only this layer and the layers inside it, such as model.layers.3.
            every_layer: Reach the share in each block of the model, not only overall.
            set: Section set of ncu (``ncu --set``).
            script: Write the script that measures the kernels to this file, as `NcuPlan.save_script` does.
            rows: Which rows to print and write, as in `Result.selected`.

        Raises:
            CaptureError: The capture lacks launch configurations, no kernel matches ``layer``, or the
                counts are damaged.
            UsageError: The share cannot be reached, or the section set is unknown.
        """
        from nvprof_kit._analysis.kernels.signatures import NEEDED as FOR_METRICS
        from nvprof_kit._trace.flops_file import find_flops, read_flops

        require_choice(set, get_args(SectionSet), "set")
        _in_range("share", share, 1)
        operations = self._operations(FOR_METRICS)
        file = find_flops(self.path)
        counts = None if file is None else read_flops(file)
        from nvprof_kit._analysis.ncu.plan import plan

        trace, attribution = operations.trace, operations.attribution
        answer = plan(trace, attribution, counts, share=share, layer=layer, every_layer=every_layer)
        sources = (*self.sources, *([] if file is None else [file]))
        answer = replace(answer, sources=sources, section_set=set)
        if script is not None:
            answer.save_script(script)
        return answer.selected(**rows)

    # ---------------------------------------------------------------- any other question

    @cached_property
    def tables(self) -> Tables:
        """The capture's tables by name, as DataFrames; each is read on first access."""
        return Tables(lambda optional: self._operations(optional, cpu_only=True), lambda: self._operators)

    def sql(self, query: str) -> pd.DataFrame:
        """Query `tables` in SQL, with an in-memory DuckDB that has no access to files or the network.

        Args:
            query: One statement in DuckDB's SQL dialect that only reads, such as SELECT, WITH ... SELECT, DESCRIBE,
                SUMMARIZE or EXPLAIN. The tables are those of `tables`, including ``operations`` with the layer of each
                operation; ``SHOW TABLES`` lists them.

        Raises:
            UsageError: The query is invalid, does not only read, or accesses files or the network.
        """
        return run_query(query, self.tables)

    # ---------------------------------------------------------------- what is read

    def _like(self, path: str | Path) -> Capture:
        """Open another capture with the rules and domain of this one."""
        capture = Capture(path, rules=self._rules, domain=self.domain, model=self._model_file)
        capture._rule_files = self._rule_files
        return capture

    def _trace(self, optional: Collection[str] = ()) -> Trace:
        """The capture's tables, with these optional columns and tables."""
        return self._operations(optional).trace

    def _operations(self, optional: Collection[str] = (), *, cpu_only: bool = False) -> Operations:
        """The attributed operations of a trace with these optional columns and tables.

        Raises:
            CaptureError: Nothing ran on a GPU, and ``cpu_only`` is not set.
        """
        missing = {*optional} - self._read
        if self._attributed_ops is None:
            from nvprof_kit._trace.open import open_capture

            missing |= {"name", "stream"} if self._graphs is not None else set()
            trace = open_capture(self.path, domain=self.domain, optional=missing, cpu_only=True)
            from nvprof_kit._analysis.attribution.attribution import Operations
            from nvprof_kit._analysis.attribution.ranges import translated

            self._operators = trace.operators
            if self._graphs is not None:
                from nvprof_kit._analysis.foreign.replays import NEEDED as FOR_REPLAYS
                from nvprof_kit._analysis.foreign.replays import name_replays

                trace = name_replays(trace, open_capture(self._graphs, optional=FOR_REPLAYS, cpu_only=True))
            trace = translated(trace, self._rules)
            if self._model is not None:
                from nvprof_kit._analysis.structure.model_config import name_blocks

                trace = name_blocks(trace, self._model)
            self._attributed_ops = Operations(trace, self._kernel_rules)
            self._attributed_ops.is_last_question = self.is_last_question
        elif missing:
            from nvprof_kit._trace.open import open_more

            if self.path.suffix == ".xz" or not self._attributed_ops.trace.info.tool.startswith("nsys"):
                missing = optional_columns() - self._read  # it has to be unpacked or parsed whole again: once is enough
            self._attributed_ops.trace = open_more(self._attributed_ops.trace, domain=self.domain, optional=missing)
        self._read |= missing
        if (reason := self._attributed_ops.trace.info.no_ops_reason) and not cpu_only:
            raise CaptureError(f"{self.path}: {reason}; `layers` still shows CPU times")
        return self._attributed_ops

    def _sheet(self, steps: StepOptions, of: int) -> tuple[Sheet, list[str]]:
        """This capture on a page of several, and why it has no MFU although a FLOP count exists."""
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        is_large = sum(file.stat().st_size for file in files) > LARGE_BYTES
        of_findings = (*NEEDS["page"], *NEEDS["advise"])
        operations = self._operations(NEEDS["page"] if is_large else of_findings)
        with_findings = len(operations.trace.ops) <= MANY_OPERATIONS
        if with_findings:
            operations = self._operations(of_findings)
        from nvprof_kit._report.page.page import sheet_of
        from nvprof_kit._trace.flops_file import find_flops

        flops, unfit = None, []
        try:
            flops = self.flops(steps=steps) if find_flops(self.path) else None
        except CaptureError as error:  # the page is complete without MFU, which is optional
            unfit = [f"{error}; the page has no MFU"]
        return sheet_of(operations, steps, flops=flops, with_findings=with_findings, of=of), unfit


def _with_work(result: Diff) -> Diff:
    """Add what the files of counts beside the first capture of each side tell; a damaged one is a warning."""
    from nvprof_kit._analysis.diff.diff import with_work
    from nvprof_kit._analysis.flops.work import work_per_step
    from nvprof_kit._trace.flops_file import find_flops, read_flops

    files = [(info, file) for info in (result.base[0], result.new[0]) if (file := find_flops(info.path))]
    if len(files) < 2 or result.unit != "step":
        return result
    layers = result.rows[result.rows["level"] == "layer"]
    rows = {*zip(layers["layer"], layers["phase"], strict=True)}
    try:
        base, new = (work_per_step(read_flops(file), info, rows) for info, file in files)
    except CaptureError as error:
        return replace(result, warnings=(*result.warnings, Issue.of("counts:work", 0.0, error=error)))
    if not base or not new:
        return result
    return replace(with_work(result, (base, new)), sources=(*result.sources, *(file for _, file in files)))


def _steps(steps: Steps) -> StepOptions:
    """The steps that are asked for."""
    from nvprof_kit._analysis.attribution.steps import StepOptions

    return StepOptions.of(steps)


def _in_range(name: str, value: float, highest: float | None = None) -> float:
    """A number above 0 and at most the highest, or 0 or more if there is none."""
    if math.isfinite(value) and (value >= 0 if highest is None else 0 < value <= highest):
        return value
    limits = "0 or more" if highest is None else f"above 0 and at most {highest:g}"
    raise UsageError(f"--{name.replace('_', '-')} {value:g}: needed a finite number, {limits}")


def domain_of(rules: Rules | None, domain: str | None = None) -> str:
    """The NVTX domain to read: the argument, else the domain of the rules, else ``nvprof_kit``."""
    chosen = rules.domain if domain is None and rules is not None else domain
    return DOMAIN if chosen is None else chosen


def read_rules(named: str | Path | Rules | None) -> Rules | None:
    """The rules of a preset or a file, if they are not read yet.

    Raises:
        UsageError: The name is neither a preset nor a file, or the file is invalid or cannot be read.
    """
    if not isinstance(named, (str, Path)):
        return named
    from nvprof_kit._analysis.foreign.rules import parse_rules, preset, presets

    if str(named) in presets():
        return preset(str(named))
    if not Path(named).exists():
        raise UsageError(f"--rules {named}: no such file, and no preset; available: {', '.join(presets())}")
    try:
        text = read_packed(Path(named)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--rules {named}: cannot read it: {reason}") from None
    return parse_rules(text, str(named))
