"""Where nsys and ncu write a report, and when it is complete; and what has to be there before they run.

A report is written into a folder of its own beside its place, ``.NAME.partial``; only what is complete leaves that. So
a run that is killed at any moment leaves nothing that could be taken for a report.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nvprof_kit.errors import ToolError, UsageError
from nvprof_kit.issues import Issue
from nvprof_kit.names import PEAKS_FILE

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


def expand_name(name: str) -> str:
    """A report's name with nsys's patterns replaced: ``%h`` host, ``%p`` this process, ``%q{VARIABLE}``, ``%%``.

    They are replaced here, since a report that exists already is to be found before the run; `need_name` checks the
    result.
    """

    def value(match: re.Match[str]) -> str:
        if match[0] in ("%h", "%p", "%%"):
            return {"%h": os.uname().nodename, "%p": str(os.getpid()), "%%": "%"}[match[0]]
        if not match[1]:
            raise UsageError(f"-o '{name}': after % come h, p, q{{VARIABLE}} or another %")
        if not os.environ.get(match[1]):
            raise UsageError(f"-o '{name}': the variable {match[1]} is not set")
        return os.environ[match[1]].replace("/", "_")

    expanded = re.sub(r"%(?:q\{([A-Za-z_]\w*)\}|[hp%]|)", value, name)
    need_name(expanded)
    return expanded


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
        raise ToolError.of("no-tool", name=name, path=path, product=product, variable=name.upper())
    result = subprocess.run(
        [path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if result.returncode:
        raise ToolError(f"{path} does not run: {(result.stdout.strip().splitlines() or [''])[-1]}")
    return result.stdout


def need_program(program: Sequence[str]) -> None:
    """Refuse a program that is not there, with 127, as shells do."""
    if shutil.which(program[0]) is None:
        raise UsageError(f"'{program[0]}' is not found, or is no program that can be run", exit_code=127)


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


def open_stage(output: str, suffixes: Sequence[str], *, program: Sequence[str] = (), force: bool | None) -> Path:
    """Create the folder beside a report into which it is written, where nothing is in the way of the report.

    Args:
        output: Name of the report without suffix.
        suffixes: How the names of what is written end; existing files are not overwritten without `force`.
        program: What is to run, if anything.
        force: Whether to overwrite; None for a verb without ``--force``.

    Raises:
        UsageError: Something exists, there is no such program, no space, or the folder cannot be written to.
    """
    for suffix in suffixes:
        if os.path.isdir(output + suffix) and suffix.startswith("."):
            raise UsageError(f"{output}{suffix} is a folder; choose another name with -o NAME")
        if os.path.lexists(output + suffix) and not force:
            overwrite = "" if force is None else ", or overwrite it with --force"
            raise UsageError(f"{output}{suffix} exists; choose another name with -o NAME{overwrite}")
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
        overwrite = "" if force is None else ", or use --force"
        raise UsageError.of("stage-exists", stage=stage, overwrite=overwrite) from None
    except OSError:
        raise UsageError(f"{stage.parent}: cannot write to this folder") from None
    return stage


def output_setting(stage: Path, output: str) -> str:
    """``--output`` for nsys, which gives ``%`` a meaning."""
    return f"--output={stage}/{Path(output).name.replace('%', '%%')}"


def publish(stage: Path, status: int, *, force: bool) -> tuple[int, list[str]]:
    """Bring what is in a stage to the folder that it is in.

    Returns:
        The status; 1 if that was 0 and a file stays behind. And the files.
    """
    published: list[str] = []
    for file in sorted(stage.iterdir()):
        target = stage.parent / file.name
        if os.path.lexists(target) and not force:
            say(f"{target} exists; the new one stays in {stage}")
            continue
        try:
            shutil.rmtree(target, ignore_errors=True)  # a folder; a file is replaced
            os.replace(file, target)
            published.append(str(target))
        except OSError:
            say(f"cannot write {target}; it stays in {stage}")
    with contextlib.suppress(OSError):
        stage.rmdir()
    if published:
        say(f"wrote {' '.join(published)}")
    return status or int(stage.exists()), published


def say_what_nsys_lost(printed: str) -> None:
    """Say in a line what the report lacks if nsys printed that it could not import all that it recorded."""
    if "Errors occurred while processing the raw events" in printed:
        cause, events = "see what it said above", "some events are"
        if re.search(r"Unknown \w+ API function index", printed):
            cause = "it is older than the program's CUDA and does not know one of its calls"
            events = "the CUDA calls and GPU operations after that call are"
        say(Issue.of("import-failed", cause=cause, events=events))


def finish_report(
    nsys: str, stage: Path, status: int, *, force: bool, is_empty: IsEmpty, absent: str = "", export: str = "sqlite"
) -> int:
    """Bring a report to its place, or leave it where it is and say so.

    Args:
        nsys: The nsys to export with.
        stage: Where nsys wrote.
        status: Exit status of the run.
        force: Whether to overwrite.
        is_empty: Whether an export has nothing that nsys can trace.
        absent: What never began, if nothing was captured.
        export: The form of `EXPORTS` that nsys exports to.

    Returns:
        The run's status; 1 if that was 0 and nothing was captured or a file stays behind.
    """
    reports = sorted(stage.glob("*.nsys-rep"))
    # if the program or nsys itself was killed, only a report that exports anew is complete
    if status >= 128 and status not in (129, 130, 143) and not _export_anew(nsys, reports, export):
        say(f"nsys was killed while it wrote; what there is of the report stays in {stage}")
        return status
    for report in reports:
        if export != "none" and not _export_of(report, export).exists():
            retry = f"nsys export --type={export} {report.name}"
            say(f"nsys did not export {report.name}, see what it said above; again: {retry}")
    empty = export != "none" and any(is_empty(_export_of(report, export)) for report in reports)
    status, published = publish(stage, status, force=force)
    peaks, target = Path(PEAKS_FILE), stage.with_name(PEAKS_FILE)
    if published and reports and peaks.is_file() and not os.path.lexists(target):
        with contextlib.suppress(OSError):
            shutil.copyfile(peaks, target)
            say(f"{target}: the measured peaks of this folder, for {stage.with_name(reports[0].stem)}")
    raw_events = next((name for name in published if name.endswith(".qdstrm")), None)
    if not reports and raw_events:
        say(f"no report: nsys did not import {raw_events}, which has what it recorded; see what it said above")
    elif not reports:
        say(f"no report: nothing was captured{': ' if absent else ''}{absent}")
    elif empty:
        say(Issue.of("nothing-captured"))
    else:
        ending = EXPORTS[export] or ".nsys-rep"
        if capture := next((name for name in published if name.endswith(ending)), None):
            say(f"next: nvprof-kit layers {shlex.quote(capture)}")
        return status
    return status or 1


def _export_anew(nsys: str, reports: Sequence[Path], export: str) -> bool:
    """Export reports in place of the exports that may be incomplete; whether nsys could."""
    kind = "sqlite" if export == "none" else export
    for report in reports:
        target = _export_of(report, kind)
        command = [nsys, "export", f"--type={kind}", "--force-overwrite=true", f"--output={target}", str(report)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
        if export == "none":
            target.unlink()
    return True


def _export_of(report: Path, export: str) -> Path:
    """Where nsys exports a report to."""
    return report.with_name(report.name.removesuffix(".nsys-rep") + EXPORTS[export])
