"""The command lines in the documentation, and what each needs to run in a test.

A block of code is one of commands where it has lines that begin with ``$ ``, which then are the commands, or with a
program of `PROGRAMS`. A command is run on the captures of `FILES`, which stand for the names that the pages use, or it
is not run, for a reason that `REASONS` gives by how it begins.
"""

import lzma
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.captures import timer_log
from support.data import DATA, ROOT

PROGRAMS = re.compile(
    r"(nvprof-kit|python3?|pipx?|make|bash|sh|torchrun|srun|mpirun|accelerate|deepspeed|nsys|nsys-ai|ncu|docker|git) "
    r"|tools/|tests/|recipes/|\.ci/run|ncu=|[A-Z_]+=\S+ |/tmp/"
)
"""How a command begins."""

RANKS = dict.fromkeys(("run.rank", "run-rank", "train-rank", "captures/run.rank"), "ddp-layer")
FILES = {
    "run.sqlite": "flops/llama12-2024.2.sqlite.xz",
    "run.flops.json": "flops/llama12-2024.2.flops.json",
    "other.flops.json": "flops/llama12-2024.2.flops.json",
    "before.sqlite": "eager-2023.4.sqlite.xz",
    "after.sqlite": "checkpoint-2023.4.sqlite.xz",
    "base.sqlite": "eager-2023.4.sqlite.xz",
    "new.sqlite": "checkpoint-2023.4.sqlite.xz",
    "serving.1.sqlite": "generate-2024.2.sqlite.xz",
    "run.sqlite.xz": "eager-2023.4.sqlite.xz",
    "run.pickle": "snapshots/run-2.11.pickle.xz",
    "plan.csv": "ncu/encoder-plan-2025.3.csv.xz",
    "kernels.csv": "ncu/plan-2025.3.csv.xz",
    "layer.csv": "ncu/layer-2025.3.csv.xz",
    "roofline.csv": "ncu/roofline-2025.3.csv.xz",
    "trace.json": "foreign/kineto-modules.json.xz",
    "run.json.gz": "kineto/ddp.rank0.json.xz",
    **{
        f"{name}{rank}.sqlite": f"ranks/{job}.rank{rank}-2024.2.sqlite.xz"
        for name, job in {**RANKS, "pipeline-layer.rank": "pipeline-layer"}.items()
        for rank in (0, 1)
    },
    **{f"a{run}.sqlite": "eager-2023.4.sqlite.xz" for run in (1, 2, 3)},
    **{f"b{run}.sqlite": "checkpoint-2023.4.sqlite.xz" for run in (1, 2, 3)},
}
"""What stands for a name that the pages use."""

INSTEAD = {
    r"nvprof-kit layers .*--columns memory": {"run.sqlite": "memory/caching-2024.2.sqlite.xz"},
    r"nvprof-kit metrics ": {"run.sqlite": "metrics/llama-2023.4.sqlite.xz"},
    r"nvprof-kit ncu (plan|layers plan)": {"run.sqlite": "ncu/encoder-2024.2.sqlite.xz"},
    r"nvprof-kit (advise|breakdown|export|plot|report|summary) ": {"run.sqlite": "slow-2024.2.sqlite.xz"},
    r"nvprof-kit layers run.sqlite --domain default": {"run.sqlite": "foreign/emit-nvtx-2024.2.sqlite.xz"},
}
"""Another capture under a name, for commands that need one of their kind."""

RULES = {"mine.toml": "kernel-classes.md"}
"""Rules that a page shows, and commands name."""

WORDS = {
    " /shared/maps": " maps",
    "--steps 12": "--steps 4",
    "--step 12": "--step 4",
    "flops before.sqlite": "flops run.sqlite",
    "model.layers.1 ": "encoder.layers.1 ",
    "--fail-on": "--allow-undecided --anyway --fail-on",
}
"""What the captures at hand call otherwise."""

UNDER_NSYS = re.compile(r"nvprof-kit profile (?!.*preset metrics)")
"""Commands that capture a program on any machine with nsys; they are run on one of its releases."""

PROGRAM = {"train.py": "examples/tiny_transformer.py --steps=14 --batch=1 --length=16"}
SCHEDULED = {
    "10:13": "3:5",
    "4:9": "3:5",
    "train.py": "examples/trainer.py",
    "by_hand.py --attention sdpa --norm torch": "examples/trainer.py",
    "by_hand.py": "examples/trainer.py",
}
"""The program that stands for the reader's; a schedule needs one with `record(schedule=None)` in its loop."""

ELSEWHERE = "run by tests/integration/recipes/, and on a GPU by tests/gpu"
REASONS = {
    r"nsys-ai |python -c .from hta": "another tool, which is not installed here; HTA: test_hta.py",
    r"nsys stats ": "needs nsys: the figures are compared with it by tests/integration/nsys/test_nsight_numbers.py",
    r"nvprof-kit profile .*preset metrics": f"samples a GPU: {ELSEWHERE}",
    r"(STEP=\d+ |IMAGE=\S+ )?(bash|sh) |ncu=|recipes/": f"a container, ncu, or a recipe: {ELSEWHERE}",
    r"nvprof-kit session ": f"a session: {ELSEWHERE}",
    r"nvprof-kit ranks map .*(awk|tcp:)": "needs Slurm or Dask: tests/integration/ranks/",
    r"nvprof-kit ranks /shared/maps": "reads what another command wrote: run by tests/integration/ranks/",
    r"nvprof-kit layers run.sqlite --rules my-trainer": "reads a domain of the reader's own: test_rules.py",
    r"nvprof-kit doctor -- torchrun": "asks a program: run by tests/unit/analysis/test_doctor.py",
    r"nvprof-kit layers run.sqlite --rules vllm": "no capture of vLLM: tests/unit/analysis/foreign/test_rules.py",
    r"python3? train\.py|NVPROF_KIT_SCHEDULE=": "a program of the reader's own",
    r"(torchrun|srun|mpirun|accelerate|deepspeed|docker) ": "needs a launcher's cluster or GPUs: tests/gpu",
    r"python3? tests/(gpu|bench)": "measures, on a GPU or a quiet machine",
    r"pip |pipx |make |\.ci/run|tools/|CC=|git ": "installs or runs tests: a job of .github/workflows",
}
"""Why a command is not run, by how it begins. A test prints the list: `pytest -rP -k list_of_what_is_not_run`."""


class Command(NamedTuple):
    """A command line of a page."""

    page: str
    line: str

    @property
    def reason(self) -> str:
        """Why a command is not run; '' if it is."""
        if self.under_nsys:
            return ""
        return next((why for pattern, why in REASONS.items() if re.match(pattern, self.line)), "")

    @property
    def under_nsys(self) -> bool:
        """Whether it captures a program with nsys."""
        return bool(UNDER_NSYS.match(self.line))


def pages() -> list[Path]:
    """The pages whose commands run."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "recipes" / "README.md"])


def commands(page: Path) -> Iterator[Command]:
    """The command lines in a page's blocks of code, continued lines as one, without comments."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- help-(\S+):begin -->.*?<!-- help-\1:end -->", "", text, flags=re.DOTALL)
    name = page.relative_to(ROOT).as_posix()
    for kind, block in re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        if kind not in ("", "sh", "bash", "console", "text"):
            continue
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            if PROGRAMS.match(line) and not re.match(r"\S+ [a-z]+:", line):
                yield Command(name, " ".join(line.partition(" #")[0].split()))


def lay_out(folder: Path) -> None:
    """Put the files that the pages name into a folder, and all of tests/data as it is."""
    for name, capture in FILES.items():
        _put(capture, folder / name)
    shutil.copy(ROOT / "examples" / "tiny_transformer.py", folder / "train.py")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "tests").symlink_to(ROOT / "tests")
    for name, page in RULES.items():
        block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
        assert block, f"{page} has no rules"
        (folder / name).write_text(block[1], encoding="utf-8")
    (folder / "time_log").mkdir()
    for rank in range(2):
        starts = [(stage, 2000 * step) for step in range(4) for stage in "ab"]
        timer_log.write(folder / "time_log", rank, *((name, at, 1000 + 1000 * rank / 9, 900) for name, at in starts))
    for one in DATA.iterdir():
        if not (folder / one.name).exists():
            (folder / one.name).symlink_to(one)


def for_command(line: str, folder: Path) -> str:
    """Prepare the captures of a command; returns the command to run."""
    wanted = {"run.sqlite": FILES["run.sqlite"]}
    for pattern, files in INSTEAD.items():
        if re.match(pattern, line):
            wanted |= files
    for name, capture in wanted.items():
        _put(capture, folder / name)
    for said, known in WORDS.items():
        line = line.replace(said, known)
    return line


def _put(capture: str, target: Path) -> None:
    """Link an unpacked capture to a name; each is unpacked once."""
    unpacked = target.parent / ".unpacked" / capture.removesuffix(".xz")
    if not unpacked.exists():
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        packed = (DATA / capture).read_bytes()
        unpacked.write_bytes(lzma.decompress(packed) if capture.endswith(".xz") else packed)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if target.suffix == ".gz":
        import gzip

        target.write_bytes(gzip.compress(unpacked.read_bytes(), 1))
    elif target.suffix == ".xz":
        shutil.copy(DATA / capture, target)
    else:
        target.symlink_to(unpacked)
