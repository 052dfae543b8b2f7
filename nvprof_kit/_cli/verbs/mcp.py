"""``nvprof-kit mcp``: captures for a client of the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Serve a folder of captures over the Model Context Protocol.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
def mcp(folder: Path) -> None:
    """Serve the captures in FOLDER (default: the working directory) over the Model Context Protocol, on stdin and
    stdout.

    The server writes nothing and opens no file outside FOLDER. Needs pip install "nvprof-kit[mcp]".
    """
    from nvprof_kit._agents.server import serve_mcp

    serve_mcp(folder)
