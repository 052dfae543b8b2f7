"""Ranges in Python and in C tell a tool the same of any program with real tensors, and leave nothing behind.

`test_ranges` compares the twins in a world without torch. Here each runs in a process of its own, whole.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lane import examples

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "tests" / "support" / "ranges" / "twin_programs.py"


class Twin:
    """A process that runs programs with one of the twins."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NVPROF_KIT": "auto", "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the process ended with {self.process.wait()}"
        return json.loads(answer)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Twin]]:
    """Both twins by name; C's is built from today's source."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("built")
    build = "import sys, hatch_build; print(hatch_build.build(hatch_build.Path(sys.argv[1])))"
    built = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    twins = {"python": Twin(), "c": Twin(built.stdout.strip())}
    yield twins
    for twin in twins.values():
        twin.end()


def statement(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), *arguments).map(list)


names, places = st.sampled_from("abc"), st.integers(-3, 2)
operations = st.sampled_from(["add", "multiply", "transpose", "in place", "cat", "detach", "leaf"])
results = st.sampled_from(["tensor", "tuple", "deep", "long", "nested", "record", "view", "none"])
modules = st.integers(0, 2)

simple = st.one_of(
    statement("operation", operations, places, places),
    statement("module", modules, places, st.sampled_from([False, False, True])),
    statement("checkpoint", modules, places, st.booleans()),
    statement("backward", places, st.booleans(), st.booleans()),
    statement("grad", st.lists(places, max_size=3)),
    statement("hook_fails", places),
    statement("switch", st.sampled_from([False, False, True])),
    statement("raise"),
)


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, max_size=4)
    return st.one_of(
        statement("with", names, body),
        statement("phase", names, body),
        statement("call", names, body, places, results),
        statement("call", names, body, places, results),
        statement(
            "generator",
            names,
            st.lists(body, max_size=3),
            st.integers(0, 4),
            st.sampled_from(["throw", "close", "drop"]),
        ),
        statement("coroutine", names, body),
        statement("start", names, body),
        statement("thread", body),
        statement("no_grad", body),
        statement("try", body),
    )


programs = st.lists(st.recursive(simple, around, max_leaves=15), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs)
def test_any_program_looks_the_same(twins, program: list[Any]) -> None:
    looks_the_same(twins, program)


def looks_the_same(twins, program: list[Any]) -> None:
    seen = {name: twin.ask(program=program) for name, twin in twins.items()}
    assert [seen[name].pop("compiled") for name in ("python", "c")] == [False, True]
    assert seen["c"] == seen["python"]
    assert seen["c"]["left"] == []
    balanced(seen["c"]["log"])


def balanced(log: list[Any]) -> None:
    """Each thread opens one deeper than it is and closes where it is; at the end it is nowhere."""
    depths: Counter[str] = Counter()
    for thread, depth, text in (event for event in log if isinstance(event, list)):
        assert depth == depths[thread] + (text is not None)
        depths[thread] += 1 if text is not None else -1
    assert not any(depths.values())


CHECKPOINTED = ["checkpoint", 0, -1, True], ["checkpoint", 1, -1, False], ["module", 2, -1, False]
EVERYTHING = [
    ["call", "a", [["with", "b", [["operation", "in place", 0, 1], *CHECKPOINTED]]], 0, "nested"],
    ["try", [["phase", "c", [["module", 0, 0, True]]]]],
    ["generator", "a", [[["module", 1, -1, False]], [["raise"]]], 1, "throw"],
    ["coroutine", "b", [["backward", -1, True, True], ["grad", [-1, -2]]]],
    ["thread", [["call", "c", [["module", 2, 0, False]], -1, "deep"], ["backward", -1, True, False]]],
    ["with", "b", [["switch", False], ["call", "b", [["operation", "cat", -1, 0]], -1, "record"]]],
    ["hook_fails", -2],
]
"""A program that does a bit of everything, and whose last backward pass is aborted by a hook."""


def test_a_program_that_does_everything_looks_the_same(twins) -> None:
    looks_the_same(twins, EVERYTHING)


@pytest.mark.slow
@pytest.mark.parametrize("twin", ["python", "c"])
def test_nothing_is_left_behind(twin: str, twins) -> None:
    assert len(twins[twin].ask(program=EVERYTHING)["log"]) > 50
    left = twins[twin].ask(program=EVERYTHING, times=20)
    assert left["objects"] < 10, left  # a leak of one object a run would be 20
    assert left["bytes"] < 4 << 20, left
