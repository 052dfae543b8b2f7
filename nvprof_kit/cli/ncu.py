"""``nvprof-kit ncu``: hardware counters per layer, and which kernels to measure for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvprof_kit.cli.output import Reading, reading
from nvprof_kit.errors import UsageError
from nvprof_kit.report import plots, tables

if TYPE_CHECKING:
    from nvprof_kit.analysis.ncu_plan import Plan


@click.group(short_help="Hardware counters of each layer, from Nsight Compute.")
def ncu() -> None:
    """Hardware counters of each layer, from Nsight Compute (ncu).

    `plan` chooses the kernels to measure, from an nsys capture; `layers` tells what was measured, layer by layer.
    """


@ncu.command(short_help="Which kernels to measure.")
@reading
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="How much of the GPU time the measured kernels are to stand for.",
)
@click.option("--layer", default="", metavar="PATH", help="Only this layer and those in it: model.layers.3.")
@click.option("--phase", default="", help="Only this phase: forward, backward, optimizer.")
@click.option("--every-layer", is_flag=True, help="Reach the share in every block of the model, not only over all.")
@click.option("--set", "section_set", default="basic", show_default=True, help="ncu's set of sections.")
@click.option("--script", type=click.Path(path_type=Path), metavar="FILE", help="Write the script that measures them.")
def plan(asked: Reading, section_set: str, script: Path | None, **options: Any) -> None:
    """Choose the fewest kernels that stand for most of the GPU time of a CAPTURE, and write the script that measures
    just those with ncu, one launch of each.

    Then: bash FILE -- python train.py, and nvprof-kit ncu layers plan.csv --with CAPTURE.
    """
    from nvprof_kit.analysis.kernels import NEEDED
    from nvprof_kit.analysis.ncu_plan import PlanOptions
    from nvprof_kit.analysis.ncu_plan import plan as choose
    from nvprof_kit.trace.open import open_capture

    if asked.output.form in plots.FORMATS:
        raise UsageError("a plan is a table; -o FILE ends in .csv, .json, .md, .parquet or .txt")
    if len(asked.captures) > 1:
        raise UsageError(f"a plan is for one capture, not {len(asked.captures)}")
    trace = open_capture(asked.captures[0], domain=asked.domain, optional=NEEDED)
    made = choose(trace, PlanOptions(**options))
    if script is not None:
        _write_script(script, made, section_set)
    if asked.output.form in tables.FORMATS:
        asked.output.write(tables.encode(made.rows, asked.output.form))
    else:
        from nvprof_kit.report.ncu_plan import plan_report

        asked.output.print(plan_report(made, section_set))


def _write_script(path: Path, made: Plan, section_set: str) -> None:
    from nvprof_kit.capture.ncu_script import NcuScript, ncu_script
    from nvprof_kit.report.ncu_plan import plan_lines

    text = ncu_script(
        NcuScript(
            names=made.names,
            about=["Written by nvprof-kit ncu plan.", *plan_lines(made, section_set)],
            section_set=section_set,
            own_window=made.info.own_window,
            report=path.stem,
        )
    )
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    except OSError as error:
        raise UsageError(f"{path}: cannot write it: {error.strerror}") from None
