"""``nvprof-kit memory``: GPU memory by layer, from a snapshot of PyTorch's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvprof_kit._cli.inputs import selecting, steps_options
from nvprof_kit._cli.output import Output, writing
from nvprof_kit._cli.progress import progress
from nvprof_kit._trace.files.kinds import PICKLE, expect

if TYPE_CHECKING:
    from nvprof_kit._analysis.attribution.steps import StepOptions
    from nvprof_kit._api.sources import MemoryView
    from nvprof_kit._result.selection import Selection

_VIEWS = ("layer", "stack", "size", "allocation", "step", "segment", "leak")


@click.command(short_help="Which layers held GPU memory, from a memory snapshot.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path(path_type=Path))
@writing("html")
@click.option(
    "--by",
    type=click.Choice(_VIEWS),
    help="The table to give: holders of the peak by layer, stack or size; all allocations by layer; growth by step; "
    "segments; leaks. By default the terminal gets all, a file the first.",
)
@click.option(
    "--device", type=click.IntRange(min=0), help="Device ordinal; default: the device with the most reserved memory."
)
@selecting(top="Rows of each table for reading; default: 20.", fold=True)
@steps_options
def memory(
    output: Output, *, snapshot: Path, by: MemoryView | None, device: int | None, select: Selection, steps: StepOptions
) -> None:
    """Which layers held GPU memory at the peak, how memory grew between steps, leaks, and fragmentation.

    A SNAPSHOT is a pickle by nvprof_kit.memory_snapshot or torch.cuda.memory._dump_snapshot. FILE ends in .csv, .json,
    .md, .parquet or .txt for a table, in .html for a page with everything, in .svg, .png or .pdf for the timeline (with
    --by segment: the segments).
    """
    from nvprof_kit._api.sources import open_snapshot

    output.spare([snapshot])
    expect(snapshot, (PICKLE,), "a snapshot of torch.cuda.memory._dump_snapshot")
    with progress() as say:
        say(f"reading {snapshot}")
        result = open_snapshot(snapshot).memory(by, device=device, steps=steps)
    output.write_results([result], select)
