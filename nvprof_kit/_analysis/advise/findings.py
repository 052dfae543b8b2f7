"""A finding of `advise` with the texts of its rule, and measured figures as text."""

from __future__ import annotations

from collections.abc import Mapping

from nvprof_kit._findings import Finding
from nvprof_kit._toml import read_toml

TEXTS: Mapping[str, Mapping[str, str]] = read_toml("nvprof_kit._analysis.advise", "findings.toml")
"""The title of a finding, its fix, and what would refute it, by rule and case."""


def finding_of(
    cases: str | list[str], evidence: str, owner: tuple[str, str], interval_ns: tuple[int, int], saves_ns: int, *,
    confidence: str = "high", symptom_of: str = "", **facts: object,
) -> Finding:  # fmt: skip
    """A finding with the texts of `TEXTS`.

    Args:
        cases: The rule, or the cases of it that hold, each with the rule before a colon.
        evidence: The numbers from the capture.
        owner: Its layer and phase.
        interval_ns: The interval to look at in Nsight: its start and its length.
        saves_ns: What the fix could save, summed over steps and GPUs.
        confidence: As `Finding.confidence`.
        symptom_of: As `Finding.symptom_of`.
        facts: What the texts name.
    """
    names = [cases] if isinstance(cases, str) else cases
    rule = names[0].partition(":")[0]
    texts = {**TEXTS.get(rule, {})}
    for name in names:
        texts |= TEXTS[name]
    title, fix, refuted_by = (texts[key].format(**facts) for key in ("title", "fix", "refuted_by"))
    start_ns, end_ns = int(interval_ns[0]), int(sum(interval_ns))
    return Finding(rule, title, evidence, *owner, start_ns, end_ns, saves_ns, fix, confidence, refuted_by, symptom_of)


def ms(ns: float) -> str:
    """A time as text."""
    return f"{ns / 1e6:.3f} ms"


def size(count: float) -> str:
    """A number of bytes as text."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count:,.0f} bytes"


def share(value: float, total: float) -> str:
    """A share as text."""
    return f"{100 * value / max(total, 1):.1f} %"
