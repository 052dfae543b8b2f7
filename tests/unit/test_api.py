"""What the package offers: one list, typed, reachable from Python as from the command line, and shown in the docs."""

import ast
import inspect
import re
import sys
from typing import Any

import click
import pytest
from support.captures.nsys_file import NsysFile
from support.cli import execute
from support.data import ROOT
from support.golden import with_columns_of

import nvprof_kit
from nvprof_kit._cli import group

PROGRAM = """
import nvprof_kit

with nvprof_kit.open("run.sqlite", rules="megatron-lm") as capture:
    layers = capture.layers(by="step", columns="memory", steps=nvprof_kit.StepOptions(first=1))
reveal_type(capture)  # nvprof_kit._api.capture.Capture
reveal_type(layers.selected(where="*.mlp", top=5))  # nvprof_kit._analysis.layers.layers.Layers
reveal_type(layers["model.layers.0"].to_frame())  # pandas.core.frame.DataFrame
reveal_type([row["gpu_self_ns"] for row in layers])  # list[Any]
reveal_type(capture.layers(steps=range(3, 5)).to_arrow())  # Any
reveal_type(capture.diff("other.sqlite", fail_on=["step:+5%"]).held)  # bool
reveal_type(capture.export(steps=3).save("run.json.gz"))  # pathlib.Path
reveal_type(nvprof_kit.open_job("folder/").verdict.rank)  # int | None
reveal_type(nvprof_kit.map_captures("folder/", "maps/"))  # list[str]
reveal_type(nvprof_kit.open_ncu("raw.csv").layers(capture).figure())  # matplotlib.figure.Figure
reveal_type(nvprof_kit.open_snapshot("s.pickle").memory().warnings)  # tuple[nvprof_kit.issues.Issue, ...]
reveal_type(nvprof_kit.open_timers("logs/").logs.stages)  # pandas.core.frame.DataFrame
reveal_type(nvprof_kit.doctor().ok)  # bool
with nvprof_kit.step(1), nvprof_kit.phase("forward"):
    pass
nvprof_kit.nosuch  # type: ignore[attr-defined]
"""

CALLS = {
    "layers": "Capture.layers",
    "ranks compare": "open_job",
    "ranks map": "map_captures",
    "summary": "Capture.summary",
    "breakdown": "Capture.breakdown",
    "advise": "Capture.advise",
    "diff": "Capture.diff",
    "report": "Capture.report",
    "plot": "Capture.plot",
    "export": "Capture.export",
    "metrics": "Capture.metrics",
    "flops": "Capture.flops",
    "ncu plan": "Capture.ncu_plan",
    "ncu layers": "NcuReports.layers",
    "memory": "MemorySnapshot.memory",
    "timers": "TimerLog.timers",
    "record": "record",
    "recipes": "recipes_folder",
    "doctor": "doctor",
    "scrub": "scrub",
}
"""What a verb of the command line is in Python."""


def verbs() -> list[str]:
    found = []
    for name, command in group.commands.items():
        found += [f"{name} {inner}" for inner in getattr(command, "commands", {})] or [name]
    return found


def stub_names() -> list[str]:
    tree = ast.parse((ROOT / "nvprof_kit" / "__init__.pyi").read_text(encoding="utf-8"))
    return [str(one.asname) for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names]


def test_there_is_one_list_of_names():
    assert sorted(nvprof_kit.__all__) == sorted(stub_names())
    assert set(nvprof_kit.__all__) <= set(dir(nvprof_kit))


@pytest.mark.parametrize("name", stub_names())
def test_every_name_is_there_and_says_what_it_is(name):
    assert inspect.getdoc(getattr(nvprof_kit, name))


@pytest.mark.slow
def test_a_strictly_typed_program_passes_without_any(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # with the settings and the cache of the package's own check, which is strict: a second run takes seconds
    words = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", str(program)]
    done = execute(*words, cwd=ROOT)
    said = dict(re.findall(r':(\d+): note: Revealed type is "(.*)"', done.stdout))
    lines = PROGRAM.splitlines()
    meant = {str(number): line.split("  # ")[1] for number, line in enumerate(lines, 1) if "reveal_type" in line}
    assert said == meant and done.returncode == 0, done.stdout


OPENED = (nvprof_kit.Capture, nvprof_kit.Job, nvprof_kit.NcuReports, nvprof_kit.MemorySnapshot, nvprof_kit.TimerLog)


@pytest.mark.parametrize("opened", OPENED)
def test_no_method_or_property_gives_anything_at_all(opened):
    public = [member for name, member in vars(opened).items() if name[0] != "_" and inspect.getdoc(member)]
    given = [getattr(member, "fget", None) or getattr(member, "func", member) for member in public]
    assert given and not {inspect.signature(one).return_annotation for one in given} & {"Any", inspect.Signature.empty}


RECIPES = ("profile", "launch", "start", "stop", "status")
"""Verbs that become a shell recipe: they start a profiler around another program."""


@pytest.mark.parametrize("verb", [verb for verb in verbs() if not {verb, verb.split()[-1]} & {*RECIPES}])
def test_nothing_is_reachable_from_the_command_line_only(verb):
    if verb not in CALLS:
        assert hasattr(nvprof_kit, f"open_{verb}") or verb == "ranks", f"what is {verb} in Python?"
        return
    assert callable(in_python(CALLS[verb]))


ELSEWHERE = {
    "diff": {"vs": "Capture.diff:new"},
    "export": {"format": "Capture.export:data_format"},
    # each view is a method of Job; its page has the timeline
    "ranks compare": {"view": "", "rank": "open_job:ranks", "timeline": "Job.report:timeline"},
    "ranks map": {"rank": "map_captures:ranks"},
    "ncu layers": {"by": ""},
    # the program that records itself decides these
    "record": {
        **dict.fromkeys(("force", "max-memory", "annotate"), ""),
        "count": "count_flops:path",
        "detail": "record:stacks",
    },
}
"""Options that are something else in Python than the argument of the same name."""

OUTPUT = {"format", "output"}
"""What `Result.save` takes from the name of its file."""


def in_python(name: str) -> object:
    there: object = nvprof_kit
    for part in name.split("."):
        there = getattr(there, part)
    return there


@pytest.mark.parametrize("verb", CALLS)
def test_every_option_is_an_argument_of_the_same_name(verb):
    command: Any = group
    for part in verb.split():
        command = command.commands[part]
    options = {option.opts[-1].lstrip("-") for option in command.params if isinstance(option, click.Option)} - OUTPUT
    arguments = inspect.signature(in_python(CALLS[verb])).parameters
    names = (*arguments, *inspect.signature(nvprof_kit.open).parameters)
    known = {name.rstrip("_").replace("_", "-") for name in names}  # --with is with_
    known |= {*inspect.signature(nvprof_kit.Result.selected).parameters} if {"rows", "ranks"} & {*arguments} else set()
    elsewhere = ELSEWHERE.get(verb, {})
    assert options - known == {*elsewhere} - OUTPUT
    for call, _, argument in (target.partition(":") for target in elsewhere.values() if target):
        assert argument in inspect.signature(in_python(call)).parameters
    if CALLS[verb].startswith("Capture."):  # and every argument is an option
        extra = {"path", "rows", "self", "new", "base", "other", "job", "data-format"}
        assert {name.rstrip("_").replace("_", "-") for name in arguments} - options <= extra


def test_the_python_in_the_readme_that_reads_a_capture_runs(tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", readme, re.S) if "nvprof_kit.open(" in one]
    for name, kernel in (("run.sqlite", 30), ("after.sqlite", 40)):
        file = NsysFile(tmp_path / name)
        for number in range(4):
            zero = 1000 * number
            file.range_(f"step {number}", zero + 100, zero + 900, category="step", payload=number)
            file.range_("model.layers.0", zero + 110, zero + 200, category="forward")
            file.kernel(zero + 300, zero + 300 + kernel, launched=(zero + 120, zero + 125))
        file.write()
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert {path.suffix for path in tmp_path.iterdir()} >= {".sqlite", ".csv", ".png", ".html"}


EXPECTED = 'layer,gpu_self_ns\n"a, b",1\n(none),2\n'


def test_a_golden_file_has_its_values_and_rows_whatever_columns_are_new():
    assert with_columns_of(EXPECTED, 'layer,flop,gpu_self_ns\n"a, b",7,1\n(none),,2\n') == EXPECTED
    for other in ('layer,gpu_self_ns\n"a, b",1\n(none),3\n', 'layer,gpu_self_ns\n"a, b",1\n'):
        assert with_columns_of(EXPECTED, other) != EXPECTED
    with pytest.raises(AssertionError, match="columns that are gone"):
        with_columns_of(EXPECTED, "layer\na\n")
