"""``nvprof-kit export``: a capture for another program."""

from __future__ import annotations

from typing import Literal

import click

from nvprof_kit._cli.inputs import rules_option
from nvprof_kit._cli.output import Reading, reading_into
from nvprof_kit._cli.progress import progress
from nvprof_kit.errors import UsageError


@click.command(short_help="The capture for another viewer: Perfetto, chrome://tracing.")
@reading_into({".gz": "json.gz", ".json": "json"})
@click.option("--to", type=click.Choice(["perfetto"]), default="perfetto", show_default=True, help="Which program.")
@click.option("--step", type=int, help="Only what ran in this step; default: the whole capture.")
@rules_option
def export(asked: Reading, to: str, step: int | None, rules: str | None) -> None:
    """A trace with layers, phases, streams and idle gaps as tracks, for the Perfetto UI and chrome://tracing.

    FILE ends in .json.gz or .json.
    """
    if len(asked.captures) > 1:
        raise UsageError(f"a trace shows one capture, not {len(asked.captures)}; export them one by one")
    (capture,) = asked.captures
    form: Literal["json.gz", "json"] = "json" if asked.output.form == "json" else "json.gz"
    with progress() as say:
        say(f"reading {capture} and writing it for {to}")
        made = asked.open(capture, rules).perfetto(step=step, form=form)
    asked.output.write_document(made)
