"""What to do: findings ranked by what they could save, each with its evidence from the capture.

Each rule is a function that yields its findings from a `Program`; its docstring is what the documentation says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from nvprof_kit._analysis.advise import comm_rules, gpu_rules, host_rules, layer_rules, metric_rules
from nvprof_kit._analysis.advise.findings import share
from nvprof_kit._analysis.advise.program import STEPS_TO_JUDGE, Program
from nvprof_kit._analysis.advise.replay import matching
from nvprof_kit._analysis.attribution.attribution import Operations
from nvprof_kit._analysis.attribution.steps import ALL_STEPS, StepOptions
from nvprof_kit._findings import Finding
from nvprof_kit._result.column import Columns, read_columns
from nvprof_kit._result.result import Result
from nvprof_kit._trace.schema import CaptureInfo
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    from nvprof_kit._analysis.breakdown.breakdown import Breakdown
    from nvprof_kit._analysis.flops.flops import Flops

THROTTLED = 0.02
"""At the limit of its power a GPU takes so much longer for equal work, or more; its clock varies less otherwise."""

LOW = 0.5
"""What a saving of low confidence counts for in the order of the findings."""


class Rule(NamedTuple):
    """A rule: the function that yields its findings, and the share of the steps' time that each must save."""

    look: Callable[..., Iterator[Finding]]
    min_share: float = 0.0


RULES: Mapping[str, Rule] = {
    "launch": Rule(host_rules.launch),
    "slow-host-layer": Rule(host_rules.slow_host_in_layer, 0.02),
    "sync": Rule(host_rules.sync),
    "dataloader": Rule(host_rules.dataloader, 0.01),
    "host-busy": Rule(host_rules.host_busy, 0.01),
    "allocation": Rule(host_rules.allocation, 0.005),
    "loading": Rule(host_rules.loading, 0.01),
    "gc": Rule(host_rules.garbage, 0.005),
    "exposed-collectives": Rule(comm_rules.exposed_collectives),
    "rank-wait": Rule(comm_rules.rank_waits),
    "unstable-step": Rule(host_rules.unstable_step),
    "copies": Rule(gpu_rules.copies, gpu_rules.COPY_SHARE),
    "small-kernels": Rule(gpu_rules.small_kernels),
    "unfused-chains": Rule(gpu_rules.unfused_chains, gpu_rules.CHAINS_SHARE),
    "tensor-copies": Rule(gpu_rules.tensor_copies),
    "fp32-gemms": Rule(gpu_rules.fp32_gemms, gpu_rules.FP32_SHARE),
    "double-precision": Rule(gpu_rules.double_precision, 0.01),
    "unfused-attention": Rule(gpu_rules.unfused_attention, 0.02),
    "logits": Rule(gpu_rules.logits_of_all_tokens, 0.02),
    "optimizer-loop": Rule(gpu_rules.optimizer_loop, 0.02),
    "recompute": Rule(layer_rules.recompute),
    "outlier-layer": Rule(layer_rules.outlier_layers, 0.002),
    "far-from-limit": Rule(gpu_rules.far_from_limit),
    "gpu-metrics": Rule(metric_rules.bound),
    "gpu-clocks": Rule(metric_rules.clocks),
}
"""The rules that need only a capture, by their names in `nvprof_kit._findings.RULES`."""

_OF_HOST = ("launch", "host-busy", "sync", "allocation", "loading", "gc", "unstable-step")
_OF_IDLE = (*_OF_HOST, "slow-host-layer", "dataloader", "copies")

COLUMNS: Columns = read_columns("nvprof_kit._analysis.advise", "advise")
"""The columns of `Advice.rows`."""


@dataclass(frozen=True, repr=False, eq=False)
class Advice(Result):
    """Findings of a capture, ranked by the time they could save.

    Attributes:
        findings: The findings, the largest saving first.
        wall_ns: Wall time of a step and of the waits for data beside it, in ns: the mean over steps and GPUs.
        steps: Number of steps that were looked at.
        all_steps: Number of steps in the capture.
        gpus: Number of GPUs, counted once per process that uses them.
        program: What the program does: ``training``, ``prefill``, ``decode``, ``mixed`` (prefill and decode),
            ``graph capture``, ``evaluation``, or ``unknown``.
        warnings: What may be missing or distorted.
        info: Recording tool, GPUs and processes of the capture.
    """

    findings: tuple[Finding, ...]
    wall_ns: int
    steps: int
    all_steps: int
    gpus: int
    program: str
    warnings: tuple[Issue, ...]
    info: CaptureInfo

    columns: ClassVar = {"advise": COLUMNS}
    bars: ClassVar = {"advise": (("saves_ns",), ("title",))}

    @property
    def rows(self) -> pd.DataFrame:
        """The findings as a table with `COLUMNS`."""
        table = pd.DataFrame(map(asdict, self.findings), columns=[field.name for field in fields(Finding)])
        table = table.rename(columns={"fix": "advice"})
        table.insert(0, "rank", range(1, len(table) + 1))
        table["saves"] = table["saves_ns"].astype(float) / self.wall_ns
        return table[list(COLUMNS)]


def advise(
    operations: Operations,
    steps: StepOptions = ALL_STEPS,
    *,
    slowest: Finding | None = None,
    times: Breakdown | None = None,
    limits: Flops | None = None,
) -> Advice:
    """Find what costs time and could be improved.

    Args:
        operations: The operations of a capture.
        steps: Which steps to look at, by default all but warm-up.
        slowest: The finding that the other ranks of the job wait for one of them; it then comes first.
        times: The breakdown of the same steps, if it is already known.
        limits: `nvprof_kit._analysis.flops.flops.Flops` of the same steps, where operations were counted.

    Raises:
        CaptureError: Nothing ran on a GPU.
        UsageError: None of the steps asked for is in the capture.
    """
    trace = operations.trace
    if not trace.info.on_gpu:
        raise CaptureError(
            f"{trace.info.path}: nothing ran on a GPU, and all advice is about GPU work; record the program on a "
            "machine with a GPU, or see `layers` for CPU times"
        )
    waited_ns = slowest.saves_ns if slowest is not None else 0
    program = Program(operations, steps, times=times, waited_ns=waited_ns, limits=limits)
    findings = [
        finding
        for rule in RULES.values()
        for finding in rule.look(program)
        if finding.saves_ns >= rule.min_share * program.wall_ns
    ]
    findings = _merged(_within_power(program, findings))
    doubt, doubted = "", [*_OF_HOST]
    if program.captures_in_steps:
        doubt = "a CUDA graph is captured in these steps, which happens once: capture later steps to know"
    elif program.is_little:
        doubt, doubted = "hardly anything ran in this capture: capture several steps to know", [*RULES]
    if doubt:
        findings = [
            replace(finding, confidence="low", refuted_by=doubt) if finding.rule in doubted else finding
            for finding in findings
        ]
    findings.sort(key=lambda finding: -finding.saves_ns * (LOW if finding.confidence == "low" else 1))
    if slowest is not None:
        findings = comm_rules.slowest_first(program, slowest, findings)
    return Advice(
        findings=tuple(  # operations may run past the end of their step, and over each other
            replace(finding, saves_ns=round(min(finding.saves_ns, program.wall_ns) / program.parts))
            for finding in findings
        ),
        wall_ns=max(round(program.wall_ns / program.parts), 1),
        steps=program.choice.count,
        all_steps=len(program.choice.shown),
        gpus=program.gpus,
        program=program.mode,
        warnings=program.times.warnings,
        info=trace.info,
    )


def _within_power(program: Program, findings: list[Finding]) -> list[Finding]:
    """The findings; those of idle time save less if the GPU is at the limit of its power: if the matrix products and
    attention of each step of the later half take longer than those of the first two, before which it rests; not in
    decoding, where they do so as the cache grows. Power grows with the square of the clock, so the product of the
    step's time and that of its work stays the same. Beside communication work takes longer too, which tells nothing.
    """
    is_heavy = matching(program.ops["kernel_class"], ("gemm", "attention"))
    of_steps = program.ops["ns"][is_heavy].groupby(program.ops["step"][is_heavy])
    ns = of_steps.sum().to_numpy()
    first, later = ns[:2], ns[len(ns) // 2 :]
    if len(ns) < STEPS_TO_JUDGE or of_steps.size().nunique() > 1 or later.min() < first.max() or program.may_decode:
        return findings
    if (longer := float(np.median(later) / first.min()) - 1) < THROTTLED or len(program.times.communication):
        return findings
    left = 1 / (1 + program.steps["compute_ns"].sum() / program.wall_ns)
    note = "saved: the GPU is at the limit of its power, and clocks lower if it rests less, as equal work takes "
    note += f"{share(longer, 1)} longer in later steps than in the first"
    for row, finding in enumerate(findings):
        if finding.rule in _OF_IDLE:
            evidence = f"{finding.evidence}; {program.ms(left * finding.saves_ns)} of that is {note}"
            findings[row] = replace(finding, evidence=evidence, saves_ns=round(left * finding.saves_ns))
    return findings


def _merged(findings: list[Finding]) -> list[Finding]:
    """The findings, with each symptom merged into the first finding of its cause."""
    causes = [finding for finding in findings if not any(other.rule == finding.symptom_of for other in findings)]
    for symptom in findings:
        row = next((row for row, cause in enumerate(causes) if cause.rule == symptom.symptom_of), None)
        if row is not None:
            evidence = f"{causes[row].evidence}; {symptom.title.lower()}: {symptom.evidence}"
            causes[row] = replace(causes[row], evidence=evidence)
    return causes
