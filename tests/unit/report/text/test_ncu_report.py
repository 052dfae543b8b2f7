"""The ncu reports on literals: lines of the hardware table, names of kernels, the roofline's picture."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from nvprof_kit._analysis.ncu.layers import COLUMNS, NcuLayers
from nvprof_kit._analysis.ncu.roofline import Roofline
from nvprof_kit._report.plots.roofline import roofline_figure
from nvprof_kit._report.text.ncu import header, scaled

NOTHING = dict.fromkeys(COLUMNS, np.nan) | {"stall": None, "launches": 1, "covered": 0.5}


def result(capture: str = "run.sqlite", **more: object) -> NcuLayers:
    rows = [
        {"layer": "m.0", "phase": "forward", "gpu_ns": 3_000_000, "compute_pct": 80.4, "dram_bytes": 2.5e9,
         "intensity": 12.34, "stall": "wait", "bound": "compute", "reason": "because"},
        {"layer": "m.0.mlp", "phase": "forward", "gpu_ns": 1_000_000, "bound": "not measured", "reason": "nothing"},
        {"layer": "(none)", "phase": "optimizer", "gpu_ns": 1_000_000, "bound": "latency", "reason": "small"},
    ]  # fmt: skip
    return NcuLayers(
        rows=pd.DataFrame([NOTHING | row for row in rows], columns=list(COLUMNS)),
        kernels=pd.DataFrame(),
        gpu_ns=4_000_000,
        covered=0.903,
        measured=71,
        unused=int(more.get("unused", 0)),  # type: ignore[call-overload]
        warnings=("look out",),
        path="plan.csv",
        capture=capture,
    )


def test_lines() -> None:
    heading, _, first, second, _ = str(result()).splitlines()[3:8]
    names = ["layer", "phase", "ms", "covered", "compute", "DRAM bytes", "op/byte", "stall", "bound", "why"]
    assert re.split(" {2,}", heading.strip()) == names
    assert re.split(" {2,}", first.strip()) == ["m.0", "forward", "3.000", "50.0 %", "80 %", "2.5 G", "12.3", "wait",
                                                "compute", "because"]  # fmt: skip
    assert re.split(" {2,}", second.strip()) == ["m.0.mlp", "forward", "1.000", "50.0 %", "not measured", "nothing"]


def test_header_states_the_covered_share() -> None:
    assert header(result(unused=2)) == [
        "plan.csv: 71 measured kernels",
        "spread over run.sqlite: they stand for 90.3 % of its 4.000 ms of GPU time",
        "2 of them are like no launch of the capture",
    ]
    assert header(result(capture="")) == ["plan.csv: 71 measured kernels"]


def test_columns_of_which_nothing_was_measured_are_left_out() -> None:
    text = str(result())
    assert "compute" in text and "tensor" not in text
    assert "! look out" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.nan, ""), (0, "0"), (12, "12"), (999, "999"), (1234, "1.23 k"), (2.5e9, "2.5 G"), (3e18, "3e+03 P")],
)
def test_scaled(value: float, text: str) -> None:
    assert scaled(value) == text


def test_roofline_figure_holds_every_dot_and_ceiling() -> None:
    points = pd.DataFrame(
        {
            "kernel": ["a", "b", "c"],
            "layer": ["m", "m", "(none)"],
            "phase": ["forward", "backward", "optimizer"],
            "gpu_ns": [10.0, 20.0, 5.0],
            "intensity": [100.0, 0.5, 2.0],
            "rate": [1e14, 1e12, 2e12],
        }
    )
    figure = roofline_figure(
        Roofline(points, {"FP32": 6e13, "tensor bf16": 9e14, "tensor fp16": 9e14}, 4.8e12, "a.csv")
    )
    (axes,) = figure.axes
    assert [len(dots.get_offsets()) for dots in axes.collections] == [1, 1, 1]
    assert [text.get_text().strip() for text in axes.texts] == [
        "FP32 60 T/s",
        "tensor bf16, tensor fp16 900 T/s",
        "DRAM 4.8 TB/s",
        *("b", "a", "c"),  # the kernels, the longest first
    ]
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["m", "(none)", "forward", "backward", "other phases"]
    colours = [tuple(dots.get_facecolor()[0]) for dots in axes.collections]
    assert colours[0] == colours[1] != colours[2]  # of a layer


def test_roofline_names_no_dot_over_another_and_keeps_few_colours() -> None:
    layers = [f"layers.{number}" for number in range(30)]
    points = pd.DataFrame(
        {
            "kernel": [f"void at::native::kernel_{number}(int)" for number in range(30)],
            "layer": layers,
            "phase": "forward",
            "gpu_ns": [float(100 - number) for number in range(30)],
            "intensity": [1.0] * 15 + [10.0**number for number in range(15)],
            "rate": [1e12] * 30,
        }
    )
    (axes,) = roofline_figure(Roofline(points, {"FP32": 6e13}, 4.8e12, "a.csv")).axes
    named = [text.get_text() for text in axes.texts if "kernel" in text.get_text()]
    assert named[:2] == ["kernel_0", "kernel_16"] and len(named) == 12  # 1 to 14 lie on 0, 15 too
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == [*layers[:10], "other layers", "forward"]
