"""The commands of SKILL.md, run as they stand there on captures whose answers are known, read as it says."""

import csv
import io
import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from support.cli import run
from support.data import DATA

import nvprof_kit
from nvprof_kit._cli import group

SKILL = nvprof_kit.recipes_folder() / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^## (.+\?)\n\n```sh\n(.+)\n```$", TEXT, re.MULTILINE))
"""The command of each question."""


def ask(capsys: pytest.CaptureFixture[str], question: str, *captures: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command that answers a question."""
    files = dict.fromkeys(("CAPTURE", "RANK0"), captures[0]) | dict.fromkeys(("NEW", "RANK1"), captures[-1])
    words = [
        str(DATA / f"{files[word]}.sqlite.xz") if word in files else word for word in shlex.split(COMMANDS[question])
    ]
    return run(*words[1:]), *capsys.readouterr()


def idle_cause(cause: str) -> Callable[[list[dict[str, Any]]], bool]:
    """Whether each step waits most for this, and all its idle time has a cause."""

    def check(rows: list[dict[str, Any]]) -> bool:
        for row in (row for row in rows if row["step"]):
            causes = {name: int(row[name]) for name in row if re.fullmatch("idle_.+_ns", name)}
            longest = max(causes, key=lambda name: causes[name])
            if longest != f"idle_{cause}_ns" or sum(causes.values()) != int(row["idle_ns"]):
                return False
        return True

    return check


def parts_of_a_step(rows: list[dict[str, Any]]) -> bool:
    times = {row["part"]: int(row["gpu_total_ns"]) for row in rows}
    return times["backward"] > times["forward"] > times["optimizer"] > 0 and "other" not in times


def first_step_is_longest(rows: list[dict[str, Any]]) -> bool:
    walls = [int(row["wall_ns"]) for row in rows if row["step"]]
    return len(walls) == 3 and walls[0] == max(walls)


ANSWERS: list[tuple[str, tuple[str, ...], Callable[[list[dict[str, Any]]], bool]]] = [
    # the program's fourth block is four times as wide as its others
    ("Which layer costs most?", ("slow-2024.2",),
     lambda rows: max(rows, key=lambda row: int(row["gpu_self_ns"]))["layer"].startswith("layers.3.")),
    ("How much is forward, backward, optimizer?", ("llama-2023.4",), parts_of_a_step),
    # an eager Llama of small kernels; and a program whose loader sleeps
    ("Why is the GPU idle?", ("llama-2023.4",), idle_cause("launch")),
    ("Why is the GPU idle?", ("slow-2024.2",), idle_cause("dataloader")),
    ("Which kernels cost most?", ("llama-2023.4",),
     lambda rows: (costs := [int(row["gpu_total_ns"]) for row in rows]) == sorted(costs, reverse=True)),
    ("What should be changed?", ("slow-2024.2",), lambda rows: any(row["rule"] == "dataloader" for row in rows)),
    ("Are the steps equally long?", ("eager-2024.2",), first_step_is_longest),
    # a capture beside itself; and two runs of two and three steps whose lengths vary by a third
    ("Did it become slower?", ("slow-2024.2", "slow-2024.2"),
     lambda rows: {row["verdict"] for row in rows} <= {"same", "undecided"}),
    ("Did it become slower?", ("eager-2023.4", "eager-2024.2"),
     lambda rows: next(row for row in rows if row["level"] == "step")["verdict"] == "undecided"),
    ("How much of the GPU's peak is used?", ("flops/llama12-2024.2",), lambda rows: "mfu" in rows[0]),
    ("Where does the memory go?", ("memory/caching-2024.2",),
     lambda rows: any(row["memory_peak_bytes"] for row in rows)),
    ("Where does the memory go?", ("hooks-train-2023.4",),
     lambda rows: not any(row["memory_peak_bytes"] or row["memory_retained_bytes"] for row in rows)),
]  # fmt: skip


@pytest.mark.parametrize(("question", "captures", "right"), ANSWERS)
def test_a_question(question, captures, right, capsys):
    _, out, _ = ask(capsys, question, *captures)
    told = json.loads(out) if out[0] in "[{" else list(csv.DictReader(io.StringIO(out)))
    assert right(told["rows"] if isinstance(told, dict) else told)


@pytest.mark.parametrize(("job", "rank"), [("ddp-layer", 1), ("ddp-none", None)])
def test_which_rank_is_slow(job, rank, capsys):
    _, out, _ = ask(capsys, "Which rank is slow?", *(f"ranks/{job}.rank{number}-2024.2" for number in (0, 1)))
    verdict = json.loads(out)["verdict"]
    assert verdict["rank"] == rank
    assert rank is None or (verdict["layer"], verdict["cause"]) == ("model.layers.2.mlp", "more_work")


def test_ten_questions_with_a_command_each(capsys):
    assert len(COMMANDS) == 10 and {question for question, *_ in ANSWERS} == {*COMMANDS} - {"Which rank is slow?"}
    assert {shlex.split(command)[1] for command in COMMANDS.values()} <= set(group.commands)
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", TEXT)
    assert head is not None and len(head[1]) <= 64 and len(head[2]) <= 1024
    assert run("recipes") == 0 and capsys.readouterr().out == f"{SKILL.parent}\n"
