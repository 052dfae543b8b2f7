"""`ncu profile`: exact commands, refusals, sets; and with a real ncu, what it knows and what it takes.

The golden file holds command lines as `--dry-run` prints it where there is no ncu. NVPROF_KIT_NCU
names real ncu executables, separated by os.pathsep; they need no GPU for these tests.
"""

import os
import re
import shlex
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
from support.cli import NVPROF_KIT, executable, execute, execute_here
from support.data import DATA, ROOT, unpacked

RECIPES = ROOT / "recipes" / "ncu"
SETS = sorted(RECIPES.joinpath("sets").glob("*.txt"))
CHIPS = {"sm_80": "ga100", "sm_89": "ad102", "sm_90": "gh100", "sm_100": "gb100", "sm_120": "gb202"}
"""What the recipes tell apart, and a chip of each as ncu names it."""
REAL = [path for path in os.environ.get("NVPROF_KIT_NCU", "").split(os.pathsep) if path]

CALLS = [
    "-o layer -l model.layers.3 -- python train.py --lr 3",
    "-o layer -l 'model.layers.3 backward' -s tensor -x --profile-from-start=off -o out/l3 -f -- ./train.py | sm_80",
    "-o layer --layer='a[0]/b@c recompute@mine' -s occupancy -- python -c 'print(1)' | sm_100",
    "-o layer -l model.layers.0 -s communication -- python train.py",
    "-o kernels -k flash_fwd -k nvjet -s speed-of-light -- python train.py",
    "-o kernels -k fmha -s memory -x --clock-control=base -x --cache-control=none -x --replay-mode=application -- ./x",
    "-o kernels -k adam -x -c -x 3 -x --target-processes -x application-only -s stalls -- python train.py",
    "-o roofline -s roofline -x --profile-from-start=off -- python train.py",
    "-o roofline -l lm_head -s memory -s roofline -- python train.py | sm_100",
    "-o nccl -k nccl -s communication --rank 0 -x --profile-from-start=off -- torchrun --no-python rank.sh ./train.py",
    "-o layer -l lm_head -s communication --rank 3 -x --replay-mode=kernel -- ./rank.sh ./job",
    "-o layer -l lm_head -s communication -x --replay-mode=app-range -- python train.py",
    "-o layer -l lm_head -x --replay-mode=range -- python train.py",
    "-o roofline -l lm_head -s communication -s roofline -- python train.py | sm_89",
    "-o roofline -l lm_head -s tensor -s roofline -- python train.py | sm_120",
]


def run(*argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return execute_here("ncu", "profile", *argv, cwd=cwd, **{"NCU": "/no/ncu", "ARCH": "sm_90", **variables})


def measured(*argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return _run([*NVPROF_KIT, "ncu", "profile", *argv], cwd, variables)


def recipe(name: str, *argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return _run([str(RECIPES / name), *argv], cwd, variables)


def _run(command: list[str], cwd: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return execute(*command, cwd=cwd, **{"NCU": "/no/ncu", **variables})


def test_exact_commands(tmp_path, golden):
    lines = []
    for call in CALLS:
        words, _, arch = call.partition(" | ")
        done = run("--dry-run", *shlex.split(words), cwd=tmp_path, ARCH=arch or "sm_90")
        assert (done.returncode, done.stderr) == (0, ""), call
        lines.append(f"$ {call}\n{done.stdout.replace('/no/ncu', 'ncu')}")
    golden("recipes/ncu.txt", "\n".join(lines))


LAUNCHER = "--rank 0: the launcher has to start rank.sh on each rank: -- {} ... "
RANK_SH = shlex.quote(str(RECIPES / "rank.sh"))
REFUSED = [
    ("-o layer -- x", "nothing to measure; needed --layer PATH, --kernel NAME, or every launch by --set roofline"),
    ("-l a -k b -- x", "--kernel and --layer exclude each other: each says what to measure"),
    ("-k a -o 100% -- x", "-o '100%': ncu gives % a meaning; take a name without"),
    ("-k '' -- x", "-k '' names no kernel"),
    ("-o layer -l a", "no program to run; needed: nvprof-kit ncu profile [OPTION]... -- python train.py"),
    ("-o layer -l a -s flops -- x", "no set 'flops'; there are: base communication memory occupancy roofline"),
    ("-l a --rank 0 -- /bin/torchrun train.py", f"{LAUNCHER.format('torchrun')}--no-python {RANK_SH} python"),
    ("-l a --rank 0 -- mpirun -np 8 python train.py", f"{LAUNCHER.format('mpirun')}{RANK_SH} python train.py"),
    ("-l a --rank 0 -- accelerate launch rank.sh train.py", "--rank 0: without --no_python the launcher takes rank.sh"),
    (
        "-o roofline -s roofline -- x",
        "no ncu: '/no/ncu' is not found; install Nsight Compute and put its folder on PATH",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refusals_are_one_line(call, message, tmp_path):
    done = run(*shlex.split(call), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3 if "no ncu" in message else 2, "", 1)
    assert done.stderr.startswith(f"nvprof-kit: {message}")


HANG = "ranks that wait for each other may hang under one ncu; with --rank N it measures one of them "
NO_WORD = "--rank 0: no word is rank.sh; unless the program starts it on each rank, ncu measures all, and they may hang"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("-- torchrun train.py", HANG),
        ("-- python -m torch.distributed.run train.py", HANG),
        ("--rank 0 -- torchrun --no-python ./mine.sh train.py", NO_WORD),
        ("--rank 0 -- env A=1 torchrun train.py", NO_WORD),
        ("--rank 0 -- ./job", NO_WORD),
        ("-- python train.py", ""),
        ("--rank 0 -- torchrun --no_python rank.sh ./train.py", ""),
        ("--rank 0 -- python -m torch.distributed.run --no-python /a/rank.sh ./train.py", ""),
    ],
)
def test_ranks_that_would_hang_are_said(call, message, tmp_path):
    done = run(*shlex.split(f"-o kernels -n -k nccl {call}"), cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.startswith(f"nvprof-kit: {message}" if message else "")
    assert bool(done.stderr) == bool(message)


def test_what_measures_links_runs_the_program_again(tmp_path):
    """Also a set of one's own."""
    (tmp_path / "own.txt").write_text("metric nvltx__bytes.sum\n")
    done = run("-o", "kernels", "-n", "-k", "x", "-s", "./own.txt", "--", "x", cwd=tmp_path)
    assert "--replay-mode=application" in done.stdout


def test_a_rank_that_is_not_there(tmp_path):
    ncu = executable(tmp_path / "ncu", "#!/bin/bash\ncase $1 in --help) echo exclude-tree ;; esac\n")
    words = ["-o", "layer", "-l", "a", "--rank", "7", "--", str(RECIPES / "rank.sh"), "true"]
    done = measured(*words, cwd=tmp_path, NCU=str(ncu))
    assert done.returncode == 1
    assert done.stderr.endswith(
        "no report: ncu measured no kernel; see what it said above; "
        "is there a rank 7 on this host, started by rank.sh?\n"
    )


SHOW = 'echo "$RANK|$1|$2|${NVTX_INJECTION64_PATH-}|$(cat /proc/$PPID/comm)"; exit 3'
UNDER_NCU = {"NVPROF_KIT_NCU_RANK": "1", "NVTX_INJECTION64_PATH": "libcuda-injection.so"}


@pytest.mark.parametrize(("number", "seen"), [("1", "libcuda-injection.so"), ("01", "libcuda-injection.so"), ("0", "")])
def test_a_rank_becomes_its_program(number, seen, tmp_path):
    """Out of ncu's sight or not: its words as they are, in one process, with its status, and nothing left behind."""
    argv = ["bash", "-c", SHOW, "me", "a  b", "*"]
    done = recipe("rank.sh", *argv, cwd=tmp_path, RANK=number, TMPDIR=str(tmp_path), **UNDER_NCU)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.rpartition("|")[0] == f"{number}|a  b|*|{seen}"
    assert list(tmp_path.iterdir()) == []


def test_the_other_ranks_come_of_a_process_that_ncu_leaves_out(tmp_path):
    """Its executable has the name that the recipes give ncu; it becomes the program."""
    executable(tmp_path / "rm", '#!/bin/bash\nreadlink /proc/$PPID/exe\n/bin/rm "$@"\n')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = recipe("rank.sh", "true", cwd=tmp_path, RANK="0", TMPDIR=str(tmp_path), PATH=path, **UNDER_NCU)
    name = Path(done.stdout.strip()).name
    dry = run("-o", "layer", "-n", "-l", "a", "--rank", "1", "--", "./job.sh", cwd=tmp_path)
    assert f" --target-processes-filter=exclude-tree:{name} " in dry.stdout
    assert dry.stdout.startswith("LC_ALL=C NVPROF_KIT_NCU_RANK=1 ")
    assert len(name) <= 15  # what Linux keeps of a process's name


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "rank.sh: no program to run; needed: LAUNCHER... rank.sh python train.py"),
        (["no-such-program"], 127, "no-such-program: not found"),
    ],
)
def test_a_rank_without_a_program(argv, status, message, tmp_path):
    done = recipe("rank.sh", *argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "") and message in done.stderr


def test_a_folder_in_which_no_program_can_run(tmp_path):
    done = recipe("rank.sh", "true", cwd=tmp_path, RANK="0", TMPDIR="/no/folder", **UNDER_NCU)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith("rank.sh: cannot write to /no/folder; set TMPDIR to a folder that can be written\n")
    command = f"ulimit -f 10; trap '' XFSZ; exec {RANK_SH} true"
    done = execute("bash", "-c", command, RANK="0", TMPDIR=str(tmp_path), **UNDER_NCU)
    assert done.returncode == 3
    assert done.stderr.endswith(
        f"rank.sh: nothing can run in {tmp_path}; set TMPDIR to a folder with room, whose programs may run\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arch", CHIPS)
def test_metrics_are_asked_of_the_chip_that_measures(arch, tmp_path):
    """An Ada was asked for the metrics of a Blackwell, and left out what only it has."""
    ncu = executable(tmp_path / "ncu", '#!/bin/bash\n[ "$1" != --query-metrics ] || echo "$3" >>asked\n')
    run("-o", "kernels", "-n", "-k", "x", "-s", "tensor", "--", "x", cwd=tmp_path, NCU=str(ncu), ARCH=arch)
    assert (tmp_path / "asked").read_text().split() == [CHIPS[arch]]


WAYS = [
    ("layer.sh", {"LAYER": "a backward"}, "--nvtx-include=nvprof_kit@a backward/|--export=layer"),
    ("kernels.sh", {"KERNEL": "a|b"}, "--kernel-name=regex:a|b|--launch-count=10|--export=kernels"),
    (
        "kernels.sh",
        {"KERNEL": "nccl", "COUNT": "3", "SETS": "communication", "NVPROF_KIT_NCU_RANK": "0", "OUTPUT": "a b"},
        "--kernel-name=regex:nccl|--launch-count=3|--export=a b|--target-processes-filter=exclude-tree:other-rank",
    ),
    ("roofline.sh", {}, "--section=SpeedOfLight_RooflineChart|--export=roofline"),
]


@pytest.mark.parametrize(("name", "variables", "words"), WAYS)
def test_the_command_of_a_recipe(name, variables, words, tmp_path):
    """Called by a link, in a folder on PATH say; the options of ncu and the program come last."""
    ncu = executable(tmp_path / "ncu", '#!/bin/sh\nprintf "%s\\n" "LC_ALL=$LC_ALL" "$@"\n')
    (tmp_path / "a link").symlink_to(RECIPES / name)
    variables = {"NCU": str(ncu), **variables}
    done = _run([str(tmp_path / "a link"), "--cache-control=none", "python", "a  b"], tmp_path, variables)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[:2] == ["LC_ALL=C", "--target-processes"] and lines[-3:] == ["--cache-control=none", "python", "a  b"]
    assert [word for word in words.replace("|--", "\n--").split("\n") if word not in lines] == []
    assert "--section=LaunchStats" in lines


REFUSING = """#!/bin/bash
# What ncu 2025.3.1 did on an H200 in a virtual machine, whose NVLink counters cannot be read.
for word in "$@"; do
  case $word in
    --version) echo "Version 2025.3.1.0"; exit ;;
    --list-sections | --query-metrics) exit ;;
    --list-metrics)
      case "$*" in *Nvlink*) printf '%s\\n' nvltx__bytes.sum ' -nvltx__bytes.sum' ;; *) echo sm__throughput.avg ;; esac
      exit ;;
    --import=*) echo '"ID","Kernel Name"'; exit ;;
    --log-file=*) log=${word#*=} ;;
    --export=*) report=${word#*=} ;;
  esac
done
echo "$*" >>ran
case "$*" in
  *nvl* | *=Nvlink*)
    names='nvlrx__bytes.avg, nvlrx__bytes.sum'
    names+=', nvltx__bytes.sum, nvlrx__bytes_data_user.sum, nvltx__bytes_data_user.sum'
    echo "==ERROR== Unable to access the following 5 metrics: $names." >"$log"
    exit 9 ;;
esac
echo "==PROF== Profiling" >"$log"
touch "$report.ncu-rep"
exit 7
"""


def test_what_the_gpu_does_not_give_is_left_out(tmp_path):
    ncu = executable(tmp_path / "ncu", REFUSING)
    done = measured("-o", "layer", "-l", "a", "-s", "communication", "--", "true", cwd=tmp_path, NCU=str(ncu))
    assert done.returncode == 7  # the program's own
    assert [line.partition(": ")[2] for line in done.stderr.splitlines()] == [
        "section Nvlink: left out",
        "metric nvlrx__bytes.sum: left out",
        "metric nvltx__bytes.sum: left out",
        "metric nvlrx__bytes_data_user.sum: left out",
        "metric nvltx__bytes_data_user.sum: left out",
        "ncu does not give what was left out here: once more, without",
        "wrote layer.csv layer.ncu-rep",
        "next: nvprof-kit ncu layers layer.csv",
    ]
    first, second = (tmp_path / "ran").read_text().splitlines()
    added = {*second.split()} - {*first.split()}
    assert added == {word for word in second.split() if word.startswith("--metrics=")}
    assert "==ERROR== Unable" in done.stdout and done.stdout.endswith("==PROF== Profiling\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.csv", "layer.ncu-rep", "ncu", "ran"]


@pytest.fixture(params=REAL or [None], ids=lambda path: path and re.sub(r"\W+", "-", path)[-30:])
def ncu(request: pytest.FixtureRequest) -> str:
    if request.param is None:
        absent = pytest.fail if os.environ.get("NVPROF_KIT_REQUIRE_NCU") == "1" else pytest.skip
        absent("no ncu: set NVPROF_KIT_NCU to executables of Nsight Compute (tools/get-ncu fetches one)")
    return request.param


@lru_cache
def chips(ncu: str) -> str:
    """The chips that an ncu knows."""
    return execute(ncu, "--list-chips", check=True).stdout


@lru_cache
def metrics_of(ncu: str, chip: str) -> frozenset[str]:
    """The metrics that an ncu knows of a chip; asked once."""
    listed = execute(ncu, "--query-metrics", "--chip", chip, check=True).stdout
    return frozenset(line.split()[0] for line in listed.splitlines() if line.strip())


def test_a_chip_has_the_types_of_its_tensor_cores(ncu):
    """fp8 came with Ada and Hopper, and the sets ask for it there and nowhere before."""
    told = {line.split()[1]: line.split()[2:] for line in (RECIPES / "sets/tensor.txt").read_text().splitlines()
            if line.startswith("metric")}  # fmt: skip
    for arch, chip in CHIPS.items():
        if chip in chips(ncu):
            asked = {name.split(".")[0] for name, only in told.items() if arch in only and "_src_" in name}
            there = {name for name in metrics_of(ncu, chip) if re.fullmatch(r"sm__ops_path_tensor_src_fp8", name)}
            assert {name for name in asked if name.endswith("src_fp8")} == there
            assert bool(there) == (arch != "sm_80")


@pytest.mark.parametrize("arch", CHIPS)
def test_every_metric_of_every_set_is_known(ncu, arch, tmp_path):
    """To this ncu on that chip, so that none is left out."""
    if CHIPS[arch] not in chips(ncu):
        assert arch in ("sm_100", "sm_120")  # newer than Debian's ncu
        return
    every = [word for path in SETS for word in ("-s", path.stem)]
    done = run("-o", "kernels", "-n", "-k", "x", *every, "--", "x", cwd=tmp_path, NCU=ncu, ARCH=arch)
    assert done.returncode == 0 and "has no metric" not in done.stderr
    command = shlex.split(done.stdout.splitlines()[0])
    (metrics,) = (word.partition("=")[2].split(",") for word in command if word.startswith("--metrics="))
    asked = {name for name in metrics if not name.startswith("launch__")}
    known = metrics_of(ncu, CHIPS[arch])
    assert len(asked) > 40 and [name for name in asked if not {name, name.split(".")[0]} & known] == []


@pytest.mark.parametrize("call", [call for call in CALLS if "sm_" not in call])
def test_it_takes_every_option(ncu, call, tmp_path):
    """Without a kernel there is no report, and ncu says so and not that it does not know an option.

    Of a range it refuses some metrics, one after the other, until the verb has left them all out.
    """
    words = shlex.split(call.partition(" -- ")[0])
    done = measured(*words, "-o", "a", "--", "true", cwd=tmp_path, NCU=ncu)
    version = execute(ncu, "--version", check=True).stdout
    if "2022.3" in version and "--rank" in words:
        assert done.stderr == "nvprof-kit: this ncu cannot leave a process out; 2024.1 can\n"
        return
    if "2022.3" in version and "app-range" in words:
        assert "the argument for option '--replay-mode' is invalid" in done.stdout + done.stderr
        return
    assert re.search("No (kernels|ranges) were profiled", done.stdout + done.stderr), done.stdout + done.stderr
    assert "no report: ncu measured no kernel" in done.stderr
    assert not (tmp_path / "a.csv").exists()


@pytest.mark.parametrize(("name", "variables"), [way[:2] for way in WAYS if "NVPROF_KIT_NCU_RANK" not in way[1]])
def test_it_takes_the_options_of_a_recipe(ncu, name, variables, tmp_path):
    done = recipe(name, "true", cwd=tmp_path, NCU=ncu, **variables)
    assert "No kernels were profiled" in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_report_is_read_without_a_gpu(ncu, tmp_path):
    """What this ncu prints of a report of another release is read as what that one printed."""
    from nvprof_kit._trace.open import open_ncu

    data = DATA / "ncu"
    unpacked(data / "own-2025.3.ncu-rep.xz", tmp_path / "own.ncu-rep")
    command = [ncu, "--import", "own.ncu-rep", "--page", "raw", "--csv", "--print-units", "base"]
    done = execute(*command, cwd=tmp_path, check=True)
    if "2022.3" in execute(ncu, "--version", check=True).stdout:
        return  # it does not know the report's GPU
    (tmp_path / "own.csv").write_text(done.stdout)
    printed, kept = open_ncu(tmp_path / "own.csv"), open_ncu(data / "own-2025.3.csv.xz")
    assert len(printed.metrics) == len(kept.metrics) > 0
    both = sorted({*printed.metrics} & {*kept.metrics})
    assert "gpu__time_duration.sum" in both
    for name in both:
        assert printed.metrics[name].to_numpy() == pytest.approx(kept.metrics[name].to_numpy(), rel=5e-3, nan_ok=True)
