"""``nvprof-kit mcp``: captures for a client of the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Serve a folder of captures to a client of the Model Context Protocol.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
def mcp(folder: Path) -> None:
    """Answer questions about the captures in FOLDER, by default the working directory, on stdin and stdout.

    Nothing is written, and no file outside FOLDER is opened. Needs pip install "nvprof-kit[mcp]".
    """
    from nvprof_kit._agents.server import serve_mcp

    serve_mcp(folder)
