"""Verbs that capture among odd names, failing tools, foreign folders and other runs; with stand-ins for profilers.

A stand-in runs the program and leaves files as the real one does, so what is tested here is the verbs' own part.
What a real nsys leaves when things end badly is in test_recipes_endings.py.
"""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import executable
from support.recipes import VERBS, environment, gone, refuse, run, start, until, wait_for

STAND_IN = r"""#!/bin/bash
case $1 in
  --version) exit 0 ;;
  --list-sections | --query-metrics) exit 0 ;;
  --import=*) [ -e "${1#*=}" ] || exit 1; echo '"ID"'; exit 0 ;;
  sessions) echo '1 Launched here'; exit 0 ;;
  profile | launch | start)
    [ "$2" != --help ] || { echo ' --trace= --cuda-graph-trace= --output= --sample= --cpuctxsw= --export='; exit 0; } ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --output=* | --export=*/*) out=${1#*=} ;;
    profile | --target-processes | all | --*) ;;
    *) break ;;
  esac
  shift
done
trap 'kill -TERM $!' TERM INT # before the program, which may be interrupted as soon as it runs
"$@" &
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
status=$?
touch "$out.nsys-rep" "$out.sqlite" "$out.ncu-rep"
case $0 in *ncu*) rm "$out.nsys-rep" "$out.sqlite" ;; *) rm "$out.ncu-rep" ;; esac
exit $status
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """A folder with stand-ins for both profilers."""
    folder = tmp_path / "tools of mine"
    folder.mkdir()
    for name in ("nsys", "ncu"):
        executable(folder / name, STAND_IN)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "it's (a) $place; of * [mine]"
    folder.mkdir()
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "name", ["a b", "-dash", "--output", "$HOME", "it's", "*", "`id`", "a;b", "back\\slash", "#", "é", "[x]", "100%%"]
)
def test_a_report_of_any_name(tool, place, name):
    done = run("profile", "-o", name, "--", "sh", "-c", "exit 7", cwd=place, NSYS=str(tool / "nsys"))
    assert done.returncode == 7, done.stderr
    assert files(place) == sorted([f"{name}.nsys-rep", f"{name}.sqlite"])


@pytest.mark.parametrize("recipe", ["profile", "ncu"])
@pytest.mark.parametrize("name", [".", "..", "folder/", "a\nb", 'quo"te', "a&b"])
def test_a_name_that_cannot_be(tool, place, recipe, name):
    done = ask_here(recipe, "-o", name, "--", "true", place=place, tool=tool)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert files(place) == []


def ask_here(recipe: str, *argv: str, place: Path, tool: Path) -> subprocess.CompletedProcess[str]:
    return refuse(recipe, *argv, cwd=place, NSYS=str(tool / "nsys"), NCU=str(tool / "ncu"))


def ask(recipe: str, *argv: str, place: Path, tool: Path) -> subprocess.CompletedProcess[str]:
    return run(recipe, *argv, cwd=place, NSYS=str(tool / "nsys"), NCU=str(tool / "ncu"))


@pytest.mark.parametrize("recipe", ["profile", "launch", "ncu"])
@pytest.mark.parametrize("program", ["no-such-program", "./no-such.py", "./text", "note", "if"])
def test_a_program_that_is_none(tool, place, recipe, program):
    (place / "text").write_text("no program")
    done = ask_here(recipe, "--", program, place=place, tool=tool)
    assert done.returncode == 127
    assert done.stderr == f"nvprof-kit: '{program}' is not found, or is no program that can be run\n"
    assert files(place) == ["text"]


@pytest.mark.parametrize("recipe", ["profile", "ncu"])
def test_a_tool_that_does_not_run(tool, place, recipe):
    for name in ("nsys", "ncu"):
        (tool / name).write_text("#!/bin/sh\necho 'libelf.so.1: cannot open' >&2; exit 127\n")
    done = ask_here(recipe, "--", "true", place=place, tool=tool)
    name = "ncu" if "ncu" in recipe else "nsys"
    assert done.returncode == 3
    assert done.stderr == f"nvprof-kit: {tool / name} does not run: libelf.so.1: cannot open\n"


THERE = {"profile": ("sqlite", "nsys-rep", "partial"), "ncu": ("csv", "ncu-rep"), "start": ("sqlite", "partial")}


@pytest.mark.parametrize(("verb", "suffix"), [(verb, suffix) for verb, names in THERE.items() for suffix in names])
def test_what_is_there_is_overwritten_only_by_force(tool, place, verb, suffix):
    """It is said what to do with the options that the verb has: `session start` has no --force."""
    there = place / f"{'.' if suffix == 'partial' else ''}run.{suffix}"
    there.mkdir() if suffix == "partial" else there.write_text("precious")
    words = ("-s", "here", "-o", "run") if verb == "start" else ("--", "true")
    done = ask_here(verb, *words, place=place, tool=tool)
    assert (done.returncode, done.stderr.count("\n"), files(place)) == (2, 1, [there.name])
    assert done.stderr.startswith(f"nvprof-kit: {there.name} exists")
    assert ("--force" in done.stderr) == (verb != "start")
    if verb != "start":
        assert ask(verb, "--force", *words, place=place, tool=tool).returncode == 0
        assert there.name == ".run.partial" or there.read_text() != "precious"


@pytest.mark.parametrize(("ending", "status"), [("exit 5", 5), ("kill -SEGV $$", 128 + 11)])
def test_a_tool_that_fails(tool, place, ending, status):
    (tool / "nsys").write_text(f"#!/bin/bash\ncase $1$2 in --version | profile--help) exit 0 ;; esac\n{ending}\n")
    done = ask("profile", "--", "true", place=place, tool=tool)
    assert done.returncode == status
    assert done.stderr.endswith("nvprof-kit: no report: nothing was captured: nsys ended before it began the program\n")
    assert files(place) == []


@pytest.mark.parametrize(
    "words", ["End of file", "Connection to the Agent lost.", "type: wrapexcept<QuadDCommon::SystemException>"]
)
def test_an_nsys_that_fails_by_itself_is_started_again(tool, place, words):
    """Once, if the program has not begun."""

    def fails(how: str) -> str:
        return STAND_IN.replace(
            "#!/bin/bash\n", f'#!/bin/bash\n[ "$1" != profile ] || [ "$2" = --help ] || {{ {how}; }}\n'
        )

    once = '[ ! -e "${0%/*}/failed" ] && : >"${0%/*}/failed"'
    nsys = tool / "nsys"
    nsys.write_text(fails(f"{once} && {{ echo '{words}'; exit 1; }}"))
    done = ask("profile", "-o", "run", "--", "sh", "-c", "echo began; exit 7", place=place, tool=tool)
    assert (done.returncode, done.stdout) == (7, "began\n"), done.stderr
    assert "nvprof-kit: nsys failed by itself before it began the program, and is started again\n" in done.stderr
    assert files(place) == ["run.nsys-rep", "run.sqlite"]

    nsys.write_text(fails(f"echo '{words}'; exit 1"))
    done = ask("profile", "-o", "other", "--", "sh", "-c", "echo began", place=place, tool=tool)
    assert (done.returncode, done.stdout, done.stderr.count("is started again")) == (1, "", 1)
    assert done.stderr.endswith("nothing was captured: nsys ended before it began the program\n")
    assert files(place) == ["run.nsys-rep", "run.sqlite"]


def test_events_that_nsys_cannot_import(tool, place):
    words = "Unknown runtime API function index: 468; **** Errors occurred while processing the raw events. ****"
    (tool / "nsys").write_text(STAND_IN.replace("exit $status", f"echo '{words}'; exit $status"))
    done = ask("profile", "-o", "run", "--", "sh", "-c", "exit 7", place=place, tool=tool)
    told = "nvprof-kit: nsys could not import all events of the run: it is older than the program's CUDA"
    assert (done.returncode, done.stderr.count(told)) == (7, 1)


@pytest.mark.parametrize("recipe", ["profile", "ncu"])
def test_a_folder_that_cannot_be_written_to(tool, place, recipe):
    for folder in ("/proc/run", "/dev/null/run", "/sys/kernel/run"):
        done = ask_here(recipe, "-o", folder, "--", "true", place=place, tool=tool)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "cannot make this folder" in done.stderr or "cannot write to this folder" in done.stderr


def test_runs_at_once_in_one_folder(tool, place):
    command = [*VERBS["profile"], "-o", "same", "--", "sh", "-c", "until [ -e ended ]; do sleep 0.05; done; exit 7"]
    running = [start(command, place, NSYS=str(tool / "nsys")) for _ in range(3)]
    assert until(lambda: sum(each.poll() is not None for each in running) == 2)
    (place / "ended").touch()
    said = [each.communicate(timeout=60)[0] for each in running]
    assert sorted(each.returncode for each in running) == [2, 2, 7]
    assert sum(".same.partial exists: a run writes there now" in text for text in said) == 2
    assert files(place) == ["ended", "same.nsys-rep", "same.sqlite"]


def test_a_report_that_came_meanwhile_is_kept(tool, place):
    done = ask("profile", "--", "touch", "run.sqlite", place=place, tool=tool)
    assert done.returncode == 1 and "run.sqlite exists; the new one stays in .run.partial" in done.stderr
    assert files(place / ".run.partial") == ["run.sqlite"]


SLEEP = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(100)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ncu_that_is_interrupted_or_killed(tool, place, number):
    """What kills ncu itself leaves no report; the stand-in gives the status of its program, which the verb ends."""
    command = [*VERBS["ncu"], "--", sys.executable, "-c", SLEEP]
    running = start(command, place, NCU=str(tool / "ncu"))
    pid, is_killed = int(wait_for(place / "pid")), number == signal.SIGKILL
    os.kill(_parent(pid) if is_killed else running.pid, number)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + (signal.SIGKILL if is_killed else signal.SIGTERM), said
    assert gone(pid)
    assert files(place) == ["pid", *([] if is_killed else ["run.csv", "run.ncu-rep"])]


ASKING = "import time; print('hello', input('name? '), open('ready', 'w').write('yes'), flush=True); time.sleep(100)"


def test_a_terminal_is_the_programs_under_ncu(tool, place):
    script = STAND_IN.replace("trap 'kill -TERM $!'", "trap :").replace('"$@" &', '"$@" <&0; exit_of=$?')
    script = script.replace("while kill -0 $! 2>/dev/null; do wait $!; done\nwait $!\nstatus=$?", "status=$exit_of")
    (tool / "ncu").write_text(script)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place)
        words = [*VERBS["ncu"], "--", sys.executable, "-c", ASKING]
        os.execve(words[0], words, environment(NCU=str(tool / "ncu")))
    os.write(terminal, b"world\n")
    wait_for(place / "ready")
    time.sleep(0.2)
    os.write(terminal, b"\x03")
    time.sleep(0.1)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGINT
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "hello world" in shown
    assert files(place) == ["ready", "run.csv", "run.ncu-rep"]


def _parent(pid: int) -> int:
    """The process's parent, once it is no longer what starts it."""

    def parent() -> int:
        return int(Path(f"/proc/{pid}/status").read_text().partition("PPid:")[2].split()[0])

    assert until(lambda: parent() > 1)
    return parent()


def test_a_report_that_ncu_cannot_read_is_none(tool, place):
    (tool / "ncu").write_text(STAND_IN.replace("echo '\"ID\"'; exit 0", "echo '\"ID\"'; exit 4"))
    done = ask("ncu", "--", "true", place=place, tool=tool)
    assert done.returncode == 1 and "what there is stays in .run.partial" in done.stderr
    assert files(place) == [".run.partial"]
