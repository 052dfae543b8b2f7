"""The command lines of nsys as data: presets, windows, and the options that the installed release has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvprof_kit._capture.machine import run_command
from nvprof_kit._capture.report import recipes_folder, say
from nvprof_kit._instrument.loop.schedule import Schedule
from nvprof_kit.errors import UsageError

Settings = dict[str, str]
"""Options of nsys by their long names without ``--``; each has a value, and none comes twice."""

_SHORT = {"b": "backtrace", "c": "capture-range", "d": "duration", "e": "env-var", "f": "force-overwrite"}
_SHORT |= {"h": "help", "n": "inherit-environment", "o": "output", "p": "nvtx-capture", "s": "sample", "t": "trace"}
_SHORT |= {"w": "show-output", "x": "stop-on-exit", "y": "delay", "Y": "start-later"}
_OPTION = re.compile(r"--([^\s=]+)(?:[=\s](.*))?|-(\w)\s*(.+)?", re.DOTALL)
_ALIASES = (("gpu-metrics-devices", "gpu-metrics-device"), ("python-functions-trace", "python-nvtx-annotations"))
_OF_THE_VERB = {"output": "-o", "export": "--export", "force-overwrite": "--force"}


def nsys_tool() -> str:
    """The executable: NSYS in the environment, or nsys."""
    return os.environ.get("NSYS") or "nsys"


def parse_options(arguments: Sequence[str]) -> Settings:
    """Options as nsys reads them: ``--name=value``, ``--name value``, ``-c value``, ``-cvalue``; the last one counts.

    Args:
        arguments: Words of a command line; an option and its value may be two of them, or one with a blank between.

    Raises:
        UsageError: A word is no option, has no value, or is for the verb to give.
    """
    settings: Settings = {}
    remaining = iter(arguments)
    for word in remaining:
        match = _OPTION.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"-x '{word}' is no option of nsys; needed -x --option=value")
        long, long_value, short, short_value = match.groups()
        name, value = long or _SHORT.get(short, ""), long_value if long else short_value
        if not name:
            raise UsageError(f"-x '{word}': nsys has no option -{short}")
        if value is None:
            value = next(remaining, "-")
            if value.startswith("-"):
                raise UsageError(f"-x '{word}' has no value; needed -x --{name}=value")
        if name in _OF_THE_VERB:
            raise UsageError(f"-x '{word}': take the verb's own {_OF_THE_VERB[name]} for that")
        settings[name] = value.strip()
    return settings


def read_preset(name: str) -> Settings:
    """The settings of a preset, such as ``trace``: ``cuda,nvtx``.

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
    settings: Settings = {}
    for line in lines:
        setting = re.sub(r"(^|\s+)#.*", "", line.strip()).strip()
        option, has_value, value = setting.removeprefix("--").partition("=")
        if setting and not (setting.startswith("--") and has_value):
            raise UsageError(f"{path}: '{setting}' is no --option=value")
        if setting:
            settings[option] = value
    return settings


def _installed_name(name: str, options: frozenset[str]) -> str | None:
    """An option's name in the installed nsys; None if it has none of this meaning."""
    aliases = next((names for names in _ALIASES if name in names), (name,))
    return next((alias for alias in aliases if alias in options), None)


def fit_settings(
    preset: str, arguments: Sequence[str], nsys: str, *verbs: str, window: Mapping[str, str] = {}
) -> Settings:
    """The settings that an nsys takes, under its names for them, with a note on those that it has not.

    Args:
        preset: As in `read_preset`.
        arguments: More options in nsys's own words, each in place of a setting of the same name.
        nsys: The executable; without one, the settings are as they are.
        verbs: The verb to run, and another that takes what this one does not.
        window: More settings, in place of those of the preset.
    """
    helps = [run_command([nsys, verb, "--help"]) or "" for verb in verbs]
    # an option marked (Deprecated) is in the help and refused all the same
    help_texts = ["\n".join(line for line in text.splitlines() if "(Deprecated)" not in line) for text in helps]
    options = [frozenset(re.findall(r"(?:^|[\s,])--([\w-]+)=", text, re.MULTILINE)) for text in help_texts]
    has_help = all(options)
    fitted: Settings = {}
    for name, value in {**read_preset(preset), **window}.items():
        names = [_installed_name(name, of_verb) for of_verb in options] if has_help else [name]
        if names[0]:
            fitted[names[0]] = value
        elif not any(names):
            say(f"this nsys has no --{name}: left out")
    for word, value in parse_options(arguments).items():
        longer = [option for option in options[0] if option.startswith(word)]  # nsys takes what is not ambiguous
        name = _installed_name(word, options[0]) or (longer[0] if len(longer) == 1 else word)
        replaced = fitted.pop(name, "")
        fitted[name] = f"{replaced},{value}" if name == "env-var" and replaced else value
        if name == "trace" and "cuda" not in re.split("[,-]", value):
            fitted = {option: fitted[option] for option in fitted if not option.startswith("cuda")}
    if "capture-range" in fitted:
        fitted.setdefault("capture-range-end", "stop")  # else nsys would end the program too
    return fitted


def option_words(settings: Settings) -> list[str]:
    """Settings as words of a command line."""
    return [f"--{name}={value}" for name, value in settings.items()]


def window_settings(step: int | None, schedule: str | None, arguments: Sequence[str]) -> Settings:
    """The settings that capture a step, or the windows of a schedule; none for the whole run.

    Args:
        step: Number of ``nvprof_kit.step(step)``.
        schedule: For ``nvprof_kit.record(schedule=None)`` in the program.
        arguments: More options in nsys's own words.

    Raises:
        UsageError: Both are given, the schedule is none, or the options choose another window.
    """
    if step is None and schedule is None:
        return {}
    if step is not None and schedule is not None:
        raise UsageError("--step and --schedule exclude each other: each says what to capture")
    option, text, end = "--step", f"step {step}", "stop"
    if schedule is not None:
        windows = Schedule.parse(schedule).repeat
        option, text = "--schedule", "window"
        end = "repeat" if windows == 0 else "stop" if windows == 1 else f"repeat:{windows}"
    if parse_options(arguments).keys() & {"delay", "duration", "capture-range"}:
        raise UsageError(f"{option} goes without --delay, --duration and --capture-range: it says when to capture")
    return {"capture-range": "nvtx", "nvtx-capture": f"{text}@nvprof_kit", "capture-range-end": end}


def what_never_began(settings: Settings) -> str:
    """Why a run with these settings may have captured nothing; '' for one that captures from its begin."""
    text, _, domain = settings.get("nvtx-capture", "").partition("@")
    if "delay" in settings:
        return f"the program ended before the {settings['delay']} s of --delay were over"
    if settings.get("capture-range") == "cudaProfilerApi":
        return "the program never called cudaProfilerStart"
    if (text, domain) == ("window", "nvprof_kit"):
        why = "is nvprof_kit.record(schedule=None) around the program's loop, and are there so many steps?"
        return f"no window of the schedule began; {why}"
    if domain == "nvprof_kit" and text.startswith("step "):
        return f"{text} never began; it is what nvprof_kit.step({text.removeprefix('step ')}) announces"
    return f"no range '{settings['nvtx-capture']}' began" if text else ""
