"""The console, bars and lines that every table for a person is made of."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from nvprof_kit._report.text.table import Bar, Column, Grid, capture_line, print_to, table, text_of, warning_lines
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


def test_brackets_are_no_markup() -> None:
    assert printed(Text("[bold]x[/bold]"), "[red]y") == ["[bold]x[/bold]", "[red]y"]


def test_a_long_line_stays_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert printed(*warning_lines(["word " * 30])) == ["! " + ("word " * 30).rstrip()]


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


def test_figures_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    made = table([("layer", "left"), *((f"figure {number}", "right") for number in range(12)), ("why", "left")])
    made.add_row("model.layers.0.post_attention_layernorm", *["1234.567"] * 12, "a reason " * 9)
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    print_to(file, [made])
    line = file.getvalue().splitlines()[-1]
    # 120 are too few, but nothing is cut in a pipe: the line grows
    assert line.count("1234.567") == 12
    assert line.startswith("model.layers.0.post_attention_layernorm ") and line.endswith("a reason " * 8 + "a reason")


def test_words_wrap_and_keep_their_figures() -> None:
    made = Grid([Column("layer", "path", 0), Column("total", "right", 0), Column("unlike", "words", 0)])
    made.add_row("layers.0", "1.00", "forward +15 %, backward +61 %")
    made.add_row("layers.1", "2.00", "")
    for width in range(30, 60):
        shown = " ".join(text_of(made.parts(width)).split())
        assert "…" not in shown and "+15 %" in shown and "+61 %" in shown, width
    narrow = Grid([Column("layer", "path", 0), Column("unlike", "words", 1)])
    narrow.add_row("layers.0", "recompute +1,234 %")
    assert "Too wide for 12 columns: unlike" in text_of(narrow.parts(12))
