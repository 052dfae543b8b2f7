"""What to do: findings ranked by what they could save, each with its evidence from the capture.

Each rule of `nvprof_kit._findings.RULES` is a function that yields its findings from the evidence; the functions are in
`time_rules`, `work_rules` and `metric_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from nvprof_kit._analysis.advise import metric_rules as advice_metrics
from nvprof_kit._analysis.advise import time_rules as advice_time
from nvprof_kit._analysis.advise import work_rules as advice_work
from nvprof_kit._analysis.advise.evidence import Evidence, RankVerdict
from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._analysis.breakdown.breakdown import OPTIONAL as BREAKDOWN_OPTIONAL
from nvprof_kit._analysis.kernels.classes import Rule
from nvprof_kit._findings import Finding
from nvprof_kit._result.column import Column, Columns
from nvprof_kit._result.result import Result
from nvprof_kit._trace.schema import CaptureInfo, Trace
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.flops.flops import Flops

OPTIONAL = (*BREAKDOWN_OPTIONAL, "samples")
"""The optional columns that `nvprof_kit._trace.open.open_capture` must read."""

LOW = 0.5
"""What a saving of low confidence counts for in the order of the findings."""

_OF_HOST = ("launch", "host-busy", "sync", "allocation", "loading", "gc", "unstable-step")
_ONCE = "a CUDA graph is captured in these steps, which happens once: capture later steps to know"
"""What is said of these rules' findings where the host also captures a graph."""

FINDERS: Mapping[str, Callable[[Evidence], Iterator[Finding]]] = MappingProxyType(
    {
        "launch": advice_time.launch_bound,
        "slow-host-layer": advice_time.slow_host_in_layer,
        "sync": advice_time.sync_points,
        "dataloader": advice_time.dataloader,
        "host-busy": advice_time.host_busy,
        "allocation": advice_time.allocator,
        "loading": advice_time.loading,
        "gc": advice_time.garbage,
        "exposed-collectives": advice_time.exposed_collectives,
        "rank-wait": advice_time.rank_waits,
        "unstable-step": advice_time.unstable_step,
        "copies": advice_work.copies,
        "small-kernels": advice_work.small_kernels,
        "unfused-chains": advice_work.unfused_chains,
        "fp32-gemms": advice_work.fp32_gemms,
        "unfused-attention": advice_work.unfused_attention,
        "logits": advice_work.logits_of_all_tokens,
        "optimizer-loop": advice_work.optimizer_loop,
        "recompute": advice_work.recompute,
        "outlier-layer": advice_work.outlier_layers,
        "gpu-metrics": advice_metrics.bound,
        "gpu-clocks": advice_metrics.clocks,
    }
)
"""The function of each rule of `nvprof_kit._findings.RULES` that needs only a capture."""

COLUMNS: Columns = {
    "rank": Column("1 for the largest possible saving; one of low confidence counts half"),
    "rule": Column("name of the rule", kind="str"),
    "title": Column("the finding in a few words", kind="str"),
    "evidence": Column("the numbers from the capture", kind="str"),
    "layer": Column("layer; '' if not in one layer", kind="str"),
    "phase": Column("phase of that layer, or of the loop", kind="str"),
    "start_ns": Column("start of the interval to look at in Nsight, in ns since the start of the capture", "ns"),
    "end_ns": Column("its end", "ns"),
    "saves_ns": Column(
        "upper bound of the saving in ns, per step and GPU (per GPU without steps); savings of different findings "
        "overlap",
        "ns",
    ),
    "saves": Column(
        "the same as a share of the wall time of the steps, including waits for data between them",
        "share",
        kind="float",
    ),
    "advice": Column("the change to try", kind="str"),
    "confidence": Column(
        "`high`: the capture shows it; `medium`: it follows under usual assumptions; `low`: check first", kind="str"
    ),
    "refuted_by": Column("observation that would refute the finding", kind="str"),
}
"""The columns of `Advice.rows`."""


@dataclass(frozen=True, repr=False, eq=False)
class Advice(Result):
    """Findings of a capture, ranked by the time they could save.

    Attributes:
        findings: The findings, the largest saving first.
        wall_ns: Wall time of a step and of the waits for data beside it, in ns: the mean over steps and GPUs.
        steps: Number of steps.
        gpus: Number of GPUs, counted once per process that uses them.
        program: What the program does: ``training``, ``prefill``, ``decode``, ``mixed`` (prefill and decode),
            ``graph capture`` or ``evaluation``.
        warnings: What may be missing or distorted.
        info: Recording tool, GPUs and processes of the capture.
    """

    findings: tuple[Finding, ...]
    wall_ns: int
    steps: int
    gpus: int
    program: str
    warnings: tuple[Issue, ...]
    info: CaptureInfo

    columns: ClassVar = {"advise": COLUMNS}
    bars: ClassVar = {"advise": (("saves_ns",), ("title",))}

    @property
    def rows(self) -> pd.DataFrame:
        """The findings as a table with `COLUMNS`."""
        import pandas as pd

        table = pd.DataFrame(map(asdict, self.findings), columns=[field.name for field in fields(Finding)])
        table = table.rename(columns={"fix": "advice"})
        table.insert(0, "rank", range(1, len(table) + 1))
        table["saves"] = table["saves_ns"].astype(float) / self.wall_ns
        rows: pd.DataFrame = table[list(COLUMNS)]
        return rows


def advise(
    trace: Trace,
    own_rules: tuple[Rule, ...] = (),
    steps: StepOptions = ALL_STEPS,
    operations: Operations | None = None,
    verdict: RankVerdict | None = None,
    *,
    times: Breakdown | None = None,
    limits: Flops | None = None,
) -> Advice:
    """Find what costs time and could be improved.

    Args:
        trace: The capture, opened with `OPTIONAL`.
        own_rules: Rules for kernel classes, tried before the package's.
        steps: Which steps to look at, by default all but warm-up.
        operations: The same operations, if their owners and classes are already known.
        verdict: The verdict on the captures of all ranks; if it names a slowest rank, that finding comes first.
        times: The breakdown of the same steps, if it is already known.
        limits: `nvprof_kit._analysis.flops.flops.Flops` of the same steps, where operations were counted.

    Raises:
        CaptureError: Nothing ran on a GPU.
        UsageError: None of the steps asked for is in the capture.
    """
    if not trace.info.on_gpu:
        raise CaptureError(
            f"{trace.info.path}: nothing ran on a GPU, and all advice is about GPU work; record the program on a "
            "machine with a GPU, or see `layers` for CPU times"
        )
    evidence = Evidence(trace, own_rules, steps, operations, verdict, times=times)
    findings = _merged([finding for find in FINDERS.values() for finding in find(evidence)])
    if evidence.captures_in_steps:
        findings = [
            replace(finding, confidence="low", refuted_by=_ONCE) if finding.rule in _OF_HOST else finding
            for finding in findings
        ]
    if limits is not None:
        findings += advice_work.far_from_limit(evidence, limits.kinds())
    findings.sort(key=lambda finding: -finding.saves_ns * (LOW if finding.confidence == "low" else 1))
    if verdict is not None and verdict.rank is not None:
        findings = _slowest_first(evidence, verdict, findings)
    parts = evidence.steps_and_gpus
    return Advice(
        findings=tuple(replace(finding, saves_ns=round(finding.saves_ns / parts)) for finding in findings),
        wall_ns=max(round(evidence.wall_ns / parts), 1),
        steps=evidence.choice.count,
        gpus=evidence.gpus,
        program=evidence.program,
        warnings=evidence.times.warnings,
        info=trace.info,
    )


def _merged(findings: list[Finding]) -> list[Finding]:
    """The findings, with each symptom merged into the first finding of its cause."""
    causes = [finding for finding in findings if not any(other.rule == finding.symptom_of for other in findings)]
    for symptom in findings:
        row = next((row for row, cause in enumerate(causes) if cause.rule == symptom.symptom_of), None)
        if row is not None:
            evidence = f"{causes[row].evidence}; {symptom.title.lower()}: {symptom.evidence}"
            causes[row] = replace(causes[row], evidence=evidence)
    return causes


def _slowest_first(evidence: Evidence, verdict: RankVerdict, findings: list[Finding]) -> list[Finding]:
    """The finding that the other ranks wait for one, then the others; an outlier layer at the same place is merged into
    it, and waiting for ranks is no finding beside it.
    """
    place = verdict.layer or "", verdict.phase or ""
    same = [
        finding for finding in findings if finding.rule == "outlier-layer" and (finding.layer, finding.phase) == place
    ]
    rows = np.flatnonzero(evidence.classes.is_a("comm") & evidence.inside)
    start, end = evidence.longest(rows) if len(rows) else (0, 0)
    slowest = Finding(
        "slowest-rank",
        f"The other ranks wait for rank {verdict.rank}",
        "; ".join([verdict.sentence, *(f"{finding.title.lower()}: {finding.evidence}" for finding in same)]),
        *place,
        start,
        end,
        min(evidence.waited_ns, evidence.wall_ns),
        f"fix rank {verdict.rank} first: {verdict.cause.replace('_', ' ')}; nvprof-kit ranks has the details",
        "high" if verdict.severity == "critical" else "medium",
        "the other ranks still wait as long when this rank does the same work as they do",
    )
    return [slowest, *(finding for finding in findings if finding not in same and finding.rule != "rank-wait")]
