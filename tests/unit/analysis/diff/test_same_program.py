"""Ten runs of one program on an H100, compared with each other and with one of them in which a layer is slower."""

from __future__ import annotations

import lzma
import sqlite3
from functools import cache
from itertools import pairwise
from pathlib import Path

import nvprof_kit

DATA = Path(__file__).parents[3] / "data" / "same"


@cache
def run(number: int) -> nvprof_kit.Capture:
    return nvprof_kit.open(DATA / f"llama{number}-2024.2.sqlite.xz")


def test_no_gate_fails_between_runs_of_one_program() -> None:
    for one, other in (*pairwise(range(10)), (9, 0)):
        compared = run(one).diff(run(other), fail_on=["*:+10%", "phase:backward:+5%", "class:gemm:+5%"])
        assert compared.held
        rows = compared.to_frame()
        # the GPU is idle for two thirds of these steps, so that their length says little
        assert set(rows[rows["level"] == "step"]["verdict"]) == {"undecided"}
        assert set(rows[rows["level"].isin(["phase", "class", "layer"])]["verdict"]) == {"same"}


def slower(path: Path, number: int, layer: str, times: float) -> Path:
    """A run in which all kernels of a layer, forward and backward, take longer by a factor."""
    path.write_bytes(lzma.decompress((DATA / f"llama{number}-2024.2.sqlite.xz").read_bytes()))
    text = "coalesce(n.text, (SELECT value FROM StringIds WHERE id = n.textId))"
    with sqlite3.connect(path) as db:
        db.execute(
            'UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET "end" = start + CAST(("end" - start) * ? AS INTEGER) WHERE '
            "correlationId IN (SELECT r.correlationId FROM NVTX_EVENTS n JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON "
            f'r.globalTid = n.globalTid AND r.start BETWEEN n.start AND n."end" WHERE {text} IN (?, ?))',
            (times, layer, f"{layer} backward"),
        )
    db.close()
    return path


def test_a_layer_that_is_a_tenth_slower_is_found(tmp_path: Path) -> None:
    changed = slower(tmp_path / "slower.sqlite", 1, "model.layers.2.mlp", 1.1)
    compared = run(0).diff(changed, fail_on=["*:+5%"])
    assert not compared.held
    rows = compared.to_frame()
    told = rows[(rows["level"] == "layer") & (rows["verdict"] == "slower")]
    assert set(zip(told["layer"], told["phase"], strict=True)) == {
        ("model.layers.2.mlp", "forward"), ("model.layers.2.mlp", "backward")
    }  # fmt: skip
    assert told["change"].between(0.09, 0.11).all()
