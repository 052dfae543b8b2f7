"""``nvprof-kit skill`` and ``mcp``: the skill file, and a Model Context Protocol server for captures."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Print the path of SKILL.md, a guide for language models.")
@click.option("--print", "printed", is_flag=True, help="Print the text instead of its path.")
def skill(printed: bool) -> None:
    """Print the path of SKILL.md, a guide for language models: which command answers which question, how to read the
    output, and when to abstain.
    """
    from nvprof_kit._agents.skill import skill_path, skill_text

    click.echo(skill_text() if printed else str(skill_path()), nl=not printed)


@click.command(short_help="Serve a folder of captures over the Model Context Protocol.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
def mcp(folder: Path) -> None:
    """Serve the captures in FOLDER (default: the working directory) over the Model Context Protocol, on stdin and
    stdout.

    The server writes nothing and opens no file outside FOLDER. Needs pip install "nvprof-kit[mcp]".
    """
    from nvprof_kit._agents.server import serve_mcp

    serve_mcp(folder)
