"""``nvprof-kit diff``: two captures compared, with a gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from nvprof_kit.cli.inputs import kernel_rules, rules_option, steps_options
from nvprof_kit.cli.output import Output, Reading, domain_option, named_domain, writing
from nvprof_kit.cli.progress import progress

if TYPE_CHECKING:
    from nvprof_kit.analysis.attribution.steps import StepOptions


@click.command(short_help="What became slower or faster between two captures.")
@click.argument("base")
@click.argument("new")
@writing(plot=False)
@click.option("--fail-on", "limits", multiple=True, metavar="TARGET:+N%", help="Exit 1 if this became slower by N %.")
@click.option("--min-steps", type=click.IntRange(min=2), default=4, show_default=True, help="Fewest steps to compare.")
@click.option("--view", type=click.Choice(["rows", "kernels"]), default="rows", help="Table for csv, json and parquet.")
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Lines of a table for reading.")
@click.option("--anyway", is_flag=True, help="Compare captures that should not be compared.")
@domain_option
@steps_options
@rules_option
@kernel_rules
def diff(
    output: Output,
    *,
    base: str,
    new: str,
    limits: tuple[str, ...],
    steps: StepOptions,
    min_steps: int,
    view: Literal["rows", "kernels"],
    top: int,
    anyway: bool,
    domain: str,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """Compare two captures by layer, phase and kernel class; step-to-step variation decides what is a change.

    TARGET is step, phase:NAME, class:NAME, or a layer, in which * stands for anything, with or without its phase:
    'model.layers.* backward'. Exit 1 if a gate fails, 2 if the captures cannot be compared. With --format md the answer
    is fit for a pull request.
    """
    asked = Reading((base, new), named_domain(domain), output)
    before, after = (asked.open(one, rules, rules_path) for one in asked.captures)
    with progress() as say:
        say(f"comparing {base} with {new}, step by step")
        result = before.diff(after, fail_on=limits, steps=steps, min_steps=min_steps, anyway=anyway, view=view, top=top)
    output.write_results([result])
    if not result.held:
        raise click.exceptions.Exit(1)
