"""The verb ``profile``: choose the nsys command, run it, and bring its report to its place."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Literal

from nvprof_kit._capture import report
from nvprof_kit._capture.machine import PYTHON
from nvprof_kit._capture.nsys import fit_settings, nsys_tool, option_words, what_never_began, window_settings
from nvprof_kit._capture.supervisor import NsysSupervisor
from nvprof_kit._instrument.loop.schedule import SCHEDULE_VARIABLE
from nvprof_kit.errors import UsageError
from nvprof_kit.names import RANK_MARK


def program_name(command: Sequence[str]) -> str:
    """The program's name for its report: ``train`` for ``torchrun --nproc-per-node 8 train.py``.

    Uses the first Python script, else the module after ``-m``, else the first word.
    """
    arguments = list(command)
    script = next((word for word in arguments if word.endswith(".py") and not word.startswith("-")), None)
    if script is None and "-m" in arguments[:-1] and PYTHON.fullmatch(PurePath(arguments[0]).name):
        script = arguments[arguments.index("-m") + 1].removesuffix(".__main__").rpartition(".")[2]
    name = PurePath(script or (arguments[0] if arguments else "")).name.removesuffix(".py").removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".-") or "run"


def report_name(command: Sequence[str]) -> str:
    """The default name of a report: program and time, ``train-20261122-221300``."""
    return f"{program_name(command)}-{time.strftime('%Y%m%d-%H%M%S')}"


def profile_program(
    program: Sequence[str],
    output: str,
    *,
    force: bool = False,
    preset: str = "train",
    step: int | None = None,
    schedule: str | None = None,
    nsys: Sequence[str] = (),
    export: Literal["sqlite", "parquetdir", "none"] = "sqlite",
    dry_run: bool = False,
    environ: Mapping[str, str],
    is_empty: report.IsEmpty,
) -> int:
    """Run a program under ``nsys profile``.

    Args:
        program: The command line.
        output: Name of the report without suffix.
        force: Overwrite existing reports.
        preset: Settings: train, infer, graphs, memory, metrics, light, or a file like those in recipes/nsys/presets.
        step: Capture only the range of nvprof_kit.step(N).
        schedule: Capture the windows of nvprof_kit.record(schedule=None) in the program with this schedule: early,
            stable, periodic, 50:60, or skip_first=50,active=10,repeat=2. Each of several windows has its report:
            NAME.1, NAME.2, ...
        nsys: Option of nsys in its own words, in place of the preset's: -x --trace=nvtx, -x --delay=60, -x
            --duration=20, -x '-c cudaProfilerApi'. Repeatable.
        export: What to export beside the report: NAME.sqlite, the folder NAME_pqtdir, which is faster, or nothing.
        dry_run: Print the equivalent nsys command and run nothing.
        environ: What to add to the program's environment.
        is_empty: Whether an export has nothing that nsys can trace.

    Returns:
        The program's exit status; 1 if nothing was captured or the report could not be brought to its place.
    """
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit profile [OPTION]... -- python train.py")
    if schedule is not None:
        schedule = "".join(schedule.split())
        environ = {SCHEDULE_VARIABLE: schedule, **environ}
    window, tool = window_settings(step, schedule, nsys), nsys_tool()
    settings = fit_settings(preset, nsys, tool, "profile", window=window)
    output = output.removesuffix(".nsys-rep")
    command = [tool, "profile", *option_words(settings), f"--export={export}"]
    if dry_run:
        report.need_name(output)
        overwrite = ["--force-overwrite=true"] if force else []
        report.print_command([*command, *overwrite, f"--output={output}", *program], environ=environ, output=output)
        return 0
    output = report.expand_name(output)
    version = report.need_tool("nsys", tool, "Nsight Systems")
    if export == "parquetdir" and re.search(r" 20(1\d|2[0-2])\.", version):
        raise UsageError("--export parquetdir needs nsys 2023 or newer; use --export sqlite")
    # nsys would not wait for the program that it ends
    ends_with_capture = "duration" in settings and "kill" not in settings
    if ends_with_capture:
        command.append("--kill=none")
    if settings.keys() & {"capture-range", "delay"}:
        # what begins later misses the mark with which the program says at its begin which rank it is
        environ = {**environ, RANK_MARK: "step"}
    stage = report.open_stage(output, report.NSYS_SUFFIXES, program=program, force=force)
    if (duration := settings.get("duration", "")).isdecimal() and int(duration) > 60:
        why = "beyond 60 s reports grow unwieldy and nsys may drop events; a few steps answer the question"
        report.say(f"--duration {duration}: {why}")
    state = stage / ".run"
    state.mkdir()
    # releases that end, with 0, before a program that handles the signal that nsys passes on
    stay = ends_with_capture or re.search(r" 20(1\d|2[0-3])\.", version) is not None
    supervisor = NsysSupervisor(stage, state, environ, stay=stay, ends_with_capture=ends_with_capture)
    start = time.monotonic()
    status = supervisor.run([*command, report.output_setting(stage, output)], program)
    has_begun, seconds = supervisor.began or supervisor.interrupted, int(time.monotonic() - start)
    shutil.rmtree(state, ignore_errors=True)
    if status > 128 or supervisor.left_early or not any(stage.iterdir()):
        supervisor.end_orphans()
    if seconds > 60 and not settings.keys() & {"capture-range", "duration"}:
        why = "a window of a few steps is smaller and as good: see --step"
        report.say(f"all {seconds} s of the run were captured; {why}")
    report.say_what_nsys_lost("".join(supervisor.printed))
    absent = what_never_began(settings) if has_begun else "nsys ended before it began the program"
    return report.finish_report(tool, stage, status, force=force, is_empty=is_empty, absent=absent, export=export)
