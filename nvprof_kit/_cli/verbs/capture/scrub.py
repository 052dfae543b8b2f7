"""``nvprof-kit scrub``: a capture without private data, for sharing."""

from __future__ import annotations

from pathlib import Path

import click

from nvprof_kit._cli.progress import progress
from nvprof_kit._trace.files.kinds import NSYS, expect


@click.command(short_help="Copy a capture without private data.")
@click.argument("capture", metavar="CAPTURE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the copy to FILE. [default: NAME.scrubbed.sqlite]",
)
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
@click.option("--also", metavar="REGEX", help="Replace each text that matches REGEX, such as a project name.")
def scrub(capture: Path, target: Path | None, force: bool, also: str | None) -> None:
    """Copy an nsys export without environment variables, command line, host name, captured output and other processes.

    CAPTURE is an .sqlite or .sqlite.xz. Times, kernels and ranges are kept. An .nsys-rep contains the same data and
    cannot be scrubbed: share the scrubbed copy instead.
    """
    from nvprof_kit._api.checks import scrub as write_copy
    from nvprof_kit._api.checks import scrubbed_name

    expect(capture, NSYS, "an nsys export, .sqlite or .sqlite.xz")
    target = target or scrubbed_name(capture)
    with progress() as report:
        report(f"copying {capture}")
        removed = write_copy(capture, target, also=also, force=force)
    taken = ", ".join(f"{count} {kind}" for kind, count in removed.items() if count)
    click.echo(f"{target}: without {taken or 'anything to take out: there was nothing private in it'}", err=True)
