"""Reports in the height of a terminal: which rows and sections are printed, and what is said about the rest."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from nvprof_kit._report.text.table.fit import Rest, fitted, section
from nvprof_kit._report.text.table.grid import Grid
from nvprof_kit._report.text.table.lines import Lines
from nvprof_kit._report.text.table.terminal import table, text_of, warning_lines
from nvprof_kit._result.selection import Selection


def shown(parts: list[RenderableType], height: int) -> list[str]:
    console = Console(file=StringIO(), width=60)
    for part in fitted(console, parts, height):
        console.print(part)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def rows(count: int, select: Selection | None = None) -> Grid:
    made = table([("layer", "path"), ("ms", "right")])
    made.choose(select or Selection())
    for number in range(count):
        made.add_row(f"layer{number}", str(100 + number), cost=float(number))
    return made


WARNING = "word " * 30  # 3 lines of 60


def test_rows_give_way_to_warnings() -> None:
    # 10 lines: 2 of the head, 3 of the warning, an empty one, the line about the rest: 3 rows are left, and without
    # the empty line 4, but a table keeps 5 as long as its least 2 do not help; here they do
    lines = shown([rows(20), "", *warning_lines([WARNING])], 10)
    assert len(lines) == 10 and "… and 16 more rows" in lines[6]
    assert [line.split()[0] for line in lines[2:6]] == ["layer16", "layer17", "layer18", "layer19"]  # the costliest


def test_a_table_takes_the_lines_that_are_left() -> None:
    lines = shown([rows(20), "", *warning_lines([WARNING])], 20)
    assert len(lines) == 20 and "" in lines and "… and 7 more rows" in lines[15]


def test_what_cannot_fit_keeps_five_rows_and_all_warnings() -> None:
    lines = shown([rows(20), "", *warning_lines([WARNING] * 4)], 8)  # equal warnings are one: 3 lines
    assert len(lines) == 8
    lines = shown([rows(20), *warning_lines([f"{one} {WARNING}" for one in "abcd"])], 8)
    assert len([line for line in lines if line.startswith("layer") and "ms" not in line]) == 5
    assert len([line for line in lines if line.startswith("!")]) == 4


def test_sorted_rows_keep_their_first() -> None:
    lines = shown([rows(20, Selection(sort="ms"))], 9)
    assert lines[2].split()[0] == "layer0" and "… and 14 more rows" in lines[-1]
    text = text_of([rows(20, Selection(sort="ms", top=2))])
    assert "layer1 " in text and "layer2 " not in text


def two_sections() -> list[RenderableType]:
    parts = [Text("head"), "", rows(6), ""]
    for name in ("first", "second"):
        parts += section([Text(name.title(), "bold"), rows(6), ""], name)
    return [*parts, Text("note")]


def test_sections_that_do_not_fit_are_named() -> None:
    whole = shown(two_sections(), 100)
    assert len(whole) == 32 and whole == text_of(two_sections()).splitlines()  # and so they are written to a pipe
    lines = shown(two_sections(), 24)
    assert len(lines) <= 24 and "First" in lines and "Second" not in lines
    assert "Too high for 25 lines: second (--view NAME); --top N shows" in lines


def findings(count: int, omitted: int = 0) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for number in range(count):
        parts += section([Text(f"{number}. finding"), *map(Text, "abcd"), ""], way="--top N shows them")
    return [*parts, *([Rest(omitted, "… and {} more; --top shows them"), ""] if omitted else []), Text("note")]


def test_of_paragraphs_the_titles_stay() -> None:
    lines = shown(findings(4), 15)
    assert lines[0] == "0. finding" and lines[1:5] == list("abcd") and "3. finding" in lines
    assert "… of 3 only the titles fit; --top N shows them" in lines and len(lines) <= 15
    assert "… of 3 only the titles fit, and 2 more; --top N shows them" in shown(findings(4, 2), 15)
    assert not [line for line in shown(findings(4, 2), 15) if line.startswith("… and")]
    assert "… and 42 more; --top N shows them" in shown(findings(41, 2), 12)  # all but the first


def test_lines_are_counted_with_those_omitted_before() -> None:
    listed = Lines([*map(Text, "abcdefghij")], beyond=3)
    assert shown([Text("head"), listed], 9) == ["head", *"abcdefg", "… and 6 more"]
    assert text_of([listed]).splitlines() == [*"abcdefghij", "… and 3 more"]


def test_a_section_begins_with_a_text() -> None:
    with pytest.raises(TypeError, match="begins with a text, not with str"):
        section(["", Text("a")])


LONG = "5 of 9 operations took 1,234.5 ms. This is explained by a second sentence; and by more of it, which is long"


def test_lines_around_a_table_end_after_a_clause_where_nothing_else_fits() -> None:
    # 2 of the head, 2 rows, the line about the rest, and 2 lines of each of three warnings: 11 lines; with 1 line of
    # each, and 1 for the note: 9
    warnings = warning_lines([f"{LONG} {one}" for one in "abc"])
    lines = shown([rows(20), *warnings], 11)
    assert len(lines) == 11 and "…" not in lines[5]
    lines = shown([rows(20), *warnings], 9)
    assert len(lines) == 9
    assert lines[5:8] == ["! 5 of 9 operations took 1,234.5 ms …"] * 3
    assert lines[8] == "Lines with … are shortened for 10 lines; --top N shows all"


def test_a_line_whose_first_clause_is_too_long_ends_after_it() -> None:
    lines = shown([rows(20), *warning_lines(["word " * 14 + "end: more " + "word " * 26])], 8)
    assert len(lines) == 8 and lines[6] == "word word word end …"


def test_lines_without_a_table_are_the_answer() -> None:
    assert len(shown([*warning_lines([f"{LONG} {one}" for one in "abc"])], 3)) == 6
