"""A server of the Model Context Protocol: the questions of `nvprof_kit.Capture`, read-only, with bounded answers.

A tool is one call. What it answers is an object: ``rows`` (the costliest first, no more than asked for),
``rows_left_out``, ``warnings``; or ``cannot_be_told`` with the reason, where the capture lacks what is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._agents.captures import Captures
from nvprof_kit._agents.skill import skill_text
from nvprof_kit.errors import CaptureError, NvprofKitError, ToolError

if TYPE_CHECKING:
    import pandas as pd

    from nvprof_kit._api.capture import BreakdownView, SummaryView

Answer = dict[str, Any]

MOST_ROWS = 500
_LONGEST = 300
"""Letters of a text: names of kernels may have thousands."""

_ABOUT = (
    "Per-layer GPU and CPU costs of PyTorch programs from Nsight Systems and Kineto captures. Times are integer "
    "nanoseconds, sizes bytes, as the columns' names say. Read the warnings of an answer before its rows; an answer "
    "with cannot_be_told is an answer. The resource nvprof-kit://skill tells which tool answers which question."
)


class Questions:
    """The tools of the server, each a question about a capture of a folder.

    Args:
        folder: Holds the captures.
    """

    def __init__(self, folder: Path) -> None:
        self._captures = Captures(folder)

    def captures(self) -> Answer:
        """The captures that can be asked about, by their paths in the server's folder."""
        rows, more = self._captures.listed()
        return {"rows": rows, "rows_left_out": more, "warnings": []}

    def layers(self, capture: str, by_step: bool = False, max_rows: int = 40) -> Answer:
        """What each layer costs: GPU time of its own (gpu_self_ns) and with what it holds (gpu_total_ns), CPU time,
        forward, backward and recompute apart; layer "(none)" is work outside every layer. The costliest first.
        """
        return self._told(lambda: self._captures.open(capture).layers(by_step=by_step), max_rows, sort="gpu_self_ns")

    def breakdown(self, capture: str, view: str = "steps", max_rows: int = 40) -> Answer:
        """Where the time of each step goes on each GPU: compute, exposed communication and copies, and idle time by
        cause. Views: steps, idle (single gaps), communication, copies, launches, queue, critical-path.
        """
        named: BreakdownView = view  # type: ignore[assignment]
        return self._told(lambda: self._captures.open(capture).breakdown(named), max_rows)

    def summary(self, capture: str, view: str = "kernel", max_rows: int = 40) -> Answer:
        """One of eight summaries: device, overview, model, distributed, operator, kernel, memory, user."""
        named: SummaryView = view  # type: ignore[assignment]
        return self._told(lambda: self._captures.open(capture).summary(named), max_rows)

    def advise(self, capture: str, max_rows: int = 10) -> Answer:
        """What costs time and could be changed, with the evidence, what it could save, and what to do."""
        return self._told(lambda: self._captures.open(capture).advise(), max_rows)

    def flops(self, capture: str, max_rows: int = 40) -> Answer:
        """Floating point operations of each layer and its part of the GPU's peak (MFU); needs a file of counts beside
        the capture.
        """
        return self._told(lambda: self._captures.open(capture).flops(), max_rows)

    def diff(self, base: str, new: str, max_rows: int = 40) -> Answer:
        """What became slower or faster from one capture to another of the same program, judged against their noise."""
        return self._told(lambda: self._captures.open(base).diff(self._captures.open(new)), max_rows)

    def ranks(self, captures: list[str], max_rows: int = 20) -> Answer:
        """Which rank the others wait for, in which layer and why (verdict; its rank is null where none is to blame),
        and the waiting by the rank and cause it is charged to (rows). Needs the captures of all ranks of one run.
        """
        from nvprof_kit._api.job import open_job

        paths = [self._captures.path(one) for one in captures]
        try:
            job = open_job(paths, workers=1)
        except CaptureError as error:
            return _untold(error)
        told = bounded(job.charges().to_frame(), max_rows, job.warnings)
        return {"verdict": job.verdict.to_dict(), **told}

    def query(self, capture: str, sql: str, max_rows: int = 40) -> Answer:
        """Any other question, in DuckDB's SQL over the capture's tables: operations (a row per kernel and copy with
        layer, phase, step, start_ns, end_ns, name), ranges, calls, api; nothing else can be read.
        """
        return self._told(lambda: self._captures.open(capture).sql(sql), max_rows)

    @staticmethod
    def _told(ask: Callable[[], Any], max_rows: int, sort: str = "") -> Answer:
        """An answer, or why there is none."""
        try:
            result = ask()
        except CaptureError as error:
            return _untold(error)
        table = result.to_frame() if hasattr(result, "to_frame") else result
        if sort:
            table = table.sort_values(sort, ascending=False, kind="stable")
        return bounded(table, max_rows, tuple(getattr(result, "warnings", ())))


def _untold(error: CaptureError) -> Answer:
    """An answer that is why there is none."""
    return {"cannot_be_told": str(error), "rows": [], "rows_left_out": 0, "warnings": []}


def bounded(table: pd.DataFrame, max_rows: int, warnings: tuple[str, ...] = ()) -> Answer:
    """The first rows of a table, and how many there are more.

    Args:
        table: The table.
        max_rows: How many; no more than `MOST_ROWS`.
        warnings: What may be missing or distorted.
    """
    shown = table.iloc[: min(max(max_rows, 1), MOST_ROWS)]
    plain = shown.astype(object).where(shown.notna(), None)
    rows = [{str(name): _value(value) for name, value in row.items()} for row in plain.to_dict("records")]
    return {"rows": rows, "rows_left_out": len(table) - len(shown), "warnings": [*warnings]}


def _value(value: Any) -> Any:
    """A value as JSON holds it; of a long text the beginning."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "item"):
        return value.item()
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _refusing(question: Callable[..., Answer], refusal: type[Exception]) -> Callable[..., Answer]:
    """A question whose errors the client is told in one line."""

    @functools.wraps(question)
    def asked(*args: Any, **kwargs: Any) -> Answer:
        try:
            return question(*args, **kwargs)
        except (NvprofKitError, KeyError) as error:
            raise refusal(str(error)) from None

    return asked


TOOLS = ("captures", "layers", "breakdown", "summary", "advise", "flops", "diff", "ranks", "query")


def serve_mcp(folder: Path) -> None:
    """Answer on stdin and stdout until the client goes.

    Args:
        folder: Holds the captures; no file outside it is opened, and none is written.

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
