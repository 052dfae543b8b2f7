"""No figure is cut at any width: texts are shortened and columns go, in every verb's tables."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text
from support.captures import timer_log
from support.data import DATA, unpacked

import nvprof_kit
from nvprof_kit._api.sources import open_ncu, open_snapshot, open_timers
from nvprof_kit._report.text.table import Bar, Column, Grid, Row, print_to
from nvprof_kit._result.result import Result
from nvprof_kit.issues import in_order

WIDTHS = (60, 80, 100, 120)
NCU = DATA / "ncu"


def opened(name: str) -> nvprof_kit.Capture:
    return nvprof_kit.open(DATA / f"{name}.sqlite.xz")


def _timers(folder: Path) -> Result:
    stages = [("forward", 0, 641, 830), ("backward of the whole model", 1000, 641, 1234), ("step", 2000, 641, 7)]
    for rank in range(3):
        timer_log.write(folder, rank, *stages * 2)
    return open_timers(folder).timers("rank")


ANSWERS: dict[str, Callable[[Path], Result]] = {
    "layers": lambda _: opened("hooks-train-2023.4").layers(),
    "layers folded": lambda _: opened("flops/llama12-2024.2").layers(columns=("class",)),
    "layers by step": lambda _: opened("eager-2024.2").layers(by="step"),
    "layers with memory": lambda _: opened("memory/caching-2024.2").layers(columns="memory"),
    "flops": lambda _: opened("flops/llama12-2024.2").flops(),
    "breakdown": lambda _: opened("hooks-ddp-2024.2").breakdown(),
    "summary": lambda _: opened("slow-operators-2024.2").summary(),
    "flops unfolded": lambda _: opened("flops/llama12-2024.2").flops().selected(fold=False),
    "metrics": lambda _: opened("metrics/llama-2023.4").metrics(),
    "metrics folded": lambda _: opened("metrics/llama-2023.4").metrics().selected(fold=True),
    "ncu layers": lambda _: open_ncu(NCU / "encoder-full-2025.3.csv.xz").layers(NCU / "encoder-2024.2.sqlite.xz"),
    "ncu plan": lambda _: opened("ncu/run-2023.4").ncu_plan(),
    "ranks": lambda _: nvprof_kit.open_job(sorted((DATA / "ranks").glob("ddp-layer*.sqlite.xz"))).answer(),
    "diff": lambda _: opened("eager-2024.2").diff(opened("slow-2024.2"), anyway=True),
    "advise": lambda _: opened("slow-2024.2").advise(),
    "timers": _timers,
    "memory": lambda folder: open_snapshot(unpacked("snapshots/run-2.11.pickle.xz", folder / "run.pickle")).memory(),
}


class Terminal(io.StringIO):
    """A terminal of the environment's width."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return {name: made(tmp_path_factory.mktemp("input")) for name, made in ANSWERS.items()}


def numbers(text: str) -> Counter[str]:
    """The figures of a table as they are written, without what names them."""
    return Counter(re.findall(r"(?<![\w.,~])(?:(?<!…)[<>+-]+)?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)", text))


def tables(result: Result) -> list[Grid]:
    return [part for part in result.parts() if isinstance(part, Grid)]


def printed(grid: Grid, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    print_to(file := io.StringIO(), [grid])
    return file.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ANSWERS)
def test_every_figure_that_is_shown_is_whole(name, width, answers, monkeypatch):
    found = tables(answers[name])
    assert found or name == "advise"
    for grid in found:
        whole = numbers(printed(grid, 2000, monkeypatch))
        narrow = printed(grid, width, monkeypatch)
        notes = [line for line in narrow.splitlines() if line.startswith("Too wide for ")]
        rest = [line for line in narrow.splitlines() if " more; --top " in line]  # a pipe gets it in one line
        table = "\n".join(line for line in narrow.splitlines() if line not in (*notes, *rest))
        assert not numbers(table) - whole, f"cut at {width}"
        assert max(map(cell_len, table.splitlines())) <= width
        heads = {column.name for column in grid.columns.values() if column.name}
        gone = set(re.findall(r": (.*); -o", notes[0])[0].split(", ")) if notes else set()
        shown = [key for key, column in grid.columns.items() if column.name not in gone and column.kind == "right"]
        for row in grid.rows:  # every figure of a column that is not named as left out
            assert not numbers("\n".join(str(row.cells.get(key, "")) for key in shown)) - numbers(table)
        assert gone <= heads


@pytest.mark.parametrize("width", (60, 80, 120))
@pytest.mark.parametrize("name", ANSWERS)
def test_no_line_is_longer_than_the_terminal(name, width, answers, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    print_to(terminal := Terminal(), answers[name].parts())
    shown = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(cell_len, shown)) <= width


@pytest.mark.parametrize("name", ANSWERS)
def test_warnings_come_once_behind_the_table_and_are_the_same_in_every_form(name, answers):
    result, said = answers[name], [issue for issue in in_order(answers[name].warnings) if issue.printed]
    parts = list(result.parts())
    lines = [str(part) for part in parts if isinstance(part, Text) and str(part).startswith("! ")]
    assert lines == [f"! {issue}" for issue in said]
    last = max((place for place, part in enumerate(parts) if isinstance(part, Grid)), default=0)
    assert all(str(part) not in lines for part in parts[:last])
    if name == "summary":  # a table holds one view
        result = opened("slow-operators-2024.2").summary("kernel")
    assert json.loads(result.encode("json"))["warnings"] == list(in_order(result.warnings))
    text = result.encode("csv").decode()
    assert not [line for line in text.splitlines() if line.startswith(("#", "!"))]
    assert list(result.warnings_beside("csv")) == said


NAMED = ("eager-2024.2", "hooks-ddp-2024.2", "compile-model-2024.2", "flops/llama12-2024.2", "generate-2024.2")


@pytest.mark.parametrize("width", (None, 60, 80, 100, 120))
@pytest.mark.parametrize("name", NAMED)
def test_names_that_are_cut_stay_different(name, width, monkeypatch):
    """Kernels that share 30 letters, such as those of foreach optimizers, are told apart; a pipe cuts nothing."""
    summary = opened(name).summary("kernel", top=1000)
    monkeypatch.setenv("COLUMNS", str(width)) if width else monkeypatch.delenv("COLUMNS", raising=False)
    print_to(file := io.StringIO(), summary.parts())
    lines = file.getvalue().splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("──")) + 1
    names = [re.split(r" {2,}", line)[0] for line in lines[begin : begin + len(summary.to_frame())]]
    assert len(set(names)) == len(names) == len(summary.to_frame())
    assert not [name for name in names if "void " in name or "::native" in name or re.search(r"\(int\)\d", name)]
    assert width or not [name for name in names if "…" in name]


def test_where_no_figure_fits_the_names_are_left(monkeypatch):
    grid = tables(nvprof_kit.open(DATA / "flops" / "llama12-2024.2.sqlite.xz").flops())[0]
    names, _, gone = printed(grid, 30, monkeypatch).partition("Too wide for 30 columns: ")
    assert max(map(cell_len, names.splitlines())) <= 30
    assert "busy ms" in gone and "MFU" in gone
    wide = Row({"": "層.2.注意機構 -8.1 %, 層.3.注意機構 +1,234.5 %"})
    assert "+1,234.5 %" in printed(Grid({"": Column("unlike", "words")}, rows=[wide]), 36, monkeypatch)
    assert printed(Grid({"": Column("curve")}, rows=[Row({"": "▁▂ "})]), 9, monkeypatch).endswith("\n  ▁▂\n")


def test_no_name_moves_what_is_behind_it_and_rules_are_between_rows(monkeypatch):
    grid = Grid({"layer": Column("layer", "path"), "": Column("", "bar"), "CPU": Column("CPU")}, rows=[Row()])
    for name in ("tab\tin", "esc\x1b[1m", "turned\u202e", "two\nlines", "more\u2028lines", "[bold]:fire:"):
        grid.add({"layer": name, "": Bar(0.51), "CPU": "1.5"})
    grid.rows += [Row(), Row(), Row({"layer": "total"})]
    print_to(file := io.TextIOWrapper(io.BytesIO(), "ascii", errors="replace"), [grid])
    file.seek(0)
    for text in (file.read(), printed(grid, 60, monkeypatch)):
        heading, _, *rows = text.splitlines()
        assert {cell_len(row) for row in rows[:-2]} == {cell_len(heading)} and rows[-2:] == ["", "total"]


@pytest.mark.parametrize("name", ["pieces-capture", "qwen3-capture"])
def test_equal_blocks_in_one_line_are_explained_with_and_without_times(name):
    text = str(nvprof_kit.open(DATA / f"replays/{name}.json.xz").layers())
    assert re.search(r" x\d ", text) and "\nxN: equal blocks in one line" in text


@pytest.mark.parametrize("name", ANSWERS)
def test_a_notebook_shows_every_answer(name, answers):
    assert answers[name]._repr_html_().startswith("<pre")
