"""Writes into the pages what the program itself knows: the help of every verb and the meaning of every column.

    python docs/generate.py        (or: make docs)

Between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->`` a page holds the text called NAME. A test fails while
a page is stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from nvprof_kit.analysis.layers import COLUMNS
from nvprof_kit.cli import group

DOCS = Path(__file__).parent


def texts() -> dict[str, str]:
    """Every generated text by its name."""
    made = {f"help-{verb}": f"```\n{_help(verb)}\n```" for verb in group.commands}
    made["columns-layers"] = "\n".join(
        ["| column | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in COLUMNS.items())]
    )
    return made


def _help(verb: str) -> str:
    parent = group.make_context("nvprof-kit", [], resilient_parsing=True, terminal_width=100)
    command = group.commands[verb]
    return command.get_help(command.make_context(verb, [], parent=parent, resilient_parsing=True))


def filled(page: str) -> str:
    """A page with its generated texts as they are now."""
    for name, text in texts().items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        page = re.sub(pattern, lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)
    return page


def main() -> None:
    """Bring every page up to date."""
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
