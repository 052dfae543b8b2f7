"""The command lines of nsys as data: presets, windows, and the options that the installed release has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nvprof_kit._capture.recipes import recipes_folder
from nvprof_kit.errors import UsageError

_ALIASES = (("gpu-metrics-devices", "gpu-metrics-device"), ("python-functions-trace", "python-nvtx-annotations"))
_FIELD = r"(skip_first|wait|warmup|active|repeat)=\d+"
_SCHEDULE = re.compile(rf"early|stable|periodic|\d+:\d+|{_FIELD}(,{_FIELD})*")

Options = Mapping[str, frozenset[str]]
"""Names of the options that nsys has, by its verb; empty where there is no nsys to ask."""


def read_preset(name: str) -> list[str]:
    """The settings of a preset: nsys options such as ``--trace=cuda,nvtx``.

    Args:
        name: A preset's name, or the path of a file like those in ``recipes/nsys/presets``.

    Raises:
        UsageError: There is no such preset, or it has a line that is no option.
    """
    presets = recipes_folder() / "nsys" / "presets"
    path = presets / name
    if "/" in name or not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise UsageError(f"no preset '{name}'; there are: {' '.join(sorted(file.name for file in presets.iterdir()))}")
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except PermissionError:
        raise UsageError(f"{path}: no permission to read it") from None
    settings = [setting for line in lines if (setting := re.sub(r"(^|\s+)#.*", "", line.strip()).strip())]
    for setting in settings:
        if not re.match(r"--[^=]*=", setting):
            raise UsageError(f"{path}: '{setting}' is no --option=value")
    return settings


def with_trace(settings: Sequence[str], trace: str) -> list[str]:
    """Settings with another ``--trace``; options that concern CUDA are dropped if CUDA is not traced."""
    cuda = "cuda" in re.split(r"[,-]", trace)
    traced = [f"--trace={trace}" if setting.startswith("--trace=") else setting for setting in settings]
    return [setting for setting in traced if cuda or not setting.startswith("--cuda")]


def read_options(nsys: str, *verbs: str) -> Options:
    """Ask nsys for the options of its verbs; empty if it does not run or prints no help."""
    options: dict[str, frozenset[str]] = {}
    for verb in verbs:
        try:
            result = subprocess.run(
                [nsys, verb, "--help"], capture_output=True, text=True, errors="replace", check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            return {}
        # an option marked (Deprecated) is in the help and refused all the same
        lines = [line for line in (result.stdout + result.stderr).splitlines() if "(Deprecated)" not in line]
        options[verb] = frozenset(re.findall(r"(?:^|[\s,])--([\w-]+)=", "\n".join(lines), re.MULTILINE))
        if not options[verb]:
            return {}
    return options


def installed_name(setting: str, options: frozenset[str]) -> str | None:
    """A setting under the name that the installed nsys has for it; None if it has none."""
    name, _, value = setting.removeprefix("--").partition("=")
    for alias in next((names for names in _ALIASES if name in names), (name,)):
        if alias in options:
            return f"--{alias}={value}"
    return None


def fit_settings(settings: Sequence[str], options: Options) -> tuple[list[str], list[str]]:
    """The settings that the installed nsys takes, and those that it lacks.

    Args:
        settings: nsys options.
        options: Options by verb. The first verb is the one to run; what only another verb takes is left to that one.
    """
    if not options:
        return list(settings), []
    fitted: list[str] = []
    missing: list[str] = []
    for setting in settings:
        names = {verb: name for verb in options if (name := installed_name(setting, options[verb]))}
        if not names:
            missing.append(setting.partition("=")[0])
        elif next(iter(names)) == next(iter(options)):
            fitted.append(next(iter(names.values())))
    return fitted, missing


def with_extra(settings: Sequence[str], extra: Sequence[str], options: Options) -> list[str]:
    """Settings with options in nsys's own words, each in place of a setting of the same name."""
    result = list(settings)
    for option in extra:
        if re.match(r"--[^=]*=", option):
            renamed = (installed_name(option, next(iter(options.values()))) if options else None) or option
            name = renamed.partition("=")[0]
            result = [*(setting for setting in result if setting.partition("=")[0] != name), renamed]
        else:
            result.append(option)
    return result


class Window(NamedTuple):
    """What of a run to capture.

    Attributes:
        settings: nsys options.
        environ: What the program's environment needs for it.
        absent: What did not begin if nothing was captured; '' if it is not known.
    """

    settings: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    absent: str = ""


def _range(text: str, end: str) -> tuple[str, ...]:
    return ("--capture-range=nvtx", f"--nvtx-capture={text}", f"--capture-range-end={end}")


def _end(windows: int) -> str:
    return "repeat" if windows == 0 else "stop" if windows == 1 else f"repeat:{windows}"


def step_window(step: int) -> Window:
    """The range of ``nvprof_kit.step(step)``."""
    absent = f"step {step} never began; it is what nvprof_kit.step({step}) announces"
    return Window(_range(f"step {step}@nvprof_kit", "stop"), {}, absent)


def range_window(text: str) -> Window:
    """The first range of a text: ``TEXT`` in our domain, ``TEXT@DOMAIN``, or ``TEXT@`` for no domain."""
    if not text.partition("@")[0]:
        raise UsageError(f"--range '{text}' names no range")
    name = text[:-1] if text.endswith("@") else text if "@" in text else f"{text}@nvprof_kit"
    return Window(_range(name, "stop"), {}, f"no range '{text}' began")


def schedule_window(schedule: str) -> Window:
    """The windows of ``nvprof_kit.record(schedule=...)`` with a schedule given here."""
    text = "".join(schedule.split())
    if not _SCHEDULE.fullmatch(text):
        raise UsageError(
            f"--schedule '{text}' is none of early, stable, periodic, no 50:60 and no list such as "
            "skip_first=50,active=10,repeat=2"
        )
    repeats = re.findall(r"repeat=(\d+)", text)
    windows = int(repeats[-1]) if repeats else {"stable": 2, "periodic": 5}.get(text, 1)
    absent = (
        f"no window of the schedule {text} began; is nvprof_kit.record(schedule=None) around the program's loop, "
        "and are there so many steps?"
    )
    return Window(_range("window@nvprof_kit", _end(windows)), {"NVPROF_KIT_SCHEDULE": text}, absent)


def own_windows(windows: int) -> Window:
    """Windows of the program's own ``nvprof_kit.record(schedule=...)``; 0 for all."""
    return Window(_range("window@nvprof_kit", _end(windows)), {}, "no window of nvprof_kit.record(schedule=...) began")


CUDA_PROFILER = Window(
    ("--capture-range=cudaProfilerApi", "--capture-range-end=stop"), {}, "the program never called cudaProfilerStart"
)
