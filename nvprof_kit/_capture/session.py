"""Runs nsys or ncu on a program and ends it: signals, staging, free disk, and what is left over when one is killed.

A report is written into a folder of its own beside its place, ``.NAME.partial``; only what is complete leaves that. So
a run that is killed at any moment leaves nothing that could be taken for a report.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from nvprof_kit.errors import ToolError, UsageError
from nvprof_kit.names import PEAKS_FILE

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROGRESS = re.compile(
    r"\[\d.*/\d.*\].*|Generated:|Collecting data\.\.\.|Processing \[.*|Processing events\.\.\..*|Capture range .*|"
    r"Initiating .*|The target application .*|Exporting .*|Saved .*|Saving .*"
)
"""What nsys prints about its progress, and with the names of files that are moved."""

_FAILED = re.compile(r"^End of file|Connection to the Agent lost|QuadDCommon::SystemException")
"""What nsys says when it loses its agent or a semaphore of its own, as it does in a few of some hundred runs."""

IsEmpty = Callable[[Path], bool]


def say(message: str) -> None:
    """Print a line on stderr."""
    print(f"nvprof-kit: {message}", file=sys.stderr, flush=True)


def recipes_folder() -> Path:
    """The folder of the shell recipes: in the installed package, or next to it in a source tree.

    Raises:
        ToolError: The recipes are not installed.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "nsys" / "profile.sh").exists():
            return folder
    raise ToolError(f"no recipes beside {package}; reinstall nvprof-kit")


# --- where a report goes ---


def expand_name(name: str) -> str:
    """A report's name with nsys's patterns replaced: ``%h`` host, ``%p`` this process, ``%q{VARIABLE}``, ``%%``.

    They are replaced here, since a report that exists already is to be found before the run.
    """

    def value(match: re.Match[str]) -> str:
        if match[0] in ("%h", "%p", "%%"):
            return {"%h": os.uname().nodename, "%p": str(os.getpid()), "%%": "%"}[match[0]]
        if not match[1]:
            raise UsageError(f"-o '{name}': after % come h, p, q{{VARIABLE}} or another %")
        if not os.environ.get(match[1]):
            raise UsageError(f"-o '{name}': the variable {match[1]} is not set")
        return os.environ[match[1]].replace("/", "_")

    return re.sub(r"%(?:q\{([A-Za-z_]\w*)\}|[hp%]|)", value, name)


def need_name(name: str) -> None:
    """Refuse names that are no file's, and those that nsys cannot export to."""
    if name.rpartition("/")[2] in ("", ".", ".."):
        raise UsageError(f"-o '{name}': needed a report's name, not a folder's")
    if re.search(r'["&\x00-\x1f\x7f]', f"{os.getcwd()}/{name}"):  # it is written into the XML that the exporter reads
        raise UsageError(f'-o {name!r} in {os.getcwd()!r}: nsys cannot export to a path with ", & or a line break')


def print_command(command: Sequence[str], *, environ: Mapping[str, str] | None = None, output: str = "") -> None:
    """Print one line that can be pasted; it makes the folder of ``output``, since nsys would write to /tmp instead."""
    folder = os.path.dirname(output)
    prefix = f"mkdir -p -- {shlex.quote(folder)} && " if folder and not os.path.isdir(folder) else ""
    assigned = "".join(f"{name}={shlex.quote(value)} " for name, value in (environ or {}).items())
    print(prefix + assigned + shlex.join(command))


def need_tool(name: str, path: str, product: str) -> str:
    """The version of a profiler, as it prints it.

    Raises:
        ToolError: It is not found, or does not run.
    """
    if shutil.which(path) is None:
        raise ToolError(
            f"no {name}: '{path}' is not found; install {product} and put its folder on PATH, or set {name.upper()}"
        )
    result = subprocess.run(
        [path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if result.returncode:
        raise ToolError(f"{path} does not run: {(result.stdout.strip().splitlines() or [''])[-1]}")
    return result.stdout


def need_program(program: Sequence[str]) -> None:
    """Refuse a program that is not there, with 127, as shells do."""
    if shutil.which(program[0]) is None:
        error = UsageError(f"'{program[0]}' is not found, or is no program that can be run")
        error.exit_code = 127
        raise error


def need_space(folder: Path, needed_mb: int = 100) -> None:
    """Refuse to start with less disk left, and warn of less than a GB; file systems that cannot tell are accepted."""
    while not folder.is_dir():
        folder = folder.parent
    disk = os.statvfs(folder)
    free_mb = disk.f_bavail * disk.f_frsize >> 20
    if disk.f_blocks and free_mb < needed_mb:
        raise UsageError(f"{folder} has {free_mb} MB left, and a report needs more: free some, or take another with -o")
    if disk.f_blocks and free_mb < 1000:
        say(f"{folder} has {free_mb} MB left; a report grows by a few MB a step, and is lost if the disk fills up")


EXPORTS = {"sqlite": ".sqlite", "parquetdir": "_pqtdir", "none": ""}
"""The forms in which nsys exports a report when it is written, and how their names end."""


NSYS_SUFFIXES = tuple(
    f"{number}{end}" for number in ("", ".1") for end in (".nsys-rep", ".sqlite", EXPORTS["parquetdir"])
)
"""How the names of a report and its exports end, of several windows too."""


def open_stage(output: str, suffixes: Sequence[str], *, program: Sequence[str] = (), force: bool) -> Path:
    """Create the folder beside a report into which it is written, where nothing is in the way of the report.

    Args:
        output: Name of the report without suffix.
        suffixes: How the names of what is written end; existing files are not overwritten without `force`.
        program: What is to run, if anything.
        force: Whether to overwrite.

    Raises:
        UsageError: Something exists, there is no such program, no space, or the folder cannot be written to.
    """
    for suffix in suffixes:
        if os.path.isdir(output + suffix) and suffix.startswith("."):
            raise UsageError(f"{output}{suffix} is a folder; choose another name with -o NAME")
        if os.path.lexists(output + suffix) and not force:
            raise UsageError(f"{output}{suffix} exists; choose another name with -o NAME, or overwrite it with --force")
    if program:
        need_program(program)
    stage = Path(output).parent / f".{Path(output).name}.partial"
    need_space(stage.parent)
    if force and stage.is_dir():
        shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise UsageError(f"{stage.parent}: cannot make this folder") from None
    try:
        stage.mkdir()
    except FileExistsError:
        raise UsageError(
            f"{stage} exists: a run writes there now, or was killed; take what you need and remove it, or use --force"
        ) from None
    except OSError:
        raise UsageError(f"{stage.parent}: cannot write to this folder") from None
    return stage


def output_setting(stage: Path, output: str) -> str:
    """``--output`` for nsys, which gives ``%`` a meaning."""
    return f"--output={stage}/{Path(output).name.replace('%', '%%')}"


# --- a run under supervision ---


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
            if self._has_ended():
                say("the program has ended and its report is being written; another signal, 3 s from now, stops that")
            elif asked is signal.SIGTERM or not self._shares_terminal:
                self._tell_profiler(asked)
        elif now - previous >= 3 and not self._tell_program(asked):  # sooner: a second touch of the same keys
            self._tell_profiler(asked)

    @abstractmethod
    def _has_ended(self) -> bool:
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
        relay = threading.Thread(target=self._relay, args=[self._child.stdout], daemon=True)
        relay.start()
        returncode = self._child.wait()
        status = returncode if returncode >= 0 else 128 - returncode
        if status <= 128:  # nsys may end before a program that takes its time
            self.left_early = self._alive()
            while self._alive():
                time.sleep(0.2)
            end = time.monotonic() + 1.5
            while self._stay and self.began and time.monotonic() < end:
                if text := self._text("status"):
                    status = int(text)
                    break
                time.sleep(0.1)
        relay.join(timeout=5.5)  # what nsys left running might have it open
        return status

    def _relay(self, output: Iterable[bytes]) -> None:
        """Print what nsys says, as `relay` does, and note what it tells of itself."""
        for line in output:
            text = line.decode(errors="replace").strip()
            if text.startswith("Generating '") and self._ends_with_capture:
                self._tell_program(signal.SIGTERM)
            self._has_failed |= _FAILED.search(text) is not None
            relay(line.decode(errors="replace"), self._stage)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        with contextlib.suppress(OSError):  # for a program that has not begun
            (self.state / "end").write_text("INT\n" if asked is signal.SIGINT else "TERM\n")
        super()._pass_on(number, frame)

    def _has_ended(self) -> bool:
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

    def _text(self, name: str) -> str:
        try:
            return (self.state / name).read_text().strip()
        except OSError:
            return ""

    def _program(self) -> int | None:
        text = self._text("pid")
        return int(text) if text else None

    def _alive(self) -> bool:
        process = self._program()
        try:
            os.kill(process or 0, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return process is not None


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
        relay = threading.Thread(target=_relay_log, args=[reader, lines], daemon=True)
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

    def _has_ended(self) -> bool:
        if time.monotonic() - self._start < 3:
            return False
        for process in self._orphans():
            with contextlib.suppress(OSError):
                if not Path(f"/proc/{process}/comm").read_text().startswith("ncu"):
                    return False
        return True


def _relay_log(reader: int, lines: list[bytes]) -> None:
    """Print and keep what comes through a pipe, until its end."""
    while chunk := os.read(reader, 1 << 16):
        lines.append(chunk)
        with contextlib.suppress(OSError):
            os.write(1, chunk)
    os.close(reader)


# --- when a report is complete, and what is in it ---


def publish(stage: Path, folder: Path, status: int, *, force: bool) -> tuple[int, list[str]]:
    """Bring what is in a stage to its folder.

    Returns:
        The status; 1 if that was 0 and a file stays behind. And the files.
    """
    published: list[str] = []
    for file in sorted(stage.iterdir()):
        target = folder / file.name
        try:
            if os.path.lexists(target) and not force:
                say(f"{target} exists; the new one stays in {stage}")
            else:
                shutil.rmtree(target, ignore_errors=True)  # a folder; a file is replaced
                os.replace(file, target)
                published.append(str(target))
                continue
        except OSError:
            say(f"cannot write {target}; it stays in {stage}")
        status = status or 1
    with contextlib.suppress(OSError):
        stage.rmdir()
    if published:
        say(f"wrote {' '.join(published)}")
    return status, published


def finish_report(
    nsys: str,
    stage: Path,
    folder: Path,
    status: int,
    *,
    force: bool,
    is_empty: IsEmpty,
    absent: str = "",
    export: str = "sqlite",
) -> int:
    """Bring a report to its place, or leave it where it is and say so.

    Args:
        nsys: The nsys to export with.
        stage: Where nsys wrote.
        folder: The report's folder.
        status: Exit status of the run.
        force: Whether to overwrite.
        is_empty: Whether an export has nothing that nsys can trace.
        absent: What never began, if nothing was captured.
        export: The form of `EXPORTS` that nsys exports to.

    Returns:
        The run's status; 1 if that was 0 and nothing was captured or a file stays behind.
    """
    reports = sorted(stage.glob("*.nsys-rep"))
    if status >= 128 and status not in (129, 130, 143):
        # something was killed, the program or nsys itself: only a report that exports anew is complete
        kind, complete = "sqlite" if export == "none" else export, True
        for report in reports:
            target = _export_of(report, kind)
            command = [nsys, "export", f"--type={kind}", "--force-overwrite=true", f"--output={target}", str(report)]
            complete &= subprocess.run(command, capture_output=True, check=False).returncode == 0
            if export == "none":
                target.unlink(missing_ok=True)
        if not complete:
            say(f"nsys was killed while it wrote; what there is of the report stays in {stage}")
            return status
    for report in reports:
        if export != "none" and not _export_of(report, export).exists():
            retry = f"nsys export --type={export} {report.name}"
            say(f"nsys did not export {report.name}, see what it said above; again: {retry}")
    empty = export != "none" and any(is_empty(_export_of(report, export)) for report in reports)
    status, published = publish(stage, folder, status, force=force)
    peaks, target = Path(PEAKS_FILE), folder / PEAKS_FILE
    if published and peaks.is_file() and not os.path.lexists(target):
        with contextlib.suppress(OSError):
            shutil.copyfile(peaks, target)
            say(f"{target}: the measured peaks of this folder, for {folder / reports[0].stem}")
    if not reports:
        say(f"no report: nothing was captured{': ' if absent else ''}{absent}")
    elif empty:
        say(
            "nothing was captured: the report has no range and no CUDA call; was the model annotated (annotate_model), "
            "and did it use the GPU?"
        )
    else:
        ending = EXPORTS[export] or ".nsys-rep"
        capture = next((name for name in published if name.endswith(ending)), None)
        if capture:
            say(f"next: nvprof-kit layers {shlex.quote(capture)}")
        return status
    return status or 1


def _export_of(report: Path, export: str) -> Path:
    """Where nsys exports a report to."""
    return report.with_name(report.name.removesuffix(".nsys-rep") + EXPORTS[export])


# --- named sessions ---


def need_session_name(name: str) -> None:
    """Refuse names that nsys does not take."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,126}", name):
        raise UsageError(f"a session's name is letters, digits, _ and -, a letter first; not '{name}'")


def session_state(nsys: str, name: str) -> str:
    """The session's line in nsys's list; '' if there is no such session."""
    listing = subprocess.run([nsys, "sessions", "list"], capture_output=True, text=True, errors="replace", check=False)
    return next((line for line in listing.stdout.splitlines() if line.split()[-1:] == [name]), "")


def state_file(name: str) -> Path:
    """Where ``session start`` leaves for ``session stop`` what it captures into.

    A folder of the user's own that no variable moves, since the two may be called from an ssh session and a batch job.
    """
    folder = Path(f"/tmp/nvprof_kit-{os.getuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        raise ToolError(f"cannot write to {folder}, where session stop looks for what session start captures into")
    return folder / f"{os.uname().nodename}-{name}.capture"
