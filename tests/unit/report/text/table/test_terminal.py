"""The console, bars and lines that every table for a person is made of."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from nvprof_kit._report.text.table import Bar, capture_line, print_to, table
from nvprof_kit._trace.schema import CaptureInfo


def printed(*parts: object) -> list[str]:
    print_to(file := io.StringIO(), parts)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("share", "bar"), [(0, ""), (0.001, "▏"), (0.5, "████"), (0.55, "████▍"), (1, "████████"), (7, "████████")]
)
def test_bar(share: float, bar: str) -> None:
    assert printed(Bar(share, width=8)) == [bar]


def test_bar_in_ascii() -> None:
    console = Console(file=io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii"), width=40)
    console.print(Bar(0.5, width=8))
    console.file.flush()
    assert raw.getvalue() == b"####    \n"


def test_a_pipe_gets_no_colours_and_no_spaces_at_the_end() -> None:
    made = table([("name", "left"), ("ms", "right"), ("", "bar")])
    made.add_row("a", "1.5", Bar(0.25), style="bold")
    assert printed(made, Text("end", "dim")) == ["name   ms", "─" * 35, "a     1.5  ██████", "end"]


def test_columns_decides_the_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    made = table([("name", "left"), ("", "bar")])
    made.add_row("abc", Bar(1))
    assert printed(made)[-1] == "abc   " + "█" * 24
    monkeypatch.setenv("COLUMNS", "20")
    assert printed(made)[-1] == "abc   " + "█" * 14


def test_capture_line() -> None:
    info = CaptureInfo(
        path="r.sqlite", tool="nsys 2024.2", gpus=("NVIDIA H200", "NVIDIA H200", "NVIDIA L4"), processes=2
    )
    assert (
        str(capture_line(info, 1))
        == "r.sqlite · nsys 2024.2 · 2 x NVIDIA H200, NVIDIA L4 · 2 processes, added up · 1 step"
    )
    cpu = CaptureInfo(path="r.json", tool="PyTorch profiler (Kineto)", on_gpu=False)
    assert str(capture_line(cpu, 0)) == "r.json · PyTorch profiler (Kineto) · no GPU · no steps"
