"""The commands of SKILL.md, run as they stand there on captures whose answers are known, read as it says."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nvprof_kit
from nvprof_kit._cli import group, main

DATA = Path(__file__).parents[2] / "data"
SKILL = Path(nvprof_kit.__file__).parent / "skill" / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")
COMMANDS = dict(re.findall(r"^## (.+\?)\n\n```sh\n(.+)\n```$", TEXT, re.MULTILINE))
"""The command of each question."""

Rows = list[dict[str, Any]]


class Told(NamedTuple):
    status: int
    out: str
    err: str

    def rows(self) -> Rows:
        if self.out.startswith(("[", "{")):
            made = json.loads(self.out)
            return made if isinstance(made, list) else made["rows"]
        return list(csv.DictReader(io.StringIO(self.out)))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def asked(question: str, capture: str, other: str = "") -> Told:
        words = shlex.split(COMMANDS[question])
        files = {"CAPTURE": capture, "RANK0": capture, "NEW": other, "RANK1": other}
        argv = [str(DATA / f"{files[word]}.xz") if word in files else word for word in words[1:]]
        with pytest.raises(SystemExit) as ended:
            main(argv)
        return Told(int(ended.value.code or 0), *capsys.readouterr())

    return asked


def greatest(rows: Rows, column: str) -> dict[str, Any]:
    return max(rows, key=lambda row: int(row[column] or 0))


def test_ten_questions_with_a_command_each() -> None:
    assert len(COMMANDS) == 10
    assert {shlex.split(command)[1] for command in COMMANDS.values()} <= set(group.commands)
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", TEXT)
    assert head is not None and len(head[1]) <= 64 and len(head[2]) <= 1024


def test_which_layer_costs_most(ask: Callable[..., Told]) -> None:
    """The program's fourth block is four times as wide as its others."""
    told = ask("Which layer costs most?", "slow-2024.2.sqlite")
    assert greatest(told.rows(), "gpu_self_ns")["layer"].startswith("layers.3.")


def test_how_much_is_forward_backward_optimizer(ask: Callable[..., Told]) -> None:
    rows = ask("How much is forward, backward, optimizer?", "llama-2023.4.sqlite").rows()
    found = {row["part"]: int(row["gpu_total_ns"]) for row in rows}
    assert found["backward"] > found["forward"] > found["optimizer"] > 0 and "other" not in found


@pytest.mark.parametrize(
    ("capture", "cause"), [("llama-2023.4.sqlite", "launch"), ("slow-2024.2.sqlite", "dataloader")]
)
def test_why_is_the_gpu_idle(ask: Callable[..., Told], capture: str, cause: str) -> None:
    """An eager Llama of small kernels; and a program whose loader sleeps."""
    rows = [row for row in ask("Why is the GPU idle?", capture).rows() if row["step"]]
    for row in rows:
        causes = {name: int(row[name]) for name in row if re.fullmatch("idle_.+_ns", name)}
        assert max(causes, key=lambda name: causes[name]) == f"idle_{cause}_ns"
        assert sum(causes.values()) == int(row["idle_ns"])


def test_which_kernels_cost_most(ask: Callable[..., Told]) -> None:
    rows = ask("Which kernels cost most?", "llama-2023.4.sqlite").rows()
    costs = [int(row["gpu_total_ns"]) for row in rows]
    assert costs == sorted(costs, reverse=True) and rows[0]["kernel_class"]


def test_what_should_be_changed(ask: Callable[..., Told]) -> None:
    rules = [row["rule"] for row in ask("What should be changed?", "slow-2024.2.sqlite").rows()]
    assert any("load" in rule or "data" in rule for rule in rules)


def test_are_the_steps_equally_long(ask: Callable[..., Told]) -> None:
    rows = [row for row in ask("Are the steps equally long?", "eager-2024.2.sqlite").rows() if row["step"]]
    first, *later = (int(row["wall_ns"]) for row in rows)
    assert len(rows) == 3 and first == max(first, *later)


def test_did_it_become_slower(ask: Callable[..., Told]) -> None:
    """A capture beside itself: nothing is slower, and what can be decided is the same."""
    told = ask("Did it become slower?", "slow-2024.2.sqlite", "slow-2024.2.sqlite")
    assert {row["verdict"] for row in told.rows()} <= {"same", "undecided"}


def test_what_cannot_be_decided_is_called_so(ask: Callable[..., Told]) -> None:
    """Two runs of two and three steps whose lengths vary by a third."""
    told = ask("Did it become slower?", "eager-2023.4.sqlite", "eager-2024.2.sqlite")
    assert next(row for row in told.rows() if row["level"] == "step")["verdict"] == "undecided"


@pytest.mark.parametrize(("job", "rank"), [("ddp-layer", 1), ("ddp-none", None)])
def test_which_rank_is_slow(ask: Callable[..., Told], job: str, rank: int | None) -> None:
    files = [f"ranks/{job}.rank{number}-2024.2.sqlite" for number in (0, 1)]
    verdict = json.loads(ask("Which rank is slow?", *files).out)["verdict"]
    assert verdict["rank"] == rank
    if rank is not None:
        assert verdict["layer"] == "model.layers.2.mlp" and verdict["cause"] == "more_work"


def test_how_much_of_the_peak_is_used(ask: Callable[..., Told]) -> None:
    rows = ask("How much of the GPU's peak is used?", "flops/llama12-2024.2.sqlite").rows()
    assert any(name in rows[0] for name in ("mfu", "share_of_peak", "of_peak"))


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("How much of the GPU's peak is used?", "count a step of the program"),
        ("Where does the memory go?", "no memory in this capture"),
    ],
)
def test_when_to_abstain(ask: Callable[..., Told], question: str, why: str) -> None:
    told = ask(question, "llama-2023.4.sqlite")
    assert told.status == 2 and told.out == "" and why in told.err


def test_where_does_the_memory_go(ask: Callable[..., Told]) -> None:
    told = ask("Where does the memory go?", "memory/caching-2024.2.sqlite")
    assert told.status == 0 and any(name.endswith("_bytes") for name in told.rows()[0])


def test_without_marks_the_memory_of_a_layer_is_not_known(ask: Callable[..., Told]) -> None:
    told = ask("Where does the memory go?", "hooks-train-2023.4.sqlite")
    assert told.status == 0 and "only CUDA's own allocations are known" in told.err
    assert not any(row["memory_peak_bytes"] or row["memory_retained_bytes"] for row in told.rows())


def test_the_verb_tells_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words, out in ((["skill"], f"{SKILL}\n"), (["skill", "--print"], TEXT)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code and capsys.readouterr().out == out
