"""Runs nsys or ncu on a program and ends it: signals, and what is left over when one of them is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from nvprof_kit._capture.machine import text_in
from nvprof_kit._capture.report import recipes_folder, say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROGRESS = re.compile(
    r"\[\d.*/\d.*\].*|Generated:|Collecting data\.\.\.|Processing \[.*|Processing events\.\.\..*|Capture range .*|"
    r"Initiating .*|The target application .*|Exporting .*|Saved .*|Saving .*"
)
"""What nsys prints about its progress, and with the names of files that are moved."""

_FAILED = re.compile(r"^End of file|Connection to the Agent lost|QuadDCommon::SystemException")
"""What nsys says when it loses its agent or a semaphore of its own, as it does in a few of some hundred runs."""


class Supervisor(ABC):
    """A run of a profiler: the signals that it gets, and what it leaves running.

    Ctrl-C, SIGTERM and SIGHUP (a lost terminal, taken for SIGTERM) come to the profiler once: it fetches what the
    program has buffered, then ends it. Told twice nsys would lose the report: a second signal within 3 s is taken for
    the same.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._mark = f"NVPROF_KIT_RUN={os.getpid()}.{time.time_ns()}"
        self._environ = {**os.environ, **environ, "NVPROF_KIT_RUN": self._mark.partition("=")[2]}
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_at: float | None = None
        self._shares_terminal = False

    @property
    def interrupted(self) -> bool:
        """Whether a signal came."""
        return self._asked_at is not None

    def _handle_signals(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def ignore_signals(self) -> None:
        """Ignore signals until this process ends: what was captured is brought to its place."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the profiler gets it once, and again what comes 3 s later."""
        asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        previous, now = self._asked_at, time.monotonic()
        if previous is None:
            self._asked_at = now
            # A launcher ends the other ranks when one fails, and they may have ended by then: their reports would not
            # be written.
            if self.has_ended():
                say("the program has ended and its report is being written; another signal, 3 s from now, stops that")
            elif asked is signal.SIGTERM or not self._shares_terminal:
                self._tell_profiler(asked)
        elif now - previous >= 3 and not self._tell_program(asked):  # sooner: a second touch of the same keys
            self._tell_profiler(asked)

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the program has ended, and the profiler has not."""

    def _tell_program(self, asked: signal.Signals) -> bool:
        """Send a signal to the program itself; False if that is left to the profiler."""
        return False

    def _tell_profiler(self, asked: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, asked)

    def end_orphans(self) -> None:
        """End whatever a killed profiler left running: the program, its children, and nsys's own agent."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            for attempt in range(10):
                orphans = self._orphans()
                if not orphans:
                    return
                if number and not attempt:
                    for process in orphans:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(process, number)
                time.sleep(0.2)

    def _orphans(self) -> list[int]:
        """The running processes that got this run's environment."""
        processes: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state != "Z" and self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    processes.append(int(folder.name))
        return processes


def relay(line: str, stage: str) -> None:
    """Print a line of nsys, without its progress and the names of files in the stage, which are moved."""
    text = line.replace("\r", "").rstrip("\n")
    stripped = text.strip()
    if stripped.startswith("Generating '"):
        say("the capture has ended, its report is being written")
    elif stripped and not _PROGRESS.fullmatch(text) and not stripped.startswith(stage):
        print(text.replace(stage, ""), file=sys.stderr, flush=True)


class NsysSupervisor(Supervisor):
    """Runs nsys and waits for it, and for the program.

    A signal that comes 3 s after another goes to the program.

    Attributes:
        state: The folder in which ``program.bash`` tells the program's process and status, and nsys spools.
        left_early: Whether nsys ended before the program; then it leaves its agent behind.
        printed: The lines that nsys printed.
    """

    def __init__(
        self,
        stage: Path,
        state: Path,
        environ: Mapping[str, str],
        *,
        stay: bool,
        keep_spool: bool = False,
        ends_with_capture: bool = False,
    ) -> None:
        super().__init__(environ)
        self.state = state.resolve()
        self.left_early = False
        self.printed: list[str] = []
        self._stage = f"{stage.resolve()}/"
        if not keep_spool:  # nsys spools there; the user's may be small
            self._environ["TMPDIR"] = str(self.state)
        self._stay = stay
        self._ends_with_capture = ends_with_capture
        self._has_failed = False

    @property
    def began(self) -> bool:
        """Whether the program began."""
        return self._program() is not None

    def run(self, nsys: Sequence[str], program: Sequence[str]) -> int:
        """Run nsys on a program until both have ended; once more if nsys fails by itself before the program.

        Returns:
            The program's exit status, 128 and the signal's number if it was killed.
        """
        self._handle_signals()
        descriptors = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (1, 2)]
        between = [recipes_folder() / "nsys" / "program.bash", self.state, os.getpid(), *descriptors]
        shim = ["bash", *map(str, between), os.environ.get("TMPDIR", ""), "stay" if self._stay else "become"]
        command = [*nsys, *shim, *program]
        status = self._supervise(command, descriptors)
        if self._has_failed and not self.began and not self.interrupted:
            say("nsys failed by itself before it began the program, and is started again")
            self.end_orphans()
            status = self._supervise(command, descriptors)
        self.ignore_signals()
        return status

    def _supervise(self, command: Sequence[str], descriptors: Sequence[int]) -> int:
        self._has_failed = False
        self._child = subprocess.Popen(
            command,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            preexec_fn=os.setpgrp,  # noqa: PLW1509  # Ctrl-C comes to this process only
        )
        output = self._child.stdout or ()

        def relay_all() -> None:
            for line in output:
                text = line.decode(errors="replace")
                if text.strip().startswith("Generating '") and self._ends_with_capture:
                    self._tell_program(signal.SIGTERM)
                self._has_failed |= _FAILED.search(text.strip()) is not None
                self.printed.append(text)
                relay(text, self._stage)

        relaying = threading.Thread(target=relay_all, daemon=True)
        relaying.start()
        returncode = self._child.wait()
        status = returncode if returncode >= 0 else 128 - returncode
        if status <= 128:  # nsys may end before a program that takes its time
            self.left_early = self._alive()
            while self._alive():
                time.sleep(0.2)
            end = time.monotonic() + 1.5
            while self._stay and self.began and time.monotonic() < end:
                if text := text_in(self.state / "status").strip():
                    status = int(text)
                    break
                time.sleep(0.1)
        relaying.join(timeout=5.5)  # what nsys left running might have it open
        return status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # for a program that has not begun
            (self.state / "end").write_text("INT\n" if number == signal.SIGINT else "TERM\n")
        super()._pass_on(number, frame)

    def has_ended(self) -> bool:
        return self.began and not self._alive()

    def _tell_program(self, asked: signal.Signals) -> bool:
        """Send a signal to the program, Ctrl-C to its group as in a terminal; False if it does not run."""
        process = self._program()
        if process is None or not self._alive():
            return False
        with contextlib.suppress(OSError):
            if asked is signal.SIGINT:
                os.killpg(os.getpgid(process), asked)
            else:
                os.kill(process, asked)
        return True

    def _program(self) -> int | None:
        text = text_in(self.state / "pid").strip()
        return int(text) if text else None

    def _alive(self) -> bool:
        process = self._program()
        return process is not None and Path(f"/proc/{process}").exists()


class NcuSupervisor(Supervisor):
    """Runs ncu, whose program has its input and output as they are; a signal 3 s after another is ncu's too."""

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Run ncu until it ends, with what it says itself on stdout.

        Returns:
            The exit status, 128 and the signal's number if ncu was killed; and what ncu said.
        """
        # only the group in front may read from a terminal; Ctrl-C comes to all of it
        self._shares_terminal = os.isatty(0)
        self._start = time.monotonic()
        self._handle_signals()
        reader, writer = os.pipe()
        lines: list[bytes] = []

        def relay_log() -> None:
            while chunk := os.read(reader, 1 << 16):
                lines.append(chunk)
                with contextlib.suppress(OSError):
                    os.write(1, chunk)
            os.close(reader)

        relay = threading.Thread(target=relay_log, daemon=True)
        relay.start()
        self._child = subprocess.Popen(
            [command[0], f"--log-file=/proc/{os.getpid()}/fd/{writer}", *command[1:]],
            env=self._environ,
            preexec_fn=None if self._shares_terminal else os.setpgrp,  # noqa: PLW1509
        )
        returncode = self._child.wait()
        os.close(writer)
        relay.join(timeout=5.5)  # what ncu left running might have it open
        return returncode if returncode >= 0 else 128 - returncode, b"".join(lines).decode(errors="replace")

    def has_ended(self) -> bool:
        if time.monotonic() - self._start < 3:
            return False
        for process in self._orphans():
            with contextlib.suppress(OSError):
                if not Path(f"/proc/{process}/comm").read_text().startswith("ncu"):
                    return False
        return True
