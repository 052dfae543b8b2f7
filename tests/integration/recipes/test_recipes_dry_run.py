"""The exact command of every verb, for several releases of nsys and without one, against a golden file."""

import itertools
import os
import re
import shlex
from pathlib import Path

import pytest
from support.cli import execute
from support.recipes import OPTIONS, RECIPES, VERBS, dry_run, refuse, stand_in

CALLS = """
profile -- python train.py --lr 3
profile -o out/run -f -- python train.py
profile -o 'runs/%h.%p' -- python train.py
profile --preset infer -- python serve.py
profile --preset graphs -- python serve.py
profile --preset memory -- python train.py
profile --preset metrics -- python train.py
profile --preset light -- python train.py
profile --preset metrics -x --trace=nvtx -- python train.py
profile --step 12 -- python train.py
profile -x --capture-range=nvtx -x '--nvtx-capture=layers.0 backward@nvprof_kit' -- python train.py
profile --schedule stable -- python train.py
profile --schedule 50:60 -- python train.py
profile --schedule skip_first=5,active=3,repeat=4 -- python train.py
profile --schedule active=3,repeat=0 -- python train.py
profile -x --capture-range=cudaProfilerApi -- python train.py
profile -x --delay=5 -x --duration=30 -- python train.py
profile -x --python-functions-trace=calls.json -x --sample=cpu -- python train.py
profile -x --gpu-metrics-devices=0 --preset metrics -- python train.py
launch -- python serve.py
launch -s serving -p memory -- python serve.py
start
start -s serving -p metrics -o out/first
ranks -r 3,5 --step 4 -- python train.py
ranks -r 0-7:2 -- python train.py
ranks -r 1-7:2 --preset metrics -o out/run -- python train.py
""".strip().splitlines()


def answers(folder: Path) -> str:
    """Every call with what it prints: once for the releases that agree."""
    lines: list[str] = []
    tools = {release: str(stand_in(folder, release)) for release in OPTIONS} | {"none": "nsys"}
    for call in CALLS:
        verb, *argv = shlex.split(call)
        releases_of: dict[str, list[str]] = {}
        for release in ("none", *OPTIONS):
            done = dry_run(verb, *argv, cwd=folder, NSYS=tools[release], RANK="3", LOCAL_RANK="1")
            assert done.returncode == 0, done.stderr
            answer = _plain((done.stdout + done.stderr).replace(tools[release], "nsys"), folder)
            releases_of.setdefault(answer, []).append(release)
        lines.append(f"$ {call}")
        for answer, releases in releases_of.items():
            lines.append(f"# {'every nsys' if len(releases_of) == 1 else ', '.join(releases)}\n{answer.rstrip()}")
        lines.append("")
    return "\n".join(lines)


def _plain(answer: str, folder: Path) -> str:
    answer = re.sub(r"rank(\d+)-\d{8}-\d{6}", r"rank\1-TIME", answer)
    answer = re.sub(r"(run)-[^ /]*?-rank", r"\1-HOST-rank", answer)
    return answer.replace(str(folder), "HERE")


def test_dry_runs(tmp_path, golden):
    golden("recipes/nsys.txt", answers(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("nsys-")] == []


def test_every_verb_is_called():
    assert {call.split()[0] for call in CALLS} == {*VERBS} - {"ncu", "stop", "status"}  # test_recipes_ncu.py has ncu


@pytest.mark.every_nsys
@pytest.mark.parametrize("preset", sorted(path.name for path in (RECIPES / "presets").iterdir()))
def test_a_real_nsys_knows_every_option(nsys, preset, tmp_path):
    known = execute(nsys, "profile", "--help").stdout
    done = dry_run("profile", "-p", preset, "--step", "3", "--", "true", cwd=tmp_path, NSYS=nsys)
    asked = [word.partition("=")[0] for word in shlex.split(done.stdout) if word.startswith("--")]
    assert [option for option in asked if f"{option}=" not in known] == []
    left_out = re.findall(r"this nsys has no (--\S+): left out", done.stderr)
    assert [option for option in left_out if f"{option}=" in known] == []
    assert set(left_out) <= {"--cuda-event-trace"}


@pytest.mark.every_nsys
def test_launch_and_start_share_a_preset(nsys, tmp_path):
    known = {verb: execute(nsys, verb, "--help").stdout for verb in ("launch", "start")}
    known = {verb: re.sub(".*Deprecated.*", "", text) for verb, text in known.items()}
    for verb, argv in {"launch": ["--", "true"], "start": []}.items():
        done = dry_run(verb, "-p", "metrics", *argv, cwd=tmp_path, NSYS=nsys)
        assert done.stderr == ""
        asked = [word.partition("=")[0] for word in shlex.split(done.stdout) if word.startswith("--")]
        assert [option for option in asked if f"{option}=" not in known[verb]] == []
        assert ("--gpu-metrics-device" in asked) == (verb == "start")


@pytest.mark.every_nsys
def test_an_option_of_nsys_in_every_spelling(nsys, tmp_path):
    """Each option that has a letter in the help of nsys gives the same command by any spelling."""
    letters = re.findall(r"^\s*-(\w), --([\w-]+)=", execute(nsys, "profile", "--help").stdout, re.MULTILINE)
    options = {name: letter for letter, name in letters if name not in ("output", "force-overwrite", "help")}
    assert {"trace", "capture-range", "delay", "duration", "sample"} <= {*options}
    long = command(nsys, tmp_path, *(f"--{name}=5" for name in options))
    assert [name for name in options if f" --{name}=5 " not in long] == []
    for spelling in ("--{name}|5", "--{name} 5", "-{letter}|5", "-{letter}5", "-{letter} 5"):
        words = [spelling.format(name=name, letter=letter).split("|") for name, letter in options.items()]
        assert command(nsys, tmp_path, *itertools.chain(*words)) == long
    assert command(nsys, tmp_path, "--dela=5") == command(nsys, tmp_path, "-y5")  # as nsys takes it
    assert " --env-var=NVPROF_KIT_MEMORY=1,A=b --" in command(nsys, tmp_path, "-e A=b", preset="memory")


def command(nsys: str, folder: Path, *words: str, preset: str = "train") -> str:
    given = [word for option in words for word in ("-x", option)]
    done = dry_run("profile", "-p", preset, *given, "--", "true", cwd=folder, NSYS=nsys)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


NO_PROGRAM = "no program to run; needed: nvprof-kit profile [OPTION]... -- python train.py\n"
WHEN = "goes without --delay, --duration and --capture-range: it says when to capture\n"
REFUSED = [
    ("profile", NO_PROGRAM),
    ("profile --", NO_PROGRAM),
    ("profile --fast -- x", "No such option '--fast'. Did you mean '--step'? (see nvprof-kit profile --help)\n"),
    ("profile -o", "Option '-o' requires an argument (see nvprof-kit --help)\n"),
    ("profile --step two -- x", "Invalid value for '--step': 'two' is not a valid integer range"),
    ("profile --step -1 -- x", "Invalid value for '--step'"),
    ("profile --step 2 -x --delay=3 -- x", f"--step {WHEN}"),
    ("profile --step 2 -x -d5 -- x", f"--step {WHEN}"),
    ("profile --schedule 2:3 -x '-y 5' -- x", f"--schedule {WHEN}"),
    ("profile --step 2 -x '-c cudaProfilerApi' -- x", f"--step {WHEN}"),
    ("profile --schedule stabl -- x", "schedule 'stabl' is none of early, stable, periodic"),
    ("profile --schedule active=3,repeat=x -- x", "schedule 'active=3,repeat=x' is none of early, stable, periodic"),
    # words that nsys would take for something else
    ("profile -x --duration -- x", "-x '--duration' has no value; needed -x --duration=value\n"),
    ("profile -x -d -x --delay=5 -- x", "-x '-d' has no value; needed -x --duration=value\n"),
    ("profile -x 5 -- x", "-x '5' is no option of nsys; needed -x --option=value\n"),
    ("profile -x -- -- x", "-x '--' is no option of nsys; needed -x --option=value\n"),
    ("profile -x -q -x 5 -- x", "-x '-q': nsys has no option -q\n"),
    ("profile -x -o -x other -- x", "-x '-o': take the verb's own -o for that\n"),
    ("profile -x --export=none -- x", "-x '--export=none': take the verb's own --export for that\n"),
    (
        "profile -- x",
        "no nsys: '/no/nsys' is not found; install Nsight Systems and put its folder on PATH, or set NSYS\n",
    ),
    ("ranks -r some -- x", "--ranks some: 'some' is no rank, no range 0-7 and no stride 0-31:8\n"),
    ("ranks -r '' -- x", "--ranks : '' is no rank"),
    ("ranks -r 7-0 -- x", "--ranks 7-0: no rank lies from 7 to 0\n"),
    ("ranks -r 99999999999999999999 -- x", "--ranks 99999999999999999999: '99999999999999999999' is no rank"),
    ("ranks -- x", "no rank is known: none of "),
    ("ranks -r 0", "no program to run; needed: torchrun"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(call, message, tmp_path):
    verb, *argv = shlex.split(call)
    done = refuse(verb, *argv, cwd=tmp_path, NSYS="/no/nsys", RANK="" if message.startswith("no rank is") else "3")
    status = 3 if message.startswith("no nsys") else 2
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
    assert done.stderr.startswith(f"nvprof-kit: {message}")


def said(call: str, *argv: str, cwd: Path, **environment: str) -> tuple[int, str]:
    """Exit status, and the one line that is said."""
    verb, *words = call.split()
    done = dry_run(verb, *words, *argv, "--", "true", cwd=cwd, **{"NSYS": "nsys", "NCU": "/no/ncu", **environment})
    assert not done.stdout or not done.stderr
    return done.returncode, done.stderr or done.stdout.splitlines()[0]


def test_spaces_in_a_schedule(tmp_path):
    """The program takes it with spaces too, and the windows would be miscounted."""
    _, text = said("profile", "--schedule", " active=3, repeat = 2", cwd=tmp_path)
    assert text.startswith("NVPROF_KIT_SCHEDULE=active=3,repeat=2 nsys profile") and "=repeat:2 " in text


def test_a_file_named_as_a_preset_or_set(tmp_path):
    for name in ("train", "base", "tensor"):
        (tmp_path / name).write_text("a program of that name")
    assert "--trace=cuda,nvtx" in said("profile", cwd=tmp_path)[1]
    assert "--section=LaunchStats" in said("ncu -s tensor", cwd=tmp_path)[1]
    assert said("profile -p ./train", cwd=tmp_path)[0] == 2


def test_a_preset_edited_elsewhere(tmp_path):
    (tmp_path / "mine").write_bytes(b"# a comment\r\n  --trace=nvtx # why\r\n\r\n\t--env-var=A=#1\t# this")
    assert " --trace=nvtx '--env-var=A=#1' --export" in said("profile -p mine", cwd=tmp_path)[1]


def test_a_set_edited_elsewhere(tmp_path):
    text = b"metric a.sum # why\r\n\r\nmetric b.sum sm_80 # not here\r\n  metric c.sum sm_90"
    (tmp_path / "mine").write_bytes(text)
    _, command = said("ncu -s mine", cwd=tmp_path)
    assert "=gpu__time_duration.sum,a.sum,c.sum " in command


@pytest.mark.skipif(os.access("/etc/shadow", os.R_OK), reason="root reads everything")
@pytest.mark.parametrize(
    ("call", "message"), [("profile -p mine", "no permission to read it"), ("ncu -s mine", "Permission denied")]
)
def test_a_file_that_may_not_be_read(call, message, tmp_path):
    (tmp_path / "mine").touch(0o200)
    status, text = said(call, cwd=tmp_path)
    assert status == 2 and text.endswith(f"mine: {message}\n")


@pytest.mark.parametrize("line", ["metric", "section # which", "sections SpeedOfLight x", "metric a.sum sm90"])
def test_a_line_of_a_set_that_is_none(line, tmp_path):
    (tmp_path / "mine").write_text(line)
    status, text = said("ncu -s mine", cwd=tmp_path)
    assert (
        status == 2
        and text.startswith(f"nvprof-kit: --set mine: {line.partition(' #')[0]}: no section NAME or metric NAME")
        and text.count("\n") == 1
    )
