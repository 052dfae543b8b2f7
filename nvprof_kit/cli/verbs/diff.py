"""``nvprof-kit diff``: two captures compared, with a gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.inputs import kernel_rules, opened, read_kernel_rules, rules_option
from nvprof_kit.cli.output import Output, domain_option, writing
from nvprof_kit.cli.progress import each, progress
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

if TYPE_CHECKING:
    from nvprof_kit.analysis.foreign.rules import Rules


@click.command(short_help="What became slower or faster between two captures.")
@click.argument("base")
@click.argument("new")
@writing()
@click.option("--fail-on", "limits", multiple=True, metavar="TARGET:+N%", help="Exit 1 if this became slower by N %.")
@click.option("--skip-steps", type=click.IntRange(min=0), default=0, show_default=True, help="First steps left out.")
@click.option("--min-steps", type=click.IntRange(min=2), default=4, show_default=True, help="Fewest steps to compare.")
@click.option("--view", type=click.Choice(["rows", "kernels"]), default="rows", help="Table for csv, json and parquet.")
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Lines of a table for reading.")
@click.option("--anyway", is_flag=True, help="Compare captures that should not be compared.")
@domain_option
@rules_option
@kernel_rules
def diff(
    output: Output,
    *,
    base: str,
    new: str,
    limits: tuple[str, ...],
    skip_steps: int,
    min_steps: int,
    view: str,
    top: int,
    anyway: bool,
    domain: str,
    rules: Rules | None,
    rules_path: Path | None,
) -> None:
    """Compare two captures by layer, phase and kernel class; step-to-step variation decides what is a change.

    TARGET is step, phase:NAME, class:NAME, or a layer, in which * stands for anything, with or without its phase:
    'model.layers.* backward'. Exit 1 if a gate fails, 2 if the captures cannot be compared. With --format md the answer
    is fit for a pull request.
    """
    from nvprof_kit.analysis.diff.diff import OPTIONAL, DiffOptions
    from nvprof_kit.analysis.diff.diff import diff as compare
    from nvprof_kit.analysis.diff.gates import parse_gate
    from nvprof_kit.errors import UsageError
    from nvprof_kit.report.text.diff import diff_markdown, diff_report

    if output.form in plots.FORMATS:
        raise UsageError("diff has no plot; needed a table format")
    gates = [parse_gate(limit) for limit in limits]
    options = DiffOptions(skip_steps, min_steps, anyway=anyway, own_rules=read_kernel_rules(rules_path))
    before, after = each((base, new), lambda one: opened(one, domain, rules, OPTIONAL))
    with progress() as say:
        say("comparing step by step")
        result = compare(before, after, gates, options)
    if output.form == "md":
        output.write(diff_markdown(result, top).encode())
    elif output.form in tables.FORMATS:
        output.write(tables.encode(getattr(result, view), output.form), result.warnings)
    else:
        output.print(diff_report(result, top))
    if not all(outcome.held for outcome in result.gates):
        raise click.exceptions.Exit(1)
