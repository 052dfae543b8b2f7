"""Logs of `global_timer` as one table, with one row per stage run of a rank.

A line is ``[RANK 0] forward, start=1716182684.282194, end=1716182685.123003, cpu_dur=0.840809s, cuda_dur=830.512ms``;
``nan`` means a time that was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import pandas as pd

_LINE = re.compile(
    r"^\[RANK (\d{1,6})\] (.{1,400}), start=(\d{1,10})\.(\d{6})\d{0,9}, end=(\d{1,10})\.(\d{6})\d{0,9}, "
    r"cpu_dur=(\d{1,8}(?:\.\d{1,15})?)s(?:, cuda_dur=(\d{1,11}(?:\.\d{1,15})?|nan)ms)?$",
    re.MULTILINE | re.ASCII,
)
"""Maximum digits: no run has a million ranks and no stage takes a hundred years, so a longer number is damaged."""


@dataclass(frozen=True)
class TimerLogs:
    """The logs of the ranks.

    Attributes:
        path: The path as given by the user.
        stages: One row per call of a stage, sorted by rank and start; columns as in `timer_log.toml`.
        warnings: Sentences about unreadable data.
    """

    path: str
    stages: pd.DataFrame
    warnings: tuple[Issue, ...] = ()


def read_timer_logs(paths: Iterable[str | Path]) -> TimerLogs:
    """Read the logs of all ranks.

    Args:
        paths: Logs, and folders with ``timer_rank*.log``.

    Raises:
        CaptureError: A path cannot be read or contains no log, no line is a timer's, or times are too far apart.
    """
    import pandas as pd

    from nvprof_kit._trace.validate import check_time_span

    named = [Path(path) for path in paths]
    tables, warnings = [], []
    file_of: dict[int, Path] = {}
    for file in (file for path in named for file in _files(path)):
        table, faults = _read(file)
        warnings += [f"{file}: {fault}" for fault in faults]
        tables.append(table)
        warnings += [
            f"{file}: rank {rank} wrote {file_of[rank].name} too, and both count as one; have the launcher set RANK"
            for rank in sorted(set(table["rank"].tolist()))
            if file_of.setdefault(rank, file) != file
        ]
    where = ", ".join(map(str, named))
    if not sum(map(len, tables)):
        raise CaptureError(f"{where}: no timer line in it; needed lines written by global_timer: [RANK 0] …")
    stages = pd.concat(tables, ignore_index=True)
    check_time_span(where, [stages["start_ns"].to_numpy(), stages["end_ns"].to_numpy()])
    stages = stages.astype({"stage": "category"}).sort_values(["rank", "start_ns", "end_ns"], ignore_index=True)
    stages.insert(2, "call", stages.groupby(["rank", "stage"], observed=True).cumcount())
    return TimerLogs(where, stages, tuple(Issue("logs", "warning", 1.0, text) for text in warnings))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise CaptureError(f"{path}: no such file or folder")
    files = sorted(path.glob("timer_rank*.log")) if path.is_dir() else [path]
    if not files:
        raise CaptureError(f"{path}: no timer_rank*.log in it; name the folder that global_timer wrote to (time_log)")
    return files


def _read(file: Path) -> tuple[pd.DataFrame, list[str]]:
    """The lines of a log as a table, and what is wrong with others."""
    import pandas as pd

    try:
        text = read_packed(file).decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError as error:
        raise CaptureError(f"{file}: {error.strerror}") from None
    lines = _LINE.findall(text)
    frame = pd.DataFrame(lines, columns=["rank", "stage", "start_s", "start_us", "end_s", "end_us", "cpu_s", "cuda_ms"])

    def nanoseconds(edge: str) -> Any:
        """With integers, because a float of seconds since 1970 is not exact."""
        return frame[f"{edge}_s"].astype("int64") * 10**9 + frame[f"{edge}_us"].astype("int64") * 1000

    table = pd.DataFrame(
        {
            "rank": frame["rank"].astype("int64"),
            "stage": frame["stage"],
            "start_ns": nanoseconds("start"),
            "end_ns": nanoseconds("end"),
            "cpu_ns": (frame["cpu_s"].astype("float64") * 1e9).round().astype("int64"),
            "cuda_ns": (frame["cuda_ms"].replace("", "nan").astype("float64") * 1e6).round().astype("Int64"),
        }
    )
    unread = sum(1 for line in text.splitlines() if line.strip()) - len(lines)
    has_end = table["end_ns"] >= table["start_ns"]
    repeats = int(frame[has_end].duplicated().sum())
    table = table[has_end & ~frame.duplicated()]
    duration_ns = table["end_ns"] - table["start_ns"]
    longer_ns = table["cpu_ns"].where(table["cpu_ns"] > duration_ns, duration_ns)
    has_wrong_cpu_time = (duration_ns - table["cpu_ns"]).abs() > 50e6 + 0.1 * longer_ns
    faults = {
        f"{int((~has_end).sum())} of its lines have an end before their start, and are left out": not has_end.all(),
        f"{unread} of its lines {'is' if unread == 1 else 'are'} no timer's and left out": unread > 0,
        f"{repeats} of its lines stand in it twice, and count once": repeats > 0,
        f"cpu_dur is not the time from start to end in {int(has_wrong_cpu_time.sum())} of its lines; the clock was set "
        "while the stage ran, or the log is damaged: do not trust its CPU times": has_wrong_cpu_time.any(),
    }
    return table, [fault for fault, is_present in faults.items() if is_present]
