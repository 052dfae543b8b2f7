"""Logs of `global_timer` as one table, with one row per stage run of a rank.

A line is ``[RANK 0] forward, start=1716182684.282194, end=1716182685.123003, cpu_dur=0.840809s, cuda_dur=830.512ms``;
``nan`` means a time that was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from nvprof_kit._trace.files.packed import read_packed
from nvprof_kit.errors import CaptureError
from nvprof_kit.issues import Issue

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

STAGES: Mapping[str, str] = MappingProxyType(
    {
        "rank": "rank (int64)",
        "stage": "name of the stage (category)",
        "call": "number of earlier calls of the stage on the rank (int64)",
        "start_ns": "when it started, in ns since 1970 on the rank's own clock (int64)",
        "end_ns": "when it ended (int64)",
        "cpu_ns": "CPU time in ns (int64)",
        "cuda_ns": "GPU time between the stage's two CUDA events in ns, NA if not measured (Int64)",
    }
)
"""Columns of `TimerLogs.stages`."""

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
        stages: One row per call of a stage, sorted by rank and start; columns `STAGES`.
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
        CaptureError: A path cannot be read or contains no log, or no line is a timer's.
    """
    import pandas as pd

    named = [Path(path) for path in paths]
    tables, warnings = [], []
    log_of: dict[int, Path] = {}
    for file in (file for path in named for file in _files(path)):
        text = _text(file)
        matches = _LINE.findall(text)
        backwards = [line for line in matches if (int(line[4]), line[5]) < (int(line[2]), line[3])]
        if backwards:
            warnings.append(f"{file}: {len(backwards)} of its lines have an end before their start, and are left out")
        unread = sum(1 for line in text.splitlines() if line.strip()) - len(matches)
        if unread:
            warnings.append(f"{file}: {unread} of its lines {'is' if unread == 1 else 'are'} no timer's and left out")
        matches = [line for line in matches if line not in backwards] if backwards else matches
        once = list(dict.fromkeys(matches))
        if repeats := len(matches) - len(once):
            warnings.append(f"{file}: {repeats} of its lines stand in it twice, and count once")
        matches = once
        contradictions = 0  # times by the two clocks that differ by more than a tenth and more than 50 ms
        for _, _, start_s, start_us, end_s, end_us, cpu_s, _ in matches:
            lasted, cpu = int(end_s) - int(start_s) + (int(end_us) - int(start_us)) / 1e6, float(cpu_s)
            contradictions += abs(lasted - cpu) > 0.05 + 0.1 * max(lasted, cpu)
        if contradictions:
            warnings.append(
                f"{file}: cpu_dur is not the time from start to end in {contradictions} of its lines; the clock was "
                "set while the stage ran, or the log is damaged: do not trust its CPU times"
            )
        if matches:
            tables.append(_table(matches))
        warnings += [
            f"{file}: rank {rank} wrote {log_of[rank].name} too, and both count as one; have the launcher set RANK"
            for rank in sorted({int(line[0]) for line in matches})
            if log_of.setdefault(rank, file) != file
        ]
    where = ", ".join(map(str, named))
    if not tables:
        raise CaptureError(f"{where}: no timer line in it; needed lines written by global_timer: [RANK 0] …")
    stages = pd.concat(tables, ignore_index=True)
    stages = stages.astype({"stage": "category"}).sort_values(["rank", "start_ns", "end_ns"], ignore_index=True)
    stages.insert(2, "call", stages.groupby(["rank", "stage"], observed=True).cumcount())
    return TimerLogs(where, stages, tuple(Issue("logs", "warning", 1.0, text) for text in warnings))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise CaptureError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("timer_rank*.log"))
    if not files:
        raise CaptureError(f"{path}: no timer_rank*.log in it; name the folder that global_timer wrote to (time_log)")
    return files


def _text(file: Path) -> str:
    try:
        return read_packed(file).decode("utf-8", errors="replace").replace("\r\n", "\n")
    except OSError as error:
        raise CaptureError(f"{file}: {error.strerror}") from None


def _table(matches: list[tuple[str, ...]]) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    rank, stage, start_s, start_us, end_s, end_us, cpu_s, cuda_ms = zip(*matches, strict=True)
    cuda_ns = np.round(np.array([text or "nan" for text in cuda_ms], dtype="float64") * 1e6)
    table: pd.DataFrame = pd.DataFrame(
        {
            "rank": np.array(rank, dtype="int64"),
            "stage": list(stage),
            "start_ns": _nanoseconds(start_s, start_us),
            "end_ns": _nanoseconds(end_s, end_us),
            "cpu_ns": np.round(np.array(cpu_s, dtype="float64") * 1e9).astype("int64"),
            "cuda_ns": pd.Series(cuda_ns).astype("Int64"),
        }
    )
    return table


def _nanoseconds(seconds: tuple[str, ...], microseconds: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Convert to ns with integers, because a float of seconds since 1970 is not exact."""
    import numpy as np

    nanoseconds: npt.NDArray[np.int64] = np.array(seconds, dtype="int64") * 1_000_000_000
    nanoseconds += np.array(microseconds, dtype="int64") * 1000
    return nanoseconds
