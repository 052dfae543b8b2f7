"""Every number of the per-layer table of real captures, against an independent computation."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import NamedTuple

import pytest
from support.brute_force.layers import BruteForce

import nvprof_kit

DATA = Path(__file__).parents[3] / "data"
CAPTURES = sorted(DATA.glob("*.sqlite.xz"))
NUMBERS = ["calls", "gpu_ops", "gpu_self_ns", "gpu_total_ns", "gpu_busy_ns", "cpu_ns"]


class Case(NamedTuple):
    """A capture, unpacked, and what the independent computation knows of it: computed once for all tests."""

    path: Path
    truth: BruteForce


@pytest.fixture(scope="module", params=CAPTURES, ids=lambda path: path.name.removesuffix(".sqlite.xz"))
def capture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    plain = tmp_path_factory.mktemp("captures") / request.param.stem
    plain.write_bytes(lzma.decompress(request.param.read_bytes()))
    return Case(plain, BruteForce(plain))


@pytest.mark.parametrize("by_step", [False, True], ids=["all", "by-step"])
def test_every_number_equals_the_brute_force(capture: Case, by_step: bool) -> None:
    result = nvprof_kit.open(capture.path).layers(steps="all", by="step" if by_step else None)
    rows = result.rows
    expected = capture.truth.table(by_step, dict(zip(result.tree["layer"], result.tree["parent"], strict=True)))
    keys = ["instance", "layer", "phase"] if by_step else ["layer", "phase"]
    plain = rows.astype(object).where(rows.notna(), None)
    ours = {tuple(row[key] for key in keys): row for row in plain.to_dict("records")}
    assert set(ours) == {key for key, row in expected.items() if row["calls"] or row["gpu_total_ns"]}
    for key, row in ours.items():
        assert {name: row[name] for name in NUMBERS} == {name: expected[key][name] for name in NUMBERS}, key
        assert row["share"] == pytest.approx(expected[key]["share"], abs=1e-12)


def test_it_adds_up(capture: Case) -> None:
    result = nvprof_kit.open(capture.path).layers(steps="all")
    expected = sum(op["ns"] for op in capture.truth.operations())
    assert result.rows["gpu_self_ns"].sum() == result.summary.total_ns == expected
    assert sum(result.summary.by_how.values()) == expected
    shown = nvprof_kit.open(capture.path).layers()
    for table in (result, shown):
        top = table.tree[table.tree["depth"] == 0]
        summary = table.summary
        assert top["total_ns"].sum() == table.rows["gpu_self_ns"].sum() == summary.total_ns
        assert summary.total_ns + summary.outside_ns + summary.left_out_ns == summary.capture_ns == expected
