"""``ncu profile``: the command line of ncu as data, and the run that measures."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nvprof_kit._capture.machine import run_command
from nvprof_kit._capture.report import need_name, need_tool, open_stage, print_command, publish, recipes_folder, say
from nvprof_kit._capture.supervisor import NcuSupervisor
from nvprof_kit.errors import ToolError, UsageError

DEFAULT_SETS = ("speed-of-light", "memory", "tensor", "occupancy", "stalls")
_IMPORT = ("--page=raw", "--csv", "--print-units=base")
_SHORT = {"-c": "--launch-count", "-k": "--kernel-name"}
# ncu does not see what runs below an executable of this name, which rank.sh gives the other ranks
_HIDDEN = "other-rank"
_LAUNCHERS = {"torchrun": "--no-python", "accelerate": "--no_python", "deepspeed": "--no_python"}
_LAUNCHERS |= {"mpirun": "", "mpiexec": ""}
_REFUSED = re.compile(
    r"^==ERROR== (?:Unable to access the following \d+ metrics?: (.*)|Metric (\S+) is not supported in range replay)",
    re.MULTILINE,
)


# --- what is measured ---


class Measured(NamedTuple):
    """The sections and metrics that ncu measures."""

    sections: list[str]
    metrics: list[str]

    @property
    def options(self) -> list[str]:
        """The words of ncu's command line for them."""
        return [*(f"--section={name}" for name in self.sections), f"--metrics={','.join(self.metrics)}"]


def read_sets(ncu: str, names: Sequence[str]) -> Measured:
    """What is in sets that an ncu has for the first GPU, as ``recipes/ncu/sets.sh`` prints it.

    Args:
        ncu: The executable.
        names: Names of sets, or paths of files like those in ``recipes/ncu/sets``.

    Raises:
        UsageError: There is no such set, it cannot be read, or it has a line that is neither a section nor a metric.
    """
    folder = recipes_folder() / "ncu"
    known_sets = sorted(file.stem for file in (folder / "sets").iterdir())
    paths = [name if name in known_sets or "/" in name else f"./{name}" for name in names]
    for name, path in zip(names, paths, strict=True):
        if path not in known_sets and not Path(path).is_file():
            raise UsageError(f"no set '{name}'; there are: {' '.join(known_sets)}")
    command = ["bash", str(folder / "sets.sh"), *paths]
    environ = {**os.environ, "NCU": ncu}
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environ, check=False)
    notes = [line.removeprefix("sets.sh: ") for line in result.stderr.splitlines()]
    if result.returncode:
        raise UsageError(f"--set {' '.join(names)}: {notes[-1]}")
    for note in notes:
        say(note)
    options = result.stdout.splitlines()
    sections = [option.removeprefix("--section=") for option in options if option.startswith("--section=")]
    return Measured(sections, options[-1].removeprefix("--metrics=").split(","))


def range_filter(domain: str, text: str) -> str:
    """The filter of a range that was pushed, anywhere in the stack: the slash behind it says so."""
    names = [re.sub(r"[\]@,\[/*+\\]", r"\\\g<0>", name) for name in (domain, text)]
    return f"--nvtx-include={names[0] + '@' if domain else ''}{names[1]}/"


def _selection(layer: str | None, kernels: Sequence[str], ncu: Sequence[str]) -> list[str]:
    """The filter of what is measured; none for every launch."""
    if layer is not None and kernels:
        raise UsageError("--kernel and --layer exclude each other: each says what to measure")
    if "" in kernels:
        raise UsageError("-k '' names no kernel")
    if kernels:
        return [f"--kernel-name=regex:{'|'.join(kernels)}", "--launch-count=10"]
    if layer is None:
        return []
    text, has_domain, domain = layer.rpartition("@")
    selection = [range_filter(domain, text) if has_domain else range_filter("nvprof_kit", layer)]
    # ncu 2025.3.1 hangs in the second range of a pass
    return [*selection, *["--launch-count=1"] * ("--replay-mode=app-range" in ncu)]


def _check_ranks(ncu: str, rank: int | None, program: Sequence[str]) -> None:
    """Refuse programs that would hang.

    Of the ranks that one ncu sees, one at a time launches a kernel: those that wait for each other would wait for ever.
    """
    launcher = Path(program[0]).name
    if any(word.startswith("torch.distributed.") for word in program):
        launcher = "torchrun"
    option = _LAUNCHERS.get(launcher, "")
    if rank is None:
        if launcher in _LAUNCHERS:
            why = "with --rank N it measures one of them (see nvprof-kit ncu profile --help)"
            say(f"ranks that wait for each other may hang under one ncu; {why}")
        return
    if shutil.which(ncu) is not None and "exclude-tree" not in (run_command([ncu, "--help"]) or ""):
        raise ToolError("this ncu cannot leave a process out; 2024.1 can")
    script = shlex.quote(str(recipes_folder() / "ncu" / "rank.sh"))
    start = " ".join(filter(None, [launcher if launcher in _LAUNCHERS else "LAUNCHER", "...", option]))
    example = f"-- {start} {script} python train.py"
    if not any(word.endswith("rank.sh") for word in program):
        if launcher in _LAUNCHERS and not any(word.endswith(".sh") for word in program):
            raise UsageError(f"--rank {rank}: the launcher has to start rank.sh on each rank: {example}")
        why = "unless the program starts it on each rank, ncu measures all, and they may hang"
        say(f"--rank {rank}: no word is rank.sh; {why}")
    elif option and "--no-python" not in [word.replace("_", "-") for word in program]:
        raise UsageError(f"--rank {rank}: without {option} the launcher takes rank.sh for Python: {example}")


# --- the run ---


def measure_program(
    program: Sequence[str],
    output: str,
    *,
    layer: str | None = None,
    kernel: Sequence[str] = (),
    set: Sequence[str] = (),
    force: bool = False,
    rank: int | None = None,
    ncu: Sequence[str] = (),
    dry_run: bool = False,
    environ: Mapping[str, str],
) -> int:
    """Run a program under ncu.

    Args:
        program: The command line.
        output: Name of the report without suffix.
        layer: The text of the layer's range: its path, as nvprof-kit layers prints it, and ' backward' or ' recompute'
            for these phases; TEXT@DOMAIN for another domain than nvprof_kit, TEXT@ for none.
        kernel: A regular expression for the function's name, without parameters: its first 10 launches, or as many as
            -x --launch-count=N says. Repeatable.
        set: What to measure: speed-of-light, memory, tensor, occupancy, stalls, roofline, communication, or a file like
            those in recipes/ncu/sets. Repeatable. [default: the first five]
        force: Overwrite existing reports.
        rank: Of a program of several ranks measure rank N alone, since under one ncu they would wait for each other;
            its launcher has to start recipes/ncu/rank.sh on each.
        ncu: Word for ncu, passed unchanged, an option in place of what is set else: -x --profile-from-start=off
            (only from cudaProfilerStart on), -x --clock-control=base, -x --replay-mode=application. Repeatable.
        dry_run: Print the equivalent ncu commands and run nothing.
        environ: What to add to the program's environment.

    Returns:
        The program's exit status; 1 if the report could not be brought to its place.
    """
    tool = os.environ.get("NCU") or "ncu"
    selection = _selection(layer, kernel, ncu)
    if not selection and "roofline" not in set:
        raise UsageError("nothing to measure; needed --layer PATH, --kernel NAME, or every launch by --set roofline")
    if not program:
        raise UsageError("no program to run; needed: nvprof-kit ncu profile [OPTION]... -- python train.py")
    output = output.removesuffix(".ncu-rep")
    if "%" in output:
        raise UsageError(f"-o '{output}': ncu gives % a meaning; take a name without")
    need_name(output)
    measured = read_sets(tool, set or DEFAULT_SETS)
    # what waits for another GPU hangs when it is run again alone
    waits = rank is not None or any("nvl" in name.lower() for name in (*measured.sections, *measured.metrics))
    _check_ranks(tool, rank, program)
    settings = ["--target-processes=all", "--nvtx", f"--replay-mode={'application' if waits else 'kernel'}"]
    settings += ["--clock-control=none", "--cache-control=all"]
    settings += [] if rank is None else [f"--target-processes-filter=exclude-tree:{_HIDDEN}"]
    settings += selection
    replaced = {_SHORT.get(word[:2], word.partition("=")[0]) for word in ncu if word.startswith("-")}
    settings = [setting for setting in settings if setting.partition("=")[0] not in replaced]
    # numbers without the locale's marks; the rank is for rank.sh
    added = {"LC_ALL": "C", **({} if rank is None else {"NVPROF_KIT_NCU_RANK": str(rank)}), **environ}

    def command(report: str, measured: Measured, *overwrite: str) -> list[str]:
        return [tool, *overwrite, *settings, *measured.options, *ncu, f"--export={report}", *program]

    if dry_run:
        print_command(command(output, measured, *["--force-overwrite"] * force), environ=added)
        print(f"LC_ALL=C {shlex.join([tool, f'--import={output}.ncu-rep', *_IMPORT])} > {shlex.quote(f'{output}.csv')}")
        return 0
    need_tool("ncu", tool, "Nsight Compute")
    stage = open_stage(output, [".ncu-rep", ".csv"], program=program, force=force)
    report = stage / f"{Path(output).name}.ncu-rep"
    status = _measure(tool, command, measured, report, added)
    if not report.exists():
        shutil.rmtree(stage, ignore_errors=True)
        why = "" if rank is None else f"; is there a rank {rank} on this host, started by rank.sh?"
        raise ToolError(f"no report: ncu measured no kernel; see what it said above{why}", exit_code=status or 1)
    with report.with_suffix(".csv").open("wb") as page:
        imported = [tool, f"--import={report}", *_IMPORT]
        result = subprocess.run(imported, stdout=page, env={**os.environ, "LC_ALL": "C"}, check=False)
    if result.returncode:
        raise ToolError(f"ncu cannot read what it wrote; what there is stays in {stage}", exit_code=status or 1)
    status, _ = publish(stage, status, force=force)
    say(f"next: nvprof-kit ncu layers {shlex.quote(f'{output}.csv')}")
    return status


def _measure(
    ncu: str, command: Callable[..., list[str]], measured: Measured, report: Path, environ: Mapping[str, str]
) -> int:
    """Run ncu, again without what it refuses until it writes a report or refuses nothing more; returns its status."""
    supervisor = NcuSupervisor(environ)
    while True:
        status, log = supervisor.run(command(str(report.with_suffix("")), measured))
        # no second time after a signal; 255 is an older ncu's own
        ended = report.exists() or supervisor.interrupted or (status > 128 and status != 255)
        remaining = measured if ended else _without_refused(ncu, measured, log)
        if remaining == measured:
            break
        measured = remaining
        supervisor.end_orphans()
        say("ncu does not give what was left out here: once more, without")
    supervisor.ignore_signals()  # what was measured is brought to its place
    if status > 128 or not report.exists():
        supervisor.end_orphans()
    return status


def _without_refused(ncu: str, measured: Measured, log: str) -> Measured:
    """What is measured without what this GPU does not give, as ncu says; the names of that are printed."""
    refused = {
        name.strip().partition(".")[0] for match in _REFUSED.finditer(log) for name in (match[1] or match[2]).split(",")
    }
    if not refused:
        return measured

    def is_refused(name: str) -> bool:
        return name.strip().lstrip("-").partition(".")[0] in refused

    def holds_refused(section: str) -> bool:
        listing = run_command([ncu, "--list-metrics", "--section", section]) or ""
        return any(map(is_refused, listing.splitlines()))

    remaining = Measured(
        [name for name in measured.sections if not holds_refused(name)],
        [name for name in measured.metrics if not is_refused(name)],
    )
    for kind, names, remaining_names in zip(("section", "metric"), measured, remaining, strict=True):
        for name in names:
            if name not in remaining_names:
                say(f"{kind} {name}: left out")
    return remaining
