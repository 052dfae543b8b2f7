"""The command lines of nsys as data: presets, windows, and the options that the installed release has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nvprof_kit._capture.session import recipes_folder, say
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


def fit_settings(settings: Sequence[str], extra: Sequence[str], nsys: str, *verbs: str) -> list[str]:
    """The settings that an nsys takes, under its names for them, with a note on those that it has not.

    Args:
        settings: nsys options.
        extra: Options in nsys's own words, each in place of a setting of the same name.
        nsys: The executable; without one, the settings are as they are.
        verbs: The verb to run, and another that takes what this one does not.
    """
    options = read_options(nsys, *verbs)
    fitted: list[str] = []
    for setting in settings:
        names = [installed_name(setting, options[verb]) for verb in verbs] if options else [setting]
        if names[0]:
            fitted.append(names[0])
        elif not any(names):
            say(f"this nsys has no {setting.partition('=')[0]}: left out")
    for option in extra:
        added = (installed_name(option, options[verbs[0]]) if options else None) or option
        name, has_value, value = added.partition("=")
        if has_value:
            fitted = [setting for setting in fitted if setting.partition("=")[0] != name]
        if name == "--trace" and "cuda" not in re.split("[,-]", value):
            fitted = [setting for setting in fitted if not setting.startswith("--cuda")]
        fitted.append(added)
    if _has(fitted, "capture-range") and not _has(fitted, "capture-range-end"):
        fitted.append("--capture-range-end=stop")  # else nsys would end the program too
    return fitted


def _has(settings: Sequence[str], name: str) -> bool:
    return any(setting.startswith(f"--{name}=") for setting in settings)


class Window(NamedTuple):
    """What of a run to capture.

    Attributes:
        option: The option that chose it; '' for the whole run.
        settings: nsys options.
        environ: What the program's environment needs for it.
        absent: What did not begin if nothing was captured; '' if it is not known.
    """

    option: str = ""
    settings: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    absent: str = ""


def choose_window(step: int | None, text: str | None, schedule: str | None) -> Window:
    """The window of a step, of a range's text, or of a schedule.

    Args:
        step: Number of ``nvprof_kit.step(step)``.
        text: The first range ``TEXT`` in our domain, ``TEXT@DOMAIN``, or ``TEXT@`` for no domain.
        schedule: For ``nvprof_kit.record(schedule=None)`` in the program.

    Raises:
        UsageError: More than one is given, or one is none.
    """
    choices = {"--step": step, "--range": text, "--schedule": schedule}
    options = [option for option, value in choices.items() if value is not None]
    if len(options) > 1:
        raise UsageError(f"{options[0]} and {options[1]} exclude each other: each says what to capture")
    if step is not None:
        absent = f"step {step} never began; it is what nvprof_kit.step({step}) announces"
        return Window("--step", _range(f"step {step}@nvprof_kit"), {}, absent)
    if text is not None:
        if not text.partition("@")[0]:
            raise UsageError(f"--range '{text}' names no range")
        name = text[:-1] if text.endswith("@") else text if "@" in text else f"{text}@nvprof_kit"
        return Window("--range", _range(name), {}, f"no range '{text}' began")
    if schedule is None:
        return Window()
    plan = "".join(schedule.split())
    if not _SCHEDULE.fullmatch(plan):
        raise UsageError(
            f"--schedule '{plan}' is none of early, stable, periodic, no 50:60 and no list such as "
            "skip_first=50,active=10,repeat=2"
        )
    repeats = re.findall(r"repeat=(\d+)", plan)
    windows = int(repeats[-1]) if repeats else {"stable": 2, "periodic": 5}.get(plan, 1)
    end = "repeat" if windows == 0 else "stop" if windows == 1 else f"repeat:{windows}"
    absent = (
        f"no window of the schedule {plan} began; is nvprof_kit.record(schedule=None) around the program's loop, "
        "and are there so many steps?"
    )
    return Window("--schedule", _range("window@nvprof_kit", end), {"NVPROF_KIT_SCHEDULE": plan}, absent)


def _range(text: str, end: str = "stop") -> tuple[str, ...]:
    return ("--capture-range=nvtx", f"--nvtx-capture={text}", f"--capture-range-end={end}")
