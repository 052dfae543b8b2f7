"""Progress of long-running verbs on stderr, only if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress. Yields a function that takes the description of the next stage."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda words: bar.update(task, description=escape(words))


Named = TypeVar("Named", str, Path)


def each(captures: Sequence[Named], work: Callable[[Named], Made]) -> list[Made]:
    """Apply `work` to each capture and show the current one."""
    answers = []
    with progress() as report:
        for number, capture in enumerate(captures, 1):
            report(f"reading {capture}" + (f", {number} of {len(captures)}" if len(captures) > 1 else ""))
            answers.append(work(capture))
    return answers
