"""A Model Context Protocol server: the methods of `nvprof_kit.Capture` as read-only tools with limited output.

A tool call returns an object with ``rows`` (the costliest first, at most as many as requested), ``rows_left_out`` and
``warnings``; or ``unavailable`` with the reason if the capture lacks the data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._agents.captures import Captures
from nvprof_kit._agents.skill import skill_text
from nvprof_kit._api.printable import printable
from nvprof_kit.errors import CaptureError, NvprofKitError, ToolError

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._api.capture import BreakdownView, SummaryView

Answer = dict[str, Any]

MOST_ROWS = 500
_LONGEST = 300
"""Maximum length of a text; kernel names can have thousands of characters."""

_ABOUT = (
    "Per-layer GPU and CPU costs of PyTorch programs from Nsight Systems and Kineto captures. Times are integer "
    "nanoseconds, sizes bytes, as the column names say. Read the warnings of an answer before its rows. unavailable "
    "is a valid answer: do not guess instead. The resource nvprof-kit://skill says which tool answers which question."
)


class Questions:
    """The tools of the server.

    Args:
        folder: The folder of the captures.
    """

    def __init__(self, folder: Path) -> None:
        self._captures = Captures(folder)

    def captures(self) -> Answer:
        """The available captures, by path relative to the server's folder."""
        rows, more = self._captures.listed()
        return {"rows": rows, "rows_left_out": more, "warnings": []}

    def layers(self, capture: str, by_step: bool = False, max_rows: int = 40) -> Answer:
        """GPU and CPU time of each layer by phase (forward, backward, recompute): GPU time of its own operations
        (gpu_self_ns) and including nested layers (gpu_total_ns). Layer "(none)" is work outside all layers. The
        costliest first.
        """
        return self._made(lambda: self._captures.open(capture).layers(by_step=by_step), max_rows, sort="gpu_self_ns")

    def breakdown(self, capture: str, view: str = "steps", max_rows: int = 40) -> Answer:
        """Time of each step on each GPU, split into compute, exposed communication and copies, and idle time by cause.
        Views: steps, idle (by cause and place), communication, copies, launches, queue, critical-path.
        """
        named: BreakdownView = view  # type: ignore[assignment]
        return self._made(lambda: self._captures.open(capture).breakdown(named), max_rows)

    def summary(self, capture: str, view: str = "kernel", max_rows: int = 40) -> Answer:
        """One of eight summaries: device, overview, model, distributed, operator, kernel, memory, user."""
        named: SummaryView = view  # type: ignore[assignment]
        return self._made(lambda: self._captures.open(capture).summary(named), max_rows)

    def advise(self, capture: str, max_rows: int = 10) -> Answer:
        """What could be made faster: findings with evidence, the time that could be saved, and a fix."""
        return self._made(lambda: self._captures.open(capture).advise(), max_rows)

    def flops(self, capture: str, max_rows: int = 40) -> Answer:
        """Floating point operations and model FLOPs utilization (MFU) of each layer; needs a file of counts next to the
        capture.
        """
        return self._made(lambda: self._captures.open(capture).flops(), max_rows)

    def diff(self, base: str, new: str, max_rows: int = 40) -> Answer:
        """What became slower or faster between two captures of the same program, beyond the noise between steps and
        runs.
        """
        return self._made(lambda: self._captures.open(base).diff(self._captures.open(new)), max_rows)

    def ranks(self, captures: list[str], max_rows: int = 20) -> Answer:
        """Which rank the others wait for, in which layer and why (verdict; its rank is null if none is late), and the
        waiting time by late rank and cause (rows). Needs the captures of all ranks of one run.
        """
        from nvprof_kit._api.job import open_job

        paths = [self._captures.path(one) for one in captures]
        try:
            job = open_job(paths, workers=1)
        except CaptureError as error:
            return _unavailable(error)
        answer = bounded(job.charges().to_frame(), max_rows, job.warnings)
        return {"verdict": job.verdict.to_dict(), **answer}

    def query(self, capture: str, sql: str, max_rows: int = 40) -> Answer:
        """Any other question, as a query in DuckDB's SQL over the capture's tables: operations (one row per kernel and
        copy with layer, phase, step, start_ns, end_ns, name), ranges, calls, api. Nothing else can be read. A query is
        ended after a minute.
        """
        from nvprof_kit._agents.query import bounded_query

        opened = self._captures.open(capture)
        try:
            rows, count = bounded_query(sql, opened.tables, min(max(max_rows, 1), MOST_ROWS))
        except CaptureError as error:
            return _unavailable(error)
        answer = bounded(rows, max_rows, opened.warnings)
        return {**answer, "rows_left_out": count - len(rows)}

    @staticmethod
    def _made(ask: Callable[[], Any], max_rows: int, sort: str = "") -> Answer:
        """An answer, or the reason why there is none."""
        try:
            result = ask()
        except CaptureError as error:
            return _unavailable(error)
        table = result.to_frame() if hasattr(result, "to_frame") else result
        if sort:
            table = table.sort_values(sort, ascending=False, kind="stable")
        return bounded(table, max_rows, tuple(getattr(result, "warnings", ())))


def _unavailable(error: CaptureError) -> Answer:
    """The answer if the capture lacks the data."""
    return {"unavailable": str(error), "rows": [], "rows_left_out": 0, "warnings": []}


def bounded(table: pd.DataFrame, max_rows: int, warnings: tuple[str, ...] = ()) -> Answer:
    """The first rows of a table, and the number of further rows.

    Args:
        table: The table.
        max_rows: Maximum number of rows; limited to `MOST_ROWS`.
        warnings: What may be missing or distorted.
    """
    shown = table.iloc[: min(max(max_rows, 1), MOST_ROWS)]
    plain = shown.astype(object).where(shown.notna(), None)
    rows = [{str(name): _value(value) for name, value in row.items()} for row in plain.to_dict("records")]
    return {"rows": rows, "rows_left_out": len(table) - len(shown), "warnings": [*warnings]}


def _value(value: Any) -> Any:
    """Convert a value to JSON types; long texts are truncated."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "item"):
        return value.item()
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _refusing(question: Callable[..., Answer], refusal: type[Exception]) -> Callable[..., Answer]:
    """Wrap a tool: its errors reach the client as one line, and no text has control characters of a capture."""

    @functools.wraps(question)
    def asked(*args: Any, **kwargs: Any) -> Answer:
        try:
            answer: Answer = printable(question(*args, **kwargs))
            return answer
        except (NvprofKitError, KeyError) as error:
            raise refusal(printable(str(error))) from None
        except Exception as error:  # the library would hide it from the client
            raise refusal(printable(f"{type(error).__name__}: {error}")) from error

    return asked


TOOLS = ("captures", "layers", "breakdown", "summary", "advise", "flops", "diff", "ranks", "query")


def serve_mcp(folder: Path) -> None:
    """Run a Model Context Protocol server on stdin and stdout until the client disconnects.

    Args:
        folder: The folder of the captures. Files outside it are not opened, and no file is written.

    Raises:
        ToolError: The library ``mcp`` is not installed.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError as Refused
        from mcp.types import ToolAnnotations
    except ImportError:
        raise ToolError('mcp is not installed, or too old; pip install "nvprof-kit[mcp]"') from None
    server = MCPServer("nvprof-kit", instructions=_ABOUT, log_level="ERROR")
    questions = Questions(folder)
    for name in TOOLS:
        tool = _refusing(getattr(questions, name), Refused)
        server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))(tool)

    server.resource("nvprof-kit://skill", mime_type="text/markdown")(skill_text)
    server.run("stdio")
