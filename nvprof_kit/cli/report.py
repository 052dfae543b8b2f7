"""``nvprof-kit report``: a page to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from nvprof_kit.cli.output import Reading, reading_into
from nvprof_kit.cli.progress import progress
from nvprof_kit.cli.rules import domain_for, rules_option

if TYPE_CHECKING:
    from nvprof_kit.analysis.rules import Rules
    from nvprof_kit.report.report_data import Sheet


@click.command(short_help="One page with everything, to open in a browser.")
@reading_into({".html": "html", ".htm": "html"})
@click.option("--step", type=int, help="Step to show in time; default: the typical one and the slowest.")
@rules_option
def report(asked: Reading, step: int | None, rules: Rules | None) -> None:
    """One self-contained page: layers, timeline of a step, time per step, and all doubts, to open in a browser.

    With several CAPTUREs the page holds each and compares them with the first. FILE ends in .html. The page loads
    nothing from any network.
    """
    with progress() as say:
        sheets = [_sheet(capture, domain_for(asked.domain, rules), rules, step, say) for capture in asked.captures]
        from nvprof_kit.report.report_page import report_page

        say("writing the page")
        made = report_page(sheets)
    asked.output.write(made)


def _sheet(capture: str, domain: str, rules: Rules | None, step: int | None, say: Callable[[str], None]) -> Sheet:
    from nvprof_kit.analysis.foreign import translate
    from nvprof_kit.analysis.timeline import OPTIONAL
    from nvprof_kit.report.report_data import sheet_of
    from nvprof_kit.trace.open import open_capture

    say(f"reading {capture}")
    trace = translate(open_capture(capture, domain=domain, optional=OPTIONAL), rules)
    say(f"analysing {capture}: {len(trace.ops):,} operations")
    return sheet_of(trace, step)
