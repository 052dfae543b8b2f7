"""What was found in a capture or on a machine: where it shows, why it matters, and the fix. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SEVERITIES = ("error", "warning", "note", "ok")
"""From what makes a run or a capture useless, through what distorts it and what is good to know, to what was checked
and is well.
"""

RULES: Mapping[str, str] = {
    # what costs time
    "launch": "the GPU waits for launches",
    "slow-host-layer": "the host is slower in a layer than in its peers",
    "sync": "the host waits for the GPU",
    "dataloader": "the GPU waits for data",
    "host-busy": "the GPU waits while the host does something else",
    "allocation": "allocations stall the GPU",
    "loading": "code is loaded or compiled during steps",
    "gc": "Python garbage collection stalls the GPU",
    "exposed-collectives": "exposed communication",
    "rank-wait": "a rank waits for others in its collectives",
    "slowest-rank": "the other ranks wait for one rank",
    "unstable-step": "step times vary",
    "copies": "copies that block, or that nothing hides",
    "small-kernels": "many small kernels",
    "unfused-chains": "chains of small memory-bound kernels",
    "tensor-copies": "tensors are copied on the GPU",
    "fp32-gemms": "matrix products without tensor cores",
    "double-precision": "kernels in double precision",
    "unfused-attention": "attention in several kernels",
    "logits": "logits of tokens that need none",
    "optimizer-loop": "an optimizer with kernels for each parameter",
    "recompute": "activations are recomputed",
    "outlier-layer": "a layer costs more than its peers",
    "far-from-limit": "layers take much longer than their work needs on this GPU",
    "gpu-metrics": "what limits a layer, by the GPU's counters",
    "gpu-clocks": "a GPU's clock falls, or is below its peers'",
    # whether a capture can be trusted
    "kernels": "kernels",
    "lost-events": "lost events",
    "tables": "tables",
    "processes": "processes",
    "ranges": "ranges",
    "open-ranges": "open ranges",
    "nsys-messages": "nsys's messages",
    "nsys-error": "nsys error",
    "nsys-warning": "nsys warning",
    "cuda-graphs": "CUDA graphs",
    "overhead": "overhead",
    "length": "length",
    "privacy": "privacy",
    "analysis": "analysis",
    # whether a machine and a program can be profiled
    "gpu": "GPU",
    "mig": "MIG",
    "nsys": "nsys",
    "ncu": "ncu",
    "counters": "counters",
    "cpu-samples": "CPU samples",
    "other-profilers": "other profilers",
    "clocks": "clocks",
    "container": "container",
    "disk": "disk",
    "program": "program",
    "torch": "torch",
    "nvtx": "nvtx",
    "peaks": "peaks",
}
"""Every rule by name, with what it looks at; that is also the title of a finding of a check."""


@dataclass(frozen=True)
class Finding:
    """A finding of a rule of `advise` or `doctor`.

    Attributes:
        rule: Name of the rule.
        title: The finding in a few words.
        evidence: The numbers from the capture, or the facts about the machine.
        layer, phase: Where it was found; '' if not in one place.
        start_ns, end_ns: The interval to look at in Nsight, in ns since the start of the capture; both 0 if none.
        saves_ns: Upper bound of what the fix could save, in ns per step and GPU; per GPU without steps.
        fix: The change or command to try; empty if there is nothing to fix.
        confidence: ``high``: the capture shows it; ``medium``: it follows under usual assumptions; ``low``: check
            first.
        refuted_by: An observation that would refute it.
        symptom_of: Name of the rule for its cause. If that rule found something, this finding is part of it.
        severity: ``error`` (the run or the capture is unusable), ``warning``, ``note`` or ``ok``.
        why: Why it matters; empty if all is well, or if `saves_ns` says so.
    """

    rule: str
    title: str
    evidence: str
    layer: str = ""
    phase: str = ""
    start_ns: int = 0
    end_ns: int = 0
    saves_ns: int = 0
    fix: str = ""
    confidence: str = "medium"
    refuted_by: str = ""
    symptom_of: str = ""
    severity: str = "warning"
    why: str = ""

    def __post_init__(self) -> None:
        if self.rule not in RULES or self.severity not in SEVERITIES:
            raise ValueError(f"no rule {self.rule!r} of severity {self.severity!r} is named in RULES and SEVERITIES")


def checked(severity: str, rule: str, evidence: str, why: str = "", fix: str = "") -> Finding:
    """The finding of a check, which has no place in time."""
    return Finding(rule, RULES[rule], evidence, severity=severity, why=why, fix=fix)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, most severe first, otherwise in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
