"""One launch, different work: told by role and time, measured for each role, and spread over each role's launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.captures.nsys_file import NsysFile

from nvprof_kit._analysis.kernels.signatures import APART, NEEDED, divide_by_role, read_kernels, role_of
from nvprof_kit._analysis.ncu.counters import PERCENTAGES
from nvprof_kit._analysis.ncu.layers import ncu_layers
from nvprof_kit._analysis.ncu.plan import plan
from nvprof_kit._trace.ncu.schema import NcuReport
from nvprof_kit._trace.open import open_capture


@pytest.mark.parametrize(
    ("layer", "role"),
    [
        ("model.layers.3.mlp", "model.layers.*.mlp"),
        ("layers.12", "layers.*"),
        ("h.0.moe.experts.7", "h.*.moe.experts.*"),
        ("conv2d.w8", "conv2d.w8"),
        ("(none)", "(none)"),
    ],
)
def test_a_role_is_a_layer_without_numbers(layer: str, role: str) -> None:
    assert role_of((layer, "backward")) == (role, "backward")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 1000)), min_size=1, max_size=60))
def test_kinds_divide_signatures_and_nothing_is_lost(launches: list[tuple[int, int, int]]) -> None:
    signature, role, duration = (np.array(column, dtype=np.int64) for column in zip(*launches, strict=True))
    signature = np.unique(signature, return_inverse=True)[1]
    index, kinds = divide_by_role(signature, role, duration)
    assert [kinds[one][0] for one in index] == signature.tolist()
    for one, (of, roles) in enumerate(kinds):
        mine = role[index == one]
        assert len(mine) > 0
        assert set(mine.tolist()) == set(roles) if roles else (index[signature == of] == one).all()


def test_roles_are_apart_by_their_medians() -> None:
    # role 0 takes 100, role 1 takes 119, role 2 takes 121: the last alone is longer than 100 by a fifth
    duration = np.array([100, 119, 121] * 5, dtype=np.int64)
    role = np.array([0, 1, 2] * 5)
    assert APART == 1.2
    index, kinds = divide_by_role(np.zeros(15, dtype=np.int64), role, duration)
    assert kinds == [(0, (0, 1)), (0, (2,))]
    assert index.tolist() == [0, 0, 1] * 5


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Three layers; in each the same product four times in attention, 100 ns each, and once in the MLP, 300 ns; with a
    little addition once. 3 * (400 + 300 + 10) = 2130 ns.
    """
    file = NsysFile(tmp_path / "run.sqlite")
    for layer in range(3):
        at = 1000 * layer
        file.range_(f"layers.{layer}", at, at + 990, category="forward")
        file.range_(f"layers.{layer}.attn", at + 1, at + 500, category="forward")
        file.range_(f"layers.{layer}.mlp", at + 501, at + 980, category="forward")
        for number in range(4):
            launched = at + 2 + 10 * number
            file.kernel(at + 100 * number, at + 100 * number + 100, launched=(launched, launched + 1), name="gemm")
        file.kernel(at + 600, at + 900, launched=(at + 502, at + 503), name="gemm")
        file.kernel(at + 900, at + 910, launched=(at + 504, at + 505), name="add")
    return file.write()


def test_a_launch_of_each_role_is_planned(capture: Path) -> None:
    made = plan(open_capture(capture, optional=NEEDED), share=0.95)
    # of each name the first; of the product also the 15th, which is the last layer's MLP: the additions are fewer
    assert made.names == ("_Zgemm",)
    assert made.invocations == (1, 15)
    assert made.measurements == 2
    assert made.rows[["kernel", "launches", "gpu_ns"]].values.tolist() == [["gemm", 12, 1200], ["gemm", 3, 900]]
    assert made.covered == pytest.approx(2100 / 2130)


def test_launches_are_numbered_as_they_were_launched(capture: Path) -> None:
    kernels = read_kernels(open_capture(capture, optional=NEEDED))
    gemm = [place for place, one in enumerate(kernels.signature) if kernels.signatures[one].name == "gemm"]
    assert kernels.invocation[gemm].tolist() == list(range(1, 16))
    assert kernels.early.all()


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Three layers; in each the same product twice, first 100 ns, then 300 ns, with no range between them."""
    file = NsysFile(tmp_path / "places.sqlite")
    for layer in range(3):
        at = 1000 * layer
        file.range_(f"layers.{layer}", at, at + 990, category="forward")
        file.kernel(at + 100, at + 200, launched=(at + 2, at + 3), name="gemm")
        file.kernel(at + 200, at + 500, launched=(at + 4, at + 5), name="gemm")
    return file.write()


def test_the_place_in_a_layers_call_divides_too(places: Path) -> None:
    made = plan(open_capture(places, optional=NEEDED))
    assert made.rows[["launches", "gpu_ns"]].values.tolist() == [[3, 900], [3, 300]]
    assert made.invocations == (1, 6)


@pytest.mark.parametrize(
    ("invocations", "values", "tensor"),
    [
        ((1, 6), [20.0, 80.0], (100 * 20 + 300 * 80) / 400),  # the numbers tell which is which
        ((), [20.0, 80.0, 22.0, 78.0, 24.0, 82.0], (100 * 22 + 300 * 80) / 400),  # every launch: means of each kind
        ((), [20.0, 80.0], 50.0),  # neither: both kinds take the mean of both
    ],
)
def test_numbers_of_launches_tell_the_kind(
    places: Path, invocations: tuple[int, ...], values: list[float], tensor: float
) -> None:
    measured = replace(report(*((("layers.0",), value) for value in values)), invocations=invocations)
    made = ncu_layers(measured, open_capture(places, optional=NEEDED)).rows.set_index("layer")
    assert made.loc["layers.1", "tensor_pct"] == pytest.approx(tensor)


def report(*launches: tuple[tuple[str, ...], float]) -> NcuReport:
    """Measured launches of the product: the ranges around each, and how busy it kept the tensor cores."""
    return NcuReport(
        path="plan.csv",
        kernels=pd.DataFrame(
            {
                "id": range(len(launches)),
                "pid": 7,
                "tid": 7,
                "kernel": "gemm",
                "grid": "(1, 1, 1)",
                "block": "(32, 1, 1)",
                "device": 0,
                "cc": "9.0",
                "stack": [stack for stack, _ in launches],
            }
        ),
        metrics=pd.DataFrame(
            {"gpu__time_duration.sum": 1.0, PERCENTAGES["tensor_pct"][0]: [value for _, value in launches]}
        ),
        texts=pd.DataFrame(index=range(len(launches))),
        units={},
    )


ATTENTION, MLP = ("layers.0", "layers.0.attn"), ("layers.2", "layers.2.mlp")


def spread(capture: Path, *launches: tuple[tuple[str, ...], float]) -> dict[str, list[float]]:
    made = ncu_layers(report(*launches), open_capture(capture, optional=NEEDED)).rows.set_index("layer")
    return {name: made.loc[f"layers.1{name}", ["covered", "tensor_pct"]].tolist() for name in ("", ".attn", ".mlp")}


def test_each_role_takes_its_own_measurement(capture: Path) -> None:
    found = spread(capture, (ATTENTION, 20.0), (MLP, 80.0))
    assert found[".attn"] == [1.0, 20.0]
    assert found[".mlp"] == [pytest.approx(300 / 310), 80.0]
    assert found[""] == [pytest.approx(700 / 710), pytest.approx((400 * 20 + 300 * 80) / 700)]


def test_a_role_that_was_not_measured_is_not_covered(capture: Path) -> None:
    found = spread(capture, (ATTENTION, 20.0))
    assert found[".attn"] == [1.0, 20.0] and found[".mlp"][0] == 0
    assert found[""] == [pytest.approx(400 / 710), 20.0]


def test_a_report_without_ranges_stands_for_all_roles(capture: Path) -> None:
    assert spread(capture, ((), 20.0), ((), 80.0))[".mlp"] == [pytest.approx(300 / 310), 50.0]
