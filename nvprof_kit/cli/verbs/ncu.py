"""``nvprof-kit ncu``: hardware counters per layer, and which kernels to measure for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvprof_kit.capture.ncu_script import SETS
from nvprof_kit.cli.inputs import domain_for, opened, rules_option
from nvprof_kit.cli.output import Output, Reading, reading, writing
from nvprof_kit.cli.progress import each
from nvprof_kit.errors import UsageError
from nvprof_kit.names import DOMAIN
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules
    from nvprof_kit.analysis.ncu.plan import Plan


_DOMAIN = click.option(
    "--domain",
    default=DOMAIN,
    show_default=True,
    help="NVTX domain of the ranges; '' or default is the default domain.",
)


@click.group(short_help="Hardware counters of each layer, from Nsight Compute.")
def ncu() -> None:
    """Hardware counters of each layer, from Nsight Compute (ncu).

    `plan` chooses the kernels to measure, from an nsys capture; `layers` tells what was measured, layer by layer;
    `kernels` gives every metric of every measured kernel.
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
@click.option(
    "--set",
    "section_set",
    type=click.Choice(SETS),
    default="basic",
    show_default=True,
    help="ncu's set of sections.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Of a program of several ranks measure this one: the launcher starts the script on each rank.",
)
@click.option(
    "--memory-gb",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="GPU memory of the program, which ncu saves and restores; for the prediction of time.",
)
@click.option("--script", type=click.Path(path_type=Path), metavar="FILE", help="Write the script that measures them.")
@rules_option
def plan(asked: Reading, memory_gb: float, script: Path | None, rules: Rules | None, **options: Any) -> None:
    """Choose the fewest kernels that stand for most of the GPU time of a CAPTURE, and write the script that measures
    just those with ncu, one launch of each.

    Then: bash FILE -- python train.py, and nvprof-kit ncu layers plan.csv --with CAPTURE. Of several ranks one is
    measured: --rank 0, then torchrun --nproc-per-node 8 --no-python bash FILE -- python train.py. Kernels of
    collectives are left out, since ncu cannot replay them on one rank alone.
    """
    from nvprof_kit.analysis.kernels.signatures import NEEDED
    from nvprof_kit.analysis.ncu.plan import PlanOptions
    from nvprof_kit.analysis.ncu.plan import plan as choose
    from nvprof_kit.report.text.ncu import plan_lines, plan_report

    section_set, rank = options.pop("section_set"), options.pop("rank")
    if asked.output.form in plots.FORMATS:
        raise UsageError("a plan is a table; -o FILE ends in .csv, .json, .md, .parquet or .txt")
    if len(asked.captures) > 1:
        raise UsageError(f"a plan is for one capture, not {len(asked.captures)}")
    (trace,) = each(asked.captures, lambda one: opened(one, asked.domain, rules, NEEDED))
    made = choose(trace, PlanOptions(**options))
    if script is not None:
        _write_script(script, made, (section_set, rank), plan_lines(made, section_set, memory_gb))
    if asked.output.form in tables.FORMATS:
        asked.output.write(tables.encode(made.rows, asked.output.form), made.info.warnings)
    else:
        asked.output.print(plan_report(made, section_set, memory_gb))


@ncu.command(short_help="What each layer did to the GPU.")
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True)
@click.option("--with", "capture", metavar="CAPTURE", help="nsys capture of the same program to spread it over.")
@_DOMAIN
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the model in the table; default: all.")
@rules_option
@writing()
def layers(output: Output, reports: tuple[str, ...], depth: int | None, rules: Rules | None, **source: Any) -> None:
    """What each layer did to the GPU: how busy it kept compute, memory and tensor cores, and what bound it.

    A REPORT is ncu's raw or details page as .csv, or an .ncu-rep, each also packed as .xz; several are taken together.
    FILE ends in .csv, .json, .md, .parquet or .txt for the table, in .png, .svg or .pdf for a roofline.
    """
    from nvprof_kit.analysis.kernels.signatures import NEEDED
    from nvprof_kit.analysis.ncu.layers import ncu_layers
    from nvprof_kit.trace.ncu.open import open_ncu, together

    capture, domain = source["capture"], domain_for(source["domain"], rules)
    report = together(each(reports, lambda one: open_ncu(one, domain=domain)))
    traces = each([capture] if capture else [], lambda one: opened(one, source["domain"], rules, NEEDED))
    result = ncu_layers(report, traces[0] if traces else None)
    if output.form in tables.FORMATS:
        output.write(tables.encode(result.rows, output.form), result.warnings)
    elif output.form in plots.FORMATS:
        from nvprof_kit.analysis.ncu.roofline import roofline
        from nvprof_kit.report.plots.roofline import roofline_figure

        output.write(plots.encode(roofline_figure(roofline(report, result)), output.form), result.warnings)
    else:
        from nvprof_kit.report.text.ncu import ncu_layers_report

        output.print(ncu_layers_report(result, depth))


@ncu.command(short_help="What each measured kernel did.")
@click.argument("report", metavar="REPORT")
@_DOMAIN
@writing()
def kernels(output: Output, report: str, domain: str) -> None:
    """Every metric of every measured kernel, a row each, with its layer and phase; in base units: ns, byte, hz, %.

    A REPORT is ncu's raw or details page as .csv, or an .ncu-rep, each also packed as .xz.
    """
    from nvprof_kit.analysis.ncu.layers import tidy
    from nvprof_kit.trace.ncu.open import open_ncu

    if output.form in plots.FORMATS:
        raise UsageError("a plot of kernels is the roofline: nvprof-kit ncu layers REPORT -o roofline.png")
    (measured,) = each([report], lambda one: open_ncu(one, domain=domain))
    output.write(tables.encode(tidy(measured), output.form if output.form != "table" else "csv"), measured.warnings)


def _write_script(path: Path, made: Plan, how: tuple[str, int | None], about: list[str]) -> None:
    from nvprof_kit.capture.ncu_script import NcuScript, ncu_script

    text = ncu_script(
        NcuScript(
            names=made.names,
            invocations=made.invocations,
            about=["Written by nvprof-kit ncu plan.", *about],
            section_set=how[0],
            rank=how[1],
            own_window=made.info.own_window,
            report=path.stem,
        )
    )
    try:
        path.write_text(text, encoding="utf-8")
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it: the umask has its say
    except OSError as error:
        raise UsageError(f"{path}: cannot write it: {error.strerror}") from None
