"""The replay beside a published what-if analysis: three steps of a pipeline whose last stage is longer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

TESTS = Path(__file__).parents[3]
DATA = TESTS / "data" / "stragglers"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_what_if", TESTS / "bench" / "compare_what_if.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_replay_agrees_with_a_published_analysis(compare: ModuleType) -> None:
    theirs = json.loads((DATA / "result-ST.json").read_text())
    found = compare.slowdowns(compare.read(DATA / "trace-ST.parquet"))
    # the first step only begins the timeline
    measured = np.mean(list(theirs["step_t_base"].values())[1:])
    assert found["measured"] == pytest.approx(measured, rel=0.001)
    assert found["replayed"] == pytest.approx(found["measured"], rel=0.02)
    # theirs are of all 32 steps
    assert found["slowdown"] == pytest.approx(theirs["blocking_slowdown"], rel=0.05)
    stages = {int(stage): value for stage, value in theirs["blocking_decompose_by_stage"].items()}
    assert found["stage"] == pytest.approx(stages, rel=0.05)
    assert max(found["stage"], key=found["stage"].get) == max(stages, key=stages.__getitem__) == 3
