"""The recipes, run for real by the scripts beside this file, which say in a line each what came of it."""

import os
from pathlib import Path

import pytest
from support.gpu import GPU, need, run

NO = " NO "


def test_every_recipe_of_the_system_profiler(tmp_path: Path) -> None:
    need("nsys")
    assert NO not in run(GPU / "check_recipes.sh", tmp_path, timeout=1800)


def test_every_recipe_of_ncu(tmp_path: Path) -> None:
    need("nsys", "ncu")
    assert NO not in run(GPU / "run_ncu_recipes.sh", tmp_path, timeout=1800)


@pytest.mark.usefixtures("two_gpus")
def test_ncu_measures_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    need("nsys", "ncu")
    assert NO not in run(GPU / "run_ncu_recipes.sh", tmp_path, "ranks", timeout=600)


@pytest.mark.parametrize("engine", ["podman", "apptainer"])
def test_in_a_container(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(engine, "nsys", "ncu")
    if os.geteuid() != 0:
        pytest.skip("needs root, to lay this machine's files over themselves")
    monkeypatch.setenv("ENGINE", engine)
    assert NO not in run(GPU / "check_container.sh", tmp_path, timeout=1800)
