"""The plan of an ncu run as a person reads it: what is measured, what that covers, and how long it will take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit.analysis.ncu_plan import predicted_seconds
from nvprof_kit.report.kernel_names import short_kernel
from nvprof_kit.report.terminal import doubt_lines, table
from nvprof_kit.report.units import Milliseconds, percent

if TYPE_CHECKING:
    from nvprof_kit.analysis.ncu_plan import Plan


def plan_report(plan: Plan, section_set: str, memory_gb: float) -> list[RenderableType]:
    """The whole report: what the plan covers, its rows, and what to do next."""
    made = table([(name, "left" if name == "kernel" else "right") for name in _COLUMNS])
    ms = Milliseconds.for_total(plan.gpu_ns)
    for row in plan.rows.to_dict("records"):
        made.add_row(
            short_kernel(row["kernel"]), row["grid"], row["block"], f"{row['launches']:,}", ms(row["gpu_ns"]),
            percent(row["share"]), percent(row["covered"]),
        )  # fmt: skip
    lines = (Text(line) for line in plan_lines(plan, section_set, memory_gb))
    return [*lines, "", made, *doubt_lines(plan.info.doubts)]


_COLUMNS = ("kernel", "grid", "block", "launches", "ms", "share", "covered")


def plan_lines(plan: Plan, section_set: str, memory_gb: float) -> list[str]:
    """What the plan is, in a few sentences."""
    of_what = " ".join(part for part in (plan.options.layer, plan.options.phase) if part)
    lines = [
        f"{plan.measurements} launches stand for {percent(plan.covered)} of the GPU time"
        f"{f' of {of_what}' if of_what else ''} in {plan.info.path}, which has {plan.launches:,} launches"
    ]
    if plan.options.every_layer:
        block, share = plan.least_covered
        lines.append(f"and for at least {percent(share)} of every block's; least in {block}")
    seconds = predicted_seconds(plan, section_set, memory_gb)
    if seconds:
        lines.append(
            f"ncu --set {section_set} will take about {seconds[0]:,.0f} s, instead of {seconds[1]:,.0f} s for every "
            f"launch, the program's start included, if it holds {memory_gb:g} GB on the GPU"
        )
    return lines
