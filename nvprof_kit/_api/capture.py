"""The front door: a capture that is opened once and asked many things.

What a question needs of the file is read when it is first asked; who owns each operation is found once, for all of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nvprof_kit.errors import CaptureError, UsageError
from nvprof_kit.names import DOMAIN

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from nvprof_kit._analysis.attribution.operations import Operations
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._analysis.foreign.rules import Rules
    from nvprof_kit._analysis.kernels.classes import Rule
    from nvprof_kit._analysis.layers.layers import LayersResult
    from nvprof_kit._analysis.timeline import Timeline
    from nvprof_kit._api.job import Job
    from nvprof_kit._report.page.data import Sheet
    from nvprof_kit._results.advice import Advice
    from nvprof_kit._results.breakdown import Breakdown
    from nvprof_kit._results.diff import Diff
    from nvprof_kit._results.document import Document
    from nvprof_kit._results.flops import Flops
    from nvprof_kit._results.layers import Layers
    from nvprof_kit._results.metrics import Metrics
    from nvprof_kit._results.ncu import NcuPlan
    from nvprof_kit._results.plot import Plot
    from nvprof_kit._results.summary import Summary
    from nvprof_kit._trace.schema import CaptureInfo, Trace

    Drawn = tuple[Figure, pd.DataFrame, tuple[str, ...]]
    """A picture, the figures behind it, and what is uncertain about it."""

SummaryView = Literal["device", "overview", "model", "distributed", "operator", "kernel", "memory", "user"]
BreakdownView = Literal["steps", "idle", "communication", "copies", "launches", "queue", "critical-path"]
PlotView = Literal["layers", "timeline", "steps", "tree", "queue"]
TraceForm = Literal["pftrace", "json.gz", "json"]
StacksForm = Literal["pprof", "folded"]

MANY_OPERATIONS = 200_000
"""From here on the findings of a report take so long that they have to be asked for."""

LARGE_BYTES = 100_000_000
"""Of a larger file what findings need is not read before its operations are counted."""

ATTRIBUTED = "operations"
"""Name of the table of the operations with their owners, beside those of `nvprof_kit._trace.schema.TABLES`."""


def open(  # what the package offers as `nvprof_kit.open`
    path: str | Path,
    *,
    rules: str | Path | None = None,
    domain: str | None = None,
    kernel_rules: str | Path | None = None,
) -> Capture:
    """Open a capture.

    Args:
        path: An nsys ``.sqlite`` or ``.nsys-rep``, or a PyTorch trace, ``.json`` or ``.json.gz``; each also packed as
            ``.xz``. It is never written to.
        rules: How the captured program names its ranges: the name of a preset (``megatron-lm``, ``nemo``, ``vllm``, …)
            or a TOML file. None where they are nvprof_kit's own.
        domain: NVTX domain of the ranges, several by commas; '' is the default domain. None for that of the rules, else
            nvprof_kit's own.
        kernel_rules: A TOML file of rules for kernel classes, asked before the package's.

    Returns:
        The capture. Nothing of it is read before the first question.

    Raises:
        CaptureError: There is no such file.
        UsageError: No preset and no file bears the rules' name, or a rule is wrong.
    """
    return Capture(path, rules=rules, domain=domain, kernel_rules=kernel_rules)


class Capture:
    """A capture. See `open` for the arguments.

    Each question is a method. It reads what it needs, once for all questions, and raises `CaptureError` where the file
    is damaged or lacks what is asked for. Who owns each operation is computed once.

    Attributes:
        path: The file.
        domain: NVTX domain of the ranges.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rules: str | Path | None = None,
        domain: str | None = None,
        kernel_rules: str | Path | None = None,
    ) -> None:
        self.path = Path(path)
        self._rules = read_rules(rules)
        self._kernel_rules = read_kernel_rules(kernel_rules)
        self.domain = domain_of(self._rules, domain)
        self._rule_files = tuple(Path(one) for one in (rules, kernel_rules) if one is not None and Path(one).is_file())
        self._read: set[str] = set()
        self._held: Operations | None = None
        self._operators: pd.DataFrame | None = None
        try:
            self.path.stat()
        except FileNotFoundError:
            raise CaptureError(f"{path}: no such file") from None
        except OSError:  # the reader says what is wrong
            pass

    def __repr__(self) -> str:
        """Which capture this is."""
        return f"<nvprof_kit.Capture {str(self.path)!r}>"

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that it is made of: nothing is ever written over one of them."""
        return (self.path, *self._rule_files)

    @property
    def info(self) -> CaptureInfo:
        """What the capture says of itself: tool, GPUs, processes, warnings."""
        return self._operations(cpu_only=True).trace.info

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what may be missing or distorted, each with what to do."""
        return self.info.warnings

    # ---------------------------------------------------------------- questions

    def layers(
        self,
        *,
        by_step: bool = False,
        memory: bool = False,
        depth: int | None = None,
        steps: StepOptions | None = None,
        splits: Sequence[Literal["class", "phase"]] = (),
    ) -> Layers:
        """What each layer costs, forward and backward, and what lies outside every layer.

        Args:
            by_step: A row per step, layer and phase instead of per layer and phase.
            memory: The memory of each layer too, where the capture tells it.
            depth: Levels of the model that are printed and drawn; None for all.
            steps: Which steps to look at; None gives the rows of the whole capture, and prints all steps but warm-up.
            splits: Columns into which the time is split: by kernel ``class``, or by ``phase`` of the loop, as prefill
                and decode; not by step.

        Raises:
            CaptureError: The memory was asked for, and the capture tells nothing of it.
            UsageError: None of the steps asked for is in the capture, or time is to be split by step too.
        """
        if by_step and splits:
            raise UsageError("--columns splits the time of all steps; leave --by step out, or name steps by --steps")
        from nvprof_kit._analysis.layers.layers import OPTIONAL, LayersOptions, layers
        from nvprof_kit._results.layers import Layers
        from nvprof_kit._trace.schema import MEMORY_TABLES

        known = self._operations((*OPTIONAL, *(MEMORY_TABLES if memory else ())), cpu_only=True)
        options = LayersOptions(steps=steps or _all_steps(), by_step=by_step, memory=memory, splits=tuple(splits))
        result = layers(known.trace, options, known.attribution)
        return Layers(**vars(result), sources=self.sources, depth=depth)

    def breakdown(
        self, view: BreakdownView | None = None, *, top: int = 10, steps: StepOptions | None = None
    ) -> Breakdown:
        """Where the time of each step goes on each GPU: compute, exposed communication and copies, idle, and why idle.

        Args:
            view: The one table to print and to give; None prints all, and gives ``steps``.
            top: Lines of a table that are printed.
            steps: Which steps to look at; None for the whole capture.

        Raises:
            UsageError: None of the steps asked for is in the capture.
        """
        from nvprof_kit._analysis.breakdown.breakdown import OPTIONAL, breakdown
        from nvprof_kit._results.breakdown import Breakdown

        known = self._operations(OPTIONAL)
        result = breakdown(known.trace, self._kernel_rules, steps or _all_steps(), known)
        return Breakdown(**vars(result), sources=self.sources, view=view, top=top)

    def summary(
        self,
        *views: SummaryView,
        by_step: bool = False,
        sort: str = "",
        top: int = 12,
        steps: StepOptions | None = None,
    ) -> Summary:
        """Eight views, with calls, and of CPU and GPU time total, avg, max, min, p50, p95 and ratio.

        Args:
            views: Which of them; all by default.
            by_step: Rows for each step instead of over all.
            sort: Column to sort by, descending; each view's own order by default.
            top: Lines of a view that are printed.
            steps: Which steps to look at; None for the whole capture.

        Raises:
            UsageError: No view has this name, none this column, or none of the steps asked for is in the capture.
        """
        from nvprof_kit._analysis.summary.summary import VIEWS, SummaryOptions, needed, summary
        from nvprof_kit._results.summary import Summary

        for view in views:
            _among(view, VIEWS, "view of a summary")
        chosen = steps or _all_steps()
        known = self._operations(set(needed(views, chosen)) - ({"duration_ns"} if "calls" in self._read else set()))
        options = SummaryOptions(views, by_step, sort, self._kernel_rules, chosen)
        result = summary(known.trace, options, known)
        if sort and not any(sort in table for table in result.views.values()):
            columns = dict.fromkeys(str(name) for table in result.views.values() for name in table)
            raise UsageError(f"--sort {sort}: no such column; there are {', '.join(columns)}")
        return Summary(**vars(result), sources=self.sources, top=top)

    def advise(self, *, top: int = 10, steps: StepOptions | None = None, job: Job | None = None) -> Advice:
        """What costs time and could be changed, with the evidence, ranked by what it could save.

        Args:
            top: Findings that are printed.
            steps: Which steps to look at; None for all but warm-up.
            job: All ranks of the run, where this capture is one of them: the slowest is named first, and what is waited
                for it is no saving of communication.

        Raises:
            UsageError: None of the steps asked for is in the capture.
        """
        from nvprof_kit._analysis.advise.advise import OPTIONAL, advise
        from nvprof_kit._results.advice import Advice

        known = self._operations(OPTIONAL)
        late = job.verdict if job is not None else None
        result = advise(known.trace, self._kernel_rules, steps or _all_steps(), known, late)
        return Advice(**vars(result), sources=self.sources, top=top)

    def flops(
        self,
        counts: str | Path | None = None,
        *,
        peaks: Mapping[str, float] | None = None,
        depth: int | None = None,
        steps: StepOptions | None = None,
    ) -> Flops:
        """Floating point operations of each layer, what it gets out of the GPU, and its part of the peak (MFU).

        Args:
            counts: What `nvprof_kit.count_flops` wrote; by default ``NAME.flops.json`` beside the capture, and where
                there is none the shapes in a PyTorch trace that was recorded with them.
            peaks: Peak of the GPU in operations a second by type of number, ``{"bf16": 989e12}``, in place of what the
                package knows.
            depth: Levels of the model that are printed; None for all.
            steps: Which steps to look at; None for all but warm-up.

        Raises:
            CaptureError: There is no file of counts, or it is damaged.
            UsageError: None of the steps asked for is in the capture.
        """
        from nvprof_kit._analysis.flops.flops import FlopsOptions, flops
        from nvprof_kit._results.flops import Flops
        from nvprof_kit._trace.flops_file import find_flops, flops_beside, flops_of_rank, read_flops

        options = FlopsOptions(peaks or {}, steps or _all_steps())
        file = find_flops(self.path) if counts is None else flops_of_rank(counts, self.path)
        if file is None:
            known = self._operations(("name", "loads", "shapes"))
            if known.trace.shapes is None or known.trace.shapes.empty:
                flops_beside(self.path)  # says what is missing
            result = flops(known.trace, None, options, known)
            return Flops(**vars(result), sources=self.sources, depth=depth)
        counted = read_flops(file)  # first: it tells of a mistake at once
        known = self._operations(("name", "loads"))
        result = flops(known.trace, counted, options, known)
        return Flops(**vars(result), sources=(*self.sources, file), depth=depth)

    def metrics(self, *, floor: float = 20.0, depth: int | None = None, steps: StepOptions | None = None) -> Metrics:
        """How busy each layer keeps SMs, tensor cores, DRAM, NVLink and PCIe, as nsys sampled it.

        Args:
            floor: Samples below which a layer has no figures.
            depth: Levels of the model that are printed; None for all.
            steps: Which steps to look at; None for the whole capture.

        Raises:
            CaptureError: The capture has no samples of GPU metrics.
            UsageError: None of the steps asked for is in the capture.
        """
        from nvprof_kit._analysis.metrics import MetricsOptions, metrics
        from nvprof_kit._results.metrics import Metrics

        known = self._operations(("samples",))
        result = metrics(known.trace, MetricsOptions(floor, steps=steps or _all_steps()), known.attribution)
        return Metrics(**vars(result), sources=self.sources, depth=depth)

    def diff(
        self,
        new: Capture | str | Path | Sequence[Capture | str | Path],
        *,
        base: Sequence[Capture | str | Path] = (),
        fail_on: Sequence[str] = (),
        allow_undecided: bool = False,
        run_noise: float = 0.0075,
        communication: bool = False,
        steps: StepOptions | None = None,
        min_steps: int = 2,
        anyway: bool = False,
        view: Literal["rows", "kernels"] = "rows",
        top: int = 15,
    ) -> Diff:
        """What became slower or faster in another capture; the noise of steps and runs decides what is a change.

        Args:
            new: The other capture, or several runs of that program; a path is opened with the rules and the domain of
                this one.
            base: More runs of this capture's program.
            fail_on: Gates, as in ``"step:+5%"``; `Diff.held` says whether they all held.
            allow_undecided: Whether a gate holds that the captures cannot decide.
            run_noise: Least standard deviation from run to run of one program, relative.
            communication: Whether layers and phases count communication.
            steps: Which steps of each to compare; None for all but warm-up.
            min_steps: Fewest steps of each to compare.
            anyway: Compare captures that should not be compared.
            view: The table that `Diff.to_frame` gives.
            top: Lines of a table that are printed.

        Raises:
            CaptureError: They cannot be compared: another GPU, another tool, another part of the loop, too few steps.
            UsageError: A gate limits nothing that is there, or none of the steps asked for is in a capture.
        """
        from nvprof_kit._analysis.diff.diff import OPTIONAL, DiffOptions, diff
        from nvprof_kit._analysis.diff.gates import parse_gate
        from nvprof_kit._results.diff import Diff

        gates = [parse_gate(limit) for limit in fail_on]
        news = [new] if isinstance(new, (Capture, str, Path)) else new
        sides = [
            [one if isinstance(one, Capture) else self._like(one) for one in side] for side in ((self, *base), news)
        ]
        options = DiffOptions(
            steps or _all_steps(),
            min_steps,
            run_noise=run_noise,
            communication=communication,
            allow_undecided=allow_undecided,
            anyway=anyway,
            own_rules=self._kernel_rules,
        )
        known = [[one._operations(OPTIONAL) for one in side] for side in sides]
        before, after = ([one.trace for one in side] for side in known)
        result = diff(before, after, gates, options, [*known[0], *known[1]])
        sources = tuple(source for side in sides for one in side for source in one.sources)
        return Diff(**vars(result), sources=sources, view=view, top=top)

    def plot(
        self,
        view: PlotView = "layers",
        *,
        depth: int | None = None,
        step: int | None = None,
        steps: StepOptions | None = None,
    ) -> Plot:
        """A picture, labelled and in colours that colour-blind readers tell apart.

        Args:
            view: ``layers``: a bar per layer, by phase. ``timeline``: a step in time, layers over the GPU's streams.
                ``steps``: a bar per step. ``tree``: the model, each layer as wide as its time. ``queue``: how many
                launched operations wait for the GPU.
            depth: Levels of the model; None for as many as can be read.
            step: Step of the timeline; None for the one of median length.
            steps: Which steps to draw, for the timeline to choose from; None for all but warm-up, with ``steps`` for
                all, and for ``layers`` and ``queue`` the whole capture.

        Raises:
            UsageError: No picture has this name, the capture has no such step, or no steps at all.
        """
        from nvprof_kit._results.plot import Plot

        draw = _among(view, {name: getattr(self, f"_draw_{name}") for name in _PLOTS}, "plot")
        if step is not None and view != "timeline":
            raise UsageError(f"--step is for --view timeline; {view} shows every step")
        chosen = steps or _all_steps()
        figure, rows, warnings = draw(depth, step, chosen)
        return Plot(view, figure, rows, warnings, sources=self.sources)

    def page(
        self,
        *others: Capture | str | Path,
        step: int | None = None,
        findings: bool | None = None,
        steps: StepOptions | None = None,
    ) -> Document:
        """One self-contained page: what to do, layers, every step in time, kernels, idle causes, warnings.

        Args:
            others: Captures to compare with this one, on the same page. It holds everything of the first ones, compares
                all, and says which it left out; it stays below 8 MB.
            step: The one step to show in time; None for all, to choose from.
            findings: Look for what to do and where each step's time goes; None looks in a capture of up to
                `MANY_OPERATIONS` operations.
            steps: Which steps the figures per step are of; None for all but warm-up.

        Returns:
            The page; `Document.save` writes it. Where flops were counted beside a capture and do not fit it, a warning
            says so.
        """
        from nvprof_kit._report.page.page import MAX_COMPARED, MAX_WHOLE, report_page
        from nvprof_kit._results.document import Document

        sheets: list[Sheet] = []
        compared: list[LayersResult] = []
        warnings: list[str] = []
        captures = [other if isinstance(other, Capture) else self._like(other) for other in (self, *others)]
        for one in captures[:MAX_COMPARED]:
            if len(sheets) < MAX_WHOLE:
                sheet, unfit = one._sheet(step, findings, steps)
                sheets.append(sheet)
                compared.append(sheet.layers)
                warnings += unfit
            else:
                compared.append(one.layers(steps=steps))
            if one is not self and one not in others:
                one._forget()  # a page of many captures holds no more than two
        absent = [str(one.path) for one in captures[MAX_COMPARED:]]
        sources = tuple(source for one in captures for source in one.sources)
        return Document(report_page(sheets, compared, absent), (".html", ".htm"), sources, tuple(warnings))

    def report(
        self,
        path: str | Path,
        *others: Capture | str | Path,
        step: int | None = None,
        findings: bool | None = None,
        steps: StepOptions | None = None,
    ) -> Path:
        """Write `page` to a file that ends in .html, to open in a browser; it loads nothing from any network."""
        return self.page(*others, step=step, findings=findings, steps=steps).save(path)

    def perfetto(self, *, step: int | None = None, form: TraceForm = "json.gz") -> Document:
        """A trace with layers, phases, streams and idle gaps as tracks, for the Perfetto UI and chrome://tracing.

        Args:
            step: Only what ran in this step; None for the whole capture.
            form: ``pftrace`` is Perfetto's own, the smallest; ``json`` and ``json.gz`` open in chrome://tracing too.

        Raises:
            UsageError: The capture has no such step.
        """
        from nvprof_kit._report.export.forms import TRACES, suffixes_of
        from nvprof_kit._results.document import Document

        shown, info = self._timeline(step)
        pieces = _among(form, TRACES, "form of a trace")
        return Document(lambda: pieces(shown, info), suffixes_of(form), self.sources)

    def _timeline(self, step: int | None) -> tuple[Timeline, CaptureInfo]:
        """What ran in a step, or in the whole capture."""
        from nvprof_kit._analysis.timeline import OPTIONAL, timeline

        known = self._operations(OPTIONAL)
        return timeline(known.trace, known.attribution, self._instance(step)), known.trace.info

    def pprof(self, *, step: int | None = None, form: StacksForm = "pprof") -> Document:
        """GPU time as stacks for viewers of flame graphs: parts of the module's path, phase, kernel.

        Args:
            step: Only what ran in this step; None for the whole capture.
            form: ``pprof`` for ``go tool pprof``, Pyroscope and Speedscope; ``folded`` for lines of text.

        Raises:
            UsageError: The capture has no such step.
        """
        from nvprof_kit._analysis.stacks import OPTIONAL, stacks
        from nvprof_kit._report.export.flame import folded, pprof
        from nvprof_kit._report.export.forms import STACKS, suffixes_of
        from nvprof_kit._results.document import Document

        _among(form, dict.fromkeys(STACKS), "form of stacks")
        known = self._operations(OPTIONAL)
        rows, ops = stacks(known, self._instance(step)), known.trace.ops
        length = int(ops["end_ns"].max() - ops["start_ns"].min()) if len(ops) else 0
        made = pprof(rows, known.trace.info, length) if form == "pprof" else folded(rows)
        return Document(made, suffixes_of(form), self.sources)

    def export(self, path: str | Path, *, step: int | None = None) -> Path:
        """Write `perfetto` or `pprof` to a file, as its suffix says: .pftrace, .perfetto-trace, .json.gz, .json,
        .pb.gz, .folded.

        Raises:
            UsageError: The file has another suffix, or the capture has no such step.
        """
        from nvprof_kit._report.export.forms import TRACES, form_of

        form: Any = form_of(Path(path))
        made = self.perfetto(step=step, form=form) if form in TRACES else self.pprof(step=step, form=form)
        return made.save(path)

    def _instance(self, step: int | None) -> int | None:
        """Which instance of a step its number means."""
        from nvprof_kit._analysis.attribution.step_times import instance_of, step_times

        if step is None:
            return None
        known = self._operations()
        return instance_of(step_times(known.trace, known.attribution), step, str(self.path))

    def ncu_plan(
        self,
        *,
        share: float = 0.9,
        layer: str = "",
        phase: str = "",
        every_layer: bool = False,
        section_set: str = "basic",
        rank: int | None = None,
        memory_gb: float = 1.0,
    ) -> NcuPlan:
        """The fewest kernels that stand for most of the GPU time, to be measured with Nsight Compute.

        Args:
            share: How much of the GPU time they are to stand for.
            layer: Only this layer and those in it.
            phase: Only this phase.
            every_layer: Reach the share in every block of the model, not only over all.
            section_set: ncu's set of sections.
            rank: Of a program of several ranks measure this one.
            memory_gb: GPU memory of the program, which ncu saves and restores; for the prediction of time.

        Raises:
            CaptureError: The capture does not say how its kernels were launched, or has none of what is asked for.
            UsageError: The share cannot be reached, or ncu has no such set.
        """
        from nvprof_kit._analysis.kernels.signatures import NEEDED
        from nvprof_kit._analysis.ncu.plan import PlanOptions, plan
        from nvprof_kit._results.ncu import NcuPlan

        known = self._operations(NEEDED)
        options = PlanOptions(share=share, layer=layer, phase=phase, every_layer=every_layer)
        made = plan(known.trace, options, known.attribution)
        how: dict[str, Any] = {"section_set": section_set, "rank": rank, "memory_gb": memory_gb}
        return NcuPlan(**vars(made), sources=self.sources, **how)

    # ---------------------------------------------------------------- any other question

    @cached_property
    def tables(self) -> Tables:
        """The capture's tables by name, as DataFrames; each is read when it is first asked for."""
        return Tables(self)

    def sql(self, query: str) -> pd.DataFrame:
        """The answer to a question in SQL over `tables`, by an in-memory DuckDB that sees nothing else.

        Args:
            query: A query of DuckDB's SQL; the tables are those of `tables`, ``operations`` with its owners among them.

        Raises:
            ToolError: DuckDB is not installed.
            UsageError: The query is wrong, or asks for files or the network.
        """
        from nvprof_kit._api.sql import answer

        return answer(query, self.tables)

    # ---------------------------------------------------------------- what is read

    def _like(self, path: str | Path) -> Capture:
        """Another capture, read as this one is."""
        made = Capture(path, domain=self.domain)
        made._rules, made._kernel_rules, made._rule_files = self._rules, self._kernel_rules, self._rule_files
        return made

    def _trace(self, needed: Collection[str] = ()) -> Trace:
        """The capture's tables, with these optional columns and tables."""
        return self._operations(needed).trace

    def _operations(self, needed: Collection[str] = (), *, cpu_only: bool = False) -> Operations:
        """The operations and who owns them, of a trace with these optional columns and tables.

        Raises:
            CaptureError: Nothing ran on a GPU, and the question is not of the CPU alone.
        """
        missing = {*needed} - self._read
        if self._held is None:
            from nvprof_kit._trace.open import open_capture

            trace = open_capture(self.path, domain=self.domain, optional=missing, cpu_only=True)
            from nvprof_kit._analysis.attribution.operations import Operations
            from nvprof_kit._analysis.foreign.translate import translate

            self._operators = trace.operators
            self._held = Operations(translate(trace, self._rules), self._kernel_rules)
        elif missing:
            from nvprof_kit._trace.open import open_more

            if self.path.suffix == ".xz" or not self._held.trace.info.tool.startswith("nsys"):
                missing = _everything() - self._read  # it has to be unpacked or parsed whole again: once is enough
            self._held.trace = open_more(self._held.trace, domain=self.domain, optional=missing)
        self._read |= missing
        if (lacks := self._held.trace.info.lacks) and not cpu_only:
            raise CaptureError(f"{self.path}: {lacks}; `layers` and `tables` tell the CPU's times")
        return self._held

    def _forget(self) -> None:
        """Give what was read back."""
        self._held, self._operators = None, None
        self._read.clear()

    def _sheet(self, step: int | None, findings: bool | None, steps: StepOptions | None) -> tuple[Sheet, list[str]]:
        """What the page shows of this capture, and why it lacks the MFU where it might have it."""
        from nvprof_kit._analysis.advise.advise import OPTIONAL, advise
        from nvprof_kit._analysis.breakdown.breakdown import breakdown
        from nvprof_kit._analysis.layers.layers import OPTIONAL as FOR_LAYERS
        from nvprof_kit._analysis.timeline import OPTIONAL as FOR_TIMELINE
        from nvprof_kit._report.page.data import sheet_of
        from nvprof_kit._trace.schema import MEMORY_TABLES

        chosen, large = steps or _all_steps(), self.path.stat().st_size > LARGE_BYTES
        few = (*FOR_TIMELINE, *FOR_LAYERS)
        known = self._operations((*(few if large else OPTIONAL), *MEMORY_TABLES))
        many = len(known.trace.ops) > MANY_OPERATIONS
        wanted = not many if findings is None else findings
        if wanted:
            known = self._operations((*OPTIONAL, *MEMORY_TABLES))
        trace = known.trace
        sheet = sheet_of(
            trace,
            step,
            advise(trace, self._kernel_rules, chosen, known) if wanted and trace.info.on_gpu else None,
            self._kernel_rules,
            steps=chosen,
            known=known,
            broken_down=breakdown(trace, self._kernel_rules, chosen, known) if wanted and len(trace.ops) else None,
            left_out=[] if wanted or findings is False else _not_looked_for(self.path),
        )
        from nvprof_kit._trace.flops_file import find_flops

        if find_flops(self.path) is None:
            return sheet, []
        try:
            return replace(sheet, flops=self.flops(steps=steps)), []
        except CaptureError as error:  # nobody asked for it: the page does without
            return sheet, [f"{error}; the page has no MFU"]

    # ---------------------------------------------------------------- what is drawn

    def _draw_layers(self, depth: int | None, _: int | None, steps: StepOptions) -> Drawn:
        result = self.layers(depth=depth, steps=steps)
        return result.figure(), result.rows, result.warnings

    def _draw_tree(self, depth: int | None, _: int | None, steps: StepOptions) -> Drawn:
        from nvprof_kit._report.plots.tree import tree_figure

        result = self.layers(steps=steps)
        return tree_figure(result, depth), result.tree, result.warnings

    def _draw_steps(self, _: int | None, __: int | None, steps: StepOptions) -> Drawn:
        from nvprof_kit._analysis.attribution.step_times import step_times
        from nvprof_kit._report.plots.steps import steps_figure

        result, known = self.layers(by_step=True, steps=steps), self._operations()
        if not result.summary.steps:
            raise UsageError(f"{self.path}: no steps; put nvprof_kit.step(number) around each step of the loop")
        times = step_times(known.trace, known.attribution)
        times = times[result.steps.shown] if steps.selects else times
        return steps_figure(result, times), times, result.warnings

    def _draw_queue(self, _: int | None, __: int | None, steps: StepOptions) -> Drawn:
        from nvprof_kit._report.plots.queue import queue_figure

        result = self.breakdown(steps=steps)
        return queue_figure(result), result.queue, result.warnings

    def _draw_timeline(self, depth: int | None, step: int | None, steps: StepOptions) -> Drawn:
        from nvprof_kit._analysis.attribution.step_times import instance_of, step_times, typical_step
        from nvprof_kit._analysis.timeline import OPTIONAL, timeline
        from nvprof_kit._report.plots.timeline import timeline_figure

        known = self._operations(OPTIONAL)
        times = step_times(known.trace, known.attribution)
        if steps.selects:
            from nvprof_kit._analysis.attribution.steps import chosen_steps

            times = times[chosen_steps(steps, times["step"].to_numpy(), str(self.path))]
        instance = typical_step(times) if step is None else instance_of(times, step, str(self.path))
        shown = timeline(known.trace, known.attribution, instance)
        return timeline_figure(shown, known.trace.info.gpus, depth), shown.ops, known.trace.info.warnings


_PLOTS: tuple[PlotView, ...] = ("layers", "timeline", "steps", "tree", "queue")


class Tables(Mapping[str, "pd.DataFrame"]):
    """The tables of a capture by name, with the columns of `nvprof_kit._trace.schema.TABLES`, and ``operations``: a row
    per operation of ``ops``, with ``layer``, ``phase``, ``step`` (missing outside steps), ``kernel_class`` and ``how``
    it was attributed.

    ``ranges`` are named as the rules of the capture say. A table that the capture has nothing of is there without rows.
    Times are int64 nanoseconds since the capture's zero.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._made: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        """A table.

        Raises:
            KeyError: There is no table of this name.
        """
        if name not in self._made:
            if name not in set(self):
                raise KeyError(f"{name!r}: no such table; there are {', '.join(self)}")
            self._made[name] = self._attributed() if name == ATTRIBUTED else self._raw(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        from nvprof_kit._trace.schema import TABLES

        return iter((*TABLES, ATTRIBUTED))

    def __len__(self) -> int:
        """How many there are."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """The names."""
        return f"<tables {', '.join(self)}>"

    def _raw(self, name: str) -> pd.DataFrame:
        from nvprof_kit._trace.frames import empty_frame
        from nvprof_kit._trace.schema import TABLES

        needed = _everything() - {*TABLES} if name == "ops" else _everything() & {name}
        trace = self._capture._operations(needed, cpu_only=True).trace
        table: pd.DataFrame | None = self._capture._operators if name == "operators" else getattr(trace, name)
        made: pd.DataFrame = empty_frame(name) if table is None else table
        return made

    def _attributed(self) -> pd.DataFrame:
        from nvprof_kit._analysis.attribution.operations import attributed

        ops = self["ops"]
        return attributed(self._capture._operations(cpu_only=True), ops)


def _not_looked_for(path: Path) -> list[str]:
    """What the page of a large capture has only when it is asked for."""
    return [
        f"what to do: nvprof-kit advise {path}",
        f"idle time and its causes, communication, copies and the critical path: nvprof-kit breakdown {path}",
        f"both on the page, which then takes longer: nvprof-kit report {path} --findings -o FILE.html",
    ]


def _everything() -> set[str]:
    """The optional columns and tables of a capture."""
    from nvprof_kit._trace.schema import OPS, TABLES

    always = {"ranges", "api", "ops", "graph_nodes", "operators"}
    return {name for name, column in OPS.items() if column.optional} | ({*TABLES} - always)


def _all_steps() -> StepOptions:
    """That no steps were asked for in particular."""
    from nvprof_kit._analysis.attribution.steps import ALL_STEPS

    return ALL_STEPS


def _among(name: str, known: Mapping[str, Any], what: str) -> Any:
    """What bears a name.

    Raises:
        UsageError: Nothing does.
    """
    if name not in known:
        raise UsageError(f"{name!r}: no such {what}; there are {', '.join(known)}")
    return known[name]


def domain_of(rules: Rules | None, domain: str | None = None) -> str:
    """The NVTX domain to read: what was asked for, else what the rules say, else our own."""
    said = rules.domain if domain is None and rules is not None else domain
    return DOMAIN if said is None else said


def read_rules(named: str | Path | None) -> Rules | None:
    """The rules of a preset's name or of a file.

    Raises:
        UsageError: No preset and no file bears the name, or the file is not what it should be.
    """
    if named is None:
        return None
    from nvprof_kit._analysis.foreign.rules import parse_rules, preset, presets
    from nvprof_kit._trace.packed import read_packed

    if str(named) in presets():
        return preset(str(named))
    try:
        text = read_packed(Path(named)).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"--rules {named}: no such file, and no preset; there are {', '.join(presets())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--rules {named}: cannot read it: {error}") from None
    return parse_rules(text, str(named))


def read_kernel_rules(path: str | Path | None) -> tuple[Rule, ...]:
    """The rules of a file, none without a file.

    Raises:
        UsageError: The file cannot be read, or a rule in it is wrong.
    """
    if path is None:
        return ()
    from nvprof_kit._analysis.kernels.classes import parse_rules
    from nvprof_kit._trace.packed import read_packed

    try:
        return parse_rules(read_packed(Path(path)).decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
