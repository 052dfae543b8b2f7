"""The plan for ncu: its coverage and duration as text, and the script that measures it."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from nvprof_kit._report.text.table import below, frame_table
from nvprof_kit._report.text.texts import TEXTS, kernel_names, percent
from nvprof_kit._result.formats import title

if TYPE_CHECKING:
    from nvprof_kit._analysis.ncu.layers import NcuKernels
    from nvprof_kit._analysis.ncu.plan import NcuPlan


def plan_report(plan: NcuPlan) -> list[RenderableType]:
    """The report: the plan's coverage, its rows, and the next command."""
    frame = plan.to_frame()
    rows = frame[[name for name in _COLUMNS if name in frame]]
    rows = rows.assign(kernel=rows["kernel"].map(kernel_names(rows["kernel"].astype(str))))
    grid = frame_table(rows, len(rows), plan.columns["ncu-plan"])
    grid.select = plan.select
    return [*map(Text, plan_lines(plan)), "", grid, *below((), plan.warnings)]


def plan_script(plan: NcuPlan, report: str) -> str:
    """The script of a plan: plain bash that does not need this package."""
    about = [f"# {' '.join(line.split())}" for line in ("Written by nvprof-kit ncu plan.", *plan_lines(plan))]
    numbers = "|".join(map(str, plan.invocations))
    settings = [
        *("--target-processes", "all", "--nvtx", "--set", plan.section_set, "--replay-mode", "kernel"),
        *("--clock-control", "none", "--cache-control", "all"),
        *(("--profile-from-start", "off") if plan.info.own_window else ()),
        *("--filter-mode", "per-launch-config", "--kernel-name-base", "mangled"),
        *("--kernel-id", f"::regex:^({'|'.join(map(re.escape, plan.names))})$:{numbers}"),
    ]
    texts = {"about": "\n".join(about), "ncu": shlex.join([*settings, "--export", report]), "launches": numbers}
    texts |= {"report": shlex.quote(f"{report}.ncu-rep"), "page": shlex.quote(f"{report}.csv")}
    script = (files("nvprof_kit._report.text") / "plan.sh").read_text(encoding="utf-8")
    return re.sub("@([a-z]+)@", lambda place: texts[place[1]], script)


def kernels_report(result: NcuKernels) -> list[RenderableType]:
    """The size of the table; it has hundreds of columns, too many for a terminal."""
    rows, columns = result.rows.shape
    return [f"{rows:,} measured kernels with {columns:,} columns each; .to_frame() gives them, .save() writes them"]


_COLUMNS = ("kernel", "grid", "block", "launches", "gpu_ns", "share", "covered", "above_limit_ns")


def plan_lines(plan: NcuPlan) -> list[str]:
    """The plan in a few sentences."""
    above = "" if plan.above_limit_ns is None else " above the least time for the counted work"
    lines = [
        f"{plan.measurements} launches represent {percent(plan.covered)} of the GPU time{above}"
        f"{f' of {plan.layer}' if plan.layer else ''} in {title(plan.info.path)}, which has {plan.launches:,} launches"
    ]
    if plan.above_limit_ns is not None:
        lines.append(f"that is {percent(plan.above_limit_ns / plan.gpu_ns)} of the GPU time")
    if plan.collectives_ns:
        left_out = percent(plan.collectives_ns / (plan.gpu_ns + plan.collectives_ns))
        lines.append(TEXTS["notes"]["collectives"].format(share=left_out))
    if plan.every_layer:
        block, share = plan.least_covered
        lines.append(f"and for at least {percent(share)} of every block's; least in {block}")
    seconds, with_more = plan.predicted_seconds(), plan.predicted_seconds(11)
    if seconds and with_more:
        memory = f"1 GB of GPU memory; for each 10 GB more, {with_more[0] - seconds[0]:,.0f} s more"
        times = f"about {seconds[0]:,.0f} s, instead of {seconds[1]:,.0f} s for all launches, including program start"
        lines.append(f"ncu --set {plan.section_set} takes {times}, if the program uses {memory}")
    return lines
