"""``nvprof-kit diff``: compare two captures, with a gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from nvprof_kit._cli.inputs import Number, kernel_rules, rules_option, selecting, steps_options, top_option
from nvprof_kit._cli.output import Output, Reading, domain_option, named_domain, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit.errors import UsageError

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._result.selection import Selection


class _Sides(click.Command):
    """A command whose option ``--vs`` takes all words up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat ``--vs`` before each of its words."""
        parsed: list[str] = []
        after_vs = False
        for word in args:
            if word.startswith("-"):
                after_vs = word == "--vs"
            elif after_vs and parsed[-1:] != ["--vs"]:
                parsed.append("--vs")
            parsed.append(word)
        return super().parse_args(ctx, parsed)


def _sides(captures: tuple[str, ...], news: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The captures of both sides.

    Raises:
        UsageError: The captures do not form two sides.
    """
    if captures and news:
        return captures, news
    if len(captures) != 2:
        raise UsageError("diff takes two captures, BASE NEW, or several runs of each: BASE1 BASE2 --vs NEW1 NEW2")
    return captures[:1], captures[1:]


@click.command(cls=_Sides, short_help="What became slower or faster between two captures.")
@click.argument("captures", metavar="BASE NEW | BASE... --vs NEW...", nargs=-1)
@click.option("--vs", "news", multiple=True, metavar="NEW...", help="Several runs of NEW, after several of BASE.")
@writing(plot=False)
@click.option("--fail-on", multiple=True, metavar="TARGET:+N%", help="Exit 1 if TARGET became slower by N %.")
@click.option("--allow-undecided", is_flag=True, help="Pass gates that are too noisy to decide.")
@click.option(
    "--run-noise",
    type=Number(min=0),
    show_default="0.75 where several runs a side measure it, 2 where it is assumed",
    help="Noise of GPU time between runs of one program: standard deviation in %, at least this.",
)
@click.option("--with-communication", is_flag=True, help="Include communication in layers and phases.")
@click.option(
    "--min-steps", type=click.IntRange(min=2), default=2, show_default=True, help="Minimum steps per capture."
)
@click.option(
    "--view", type=click.Choice(["rows", "kernels"]), default="rows", help="Table to write to csv, json and parquet."
)
@top_option(15, "Rows to print per table")
@click.option("--anyway", is_flag=True, help="Compare captures that would be refused, with a warning.")
@selecting(sort=False, fold=True)
@domain_option
@steps_options
@rules_option
@kernel_rules
def diff(
    output: Output,
    *,
    captures: tuple[str, ...],
    news: tuple[str, ...],
    fail_on: tuple[str, ...],
    allow_undecided: bool,
    run_noise: float | None,
    with_communication: bool,
    steps: StepOptions,
    min_steps: int,
    view: Literal["rows", "kernels"],
    top: int,
    anyway: bool,
    select: Selection,
    domain: str,
    rules: str | None,
    rules_path: Path | None,
) -> None:
    """Compare two captures, or several runs of each program, by layer, phase and kernel class.

    A difference counts as a change only if it exceeds the noise between steps and runs. Several runs a side measure
    the noise between runs; with one, it is assumed.

    TARGET is step, phase:NAME, class:NAME, or a layer, in which * matches any text, with or without a phase:
    'model.layers.* backward'. Exit 1 if a gate fails or cannot be decided, 2 if the captures cannot be compared.
    --format md writes a report for a pull request.
    """
    (base, *more), (new, *more_news) = _sides(captures, news)
    request = Reading((base, *more, new, *more_news), named_domain(domain), output)
    runs = [request.open(capture, rules, rules_path) for capture in request.captures]
    with progress() as report:
        report(f"comparing {base} with {new}, step by step")
        result = runs[0].diff(
            runs[1 + len(more) :],
            base=runs[1 : 1 + len(more)],
            fail_on=fail_on,
            allow_undecided=allow_undecided,
            run_noise=run_noise,
            with_communication=with_communication,
            steps=steps,
            min_steps=min_steps,
            anyway=anyway,
            view=view,
        )
    output.write_results([replace(result, select=select.changed(top=top))])
    if not result.held:
        raise click.exceptions.Exit(1)
