"""One case: a verb over a broken input, run in this process through the command line's own entry, and judged.

What must hold: no defect (exit status 70) and no exception, an answer or a line on stderr within 20 seconds, no input
written to, no control character on the terminal, and every nanosecond of the GPU in a row of ``layers``, or a warning.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import signal
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvprof_kit._cli import main

LONGEST_S = 20


@dataclass(frozen=True)
class Outcome:
    """What a verb did: its exit status, what it wrote, and what must not have been."""

    status: int
    answer: str
    said: str
    broken: str = ""


class _Hang(BaseException):
    pass


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _Hang

    before = [(one, signal.signal(one, end)) for one in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its own time: other programs slow it down as well
    signal.setitimer(signal.ITIMER_REAL, 6 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, handler in before:
            signal.signal(one, handler)


def state(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file of a folder: its content and when it was written to."""
    return {
        str(path.relative_to(folder)): (hashlib.blake2b(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run(words: Sequence[str], inputs: Path) -> Outcome:
    """Run a verb; `inputs` is the folder that it must leave as it is."""
    before = state(inputs)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    status, broken = 0, ""
    scratch = tempfile.tempdir
    with tempfile.TemporaryDirectory() as kept, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        tempfile.tempdir = kept
        try:
            with _limited(LONGEST_S), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                main(words)
        except SystemExit as end:
            status = int(end.code or 0)
        except _Hang:
            status, broken = -1, f"did not end within {LONGEST_S} s"
        except BaseException as error:
            status, broken = -1, f"{type(error).__name__} left the command line: {error}"
        finally:
            tempfile.tempdir = scratch
        if status == os.EX_SOFTWARE:
            broken = "a defect: " + "".join(one.read_text()[-1500:] for one in Path(kept).glob("*.traceback"))
    answer, said = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))
    if not broken and state(inputs) != before:
        broken = "an input was written to, or a file was left beside it"
    if not broken and status == 2 and len(said.strip().splitlines()) != 1:
        broken = f"not one line on stderr: {said[:500]!r}"
    if not broken and "export" not in words and any(letter in said + answer for letter in ("\x1b", "\x9b")):
        broken = "a control character reached the terminal"
    return Outcome(status, answer, said, broken)


_OPERATIONS = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def unbalanced(outcome: Outcome, capture: Path) -> str:
    """Whether the rows of ``layers --format csv`` lack or add time on the GPU, without a warning; '' where they do not.

    The time of all operations is added up here by the file alone.
    """
    if outcome.status or outcome.said.strip():
        return ""
    found = sum(int(row["gpu_self_ns"]) for row in csv.DictReader(io.StringIO(outcome.answer)))
    there, slack = _gpu_ns(capture)
    return "" if abs(found - there) <= slack else f"{found} ns in the rows, {there} ns in the file, and no warning"


def _gpu_ns(capture: Path) -> tuple[int, int]:
    """Sum of the durations of all operations, and by how much rounding may change it."""
    if capture.suffix == ".sqlite":
        with contextlib.closing(sqlite3.connect(f"file:{capture}?mode=ro", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            sums = [
                db.execute(f'SELECT coalesce(sum("end" - start), 0) FROM CUPTI_ACTIVITY_KIND_{kind}').fetchone()[0]
                for kind in _OPERATIONS
                if f"CUPTI_ACTIVITY_KIND_{kind}" in tables
            ]
        return sum(sums), 0
    events = json.loads(capture.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    known = [event for event in events if isinstance(event, dict) and event.get("cat") in list(_GPU)]
    durations = [float(event["dur"]) for event in known if event.get("ph") == "X"]
    return round(1000 * sum(durations)), len(durations)


def judged(changed: Outcome, whole: Outcome, named: Sequence[str]) -> str:
    """What is wrong with the outcome for an input in which one column was dropped, renamed, emptied or retyped: it must
    name it (one of these words) in an error or a warning, or answer and warnings must be the same; '' where it does.
    """
    if changed.broken:
        return changed.broken
    new = "\n".join(set(changed.said.splitlines()) - set(whole.said.splitlines()))
    if any(word and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", new) for word in named):
        return ""
    if changed.status:
        return f"refused without a name: {changed.said.strip()[:300]}"
    if changed.answer != whole.answer:
        return "silently another answer"
    gone = set(whole.said.splitlines()) - set(changed.said.splitlines())
    return f"a warning is gone: {min(gone)[:300]}" if gone else ""
