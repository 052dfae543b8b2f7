"""``nvprof-kit memory``: who held the GPU's memory, from a snapshot of PyTorch's allocator."""

from __future__ import annotations

from pathlib import Path

import click

from nvprof_kit.cli.output import Output, writing
from nvprof_kit.cli.progress import progress
from nvprof_kit.report.export import tables
from nvprof_kit.report.plots import plots

_VIEWS = ("layer", "stack", "size", "allocation", "step", "segment", "leak")


@click.command(short_help="Who held the GPU's memory, from a memory snapshot.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path(path_type=Path))
@writing("html")
@click.option(
    "--by",
    type=click.Choice(_VIEWS),
    help="The table to give: holders of the peak by layer, stack or size; all allocations by layer; growth by step; "
    "segments; leaks. By default the terminal gets all, a file the first.",
)
@click.option("--device", type=click.IntRange(min=0), help="Device ordinal; default: the one with the most reserved.")
def memory(output: Output, snapshot: Path, by: str | None, device: int | None) -> None:
    """Who held the GPU's memory at the peak, how it grew from step to step, what was left behind, how it lies.

    A SNAPSHOT is a pickle by nvprof_kit.memory_snapshot or torch.cuda.memory._dump_snapshot. FILE ends in .csv, .json,
    .md, .parquet or .txt for a table, in .html for a page with everything, in .svg, .png or .pdf for the timeline (with
    --by segment: the segments).
    """
    from nvprof_kit.analysis.memory.memory import memory as analyse
    from nvprof_kit.report.text import memory as report
    from nvprof_kit.trace.torch_memory.snapshot import read_snapshot

    with progress() as say:
        say(f"reading {snapshot}")
        read = read_snapshot(snapshot)
        say("following allocations")
        result = analyse(read, device)
    if output.form == "html":
        output.write(report.memory_page(result, read))
    elif output.form in tables.FORMATS:
        output.write(tables.encode(report.view(result, by or "layer"), output.form), result.warnings)
    elif output.form in plots.FORMATS:
        from nvprof_kit.report.plots.memory import segments_figure, timeline_figure

        figure = segments_figure(read, result.summary.device) if by == "segment" else timeline_figure(result)
        output.write(plots.encode(figure, output.form), result.warnings)
    else:
        output.print(report.memory_report(result, (by,) if by else _VIEWS))
