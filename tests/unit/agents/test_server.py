"""The server of the Model Context Protocol, by the library's own client over stdio; and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit
from nvprof_kit._agents import query as query_module
from nvprof_kit._agents.captures import Captures
from nvprof_kit._agents.server import MOST_ROWS, TOOLS, Answer, Questions, _refusing, serve_mcp
from nvprof_kit.errors import UsageError

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "captures"
    inside.mkdir()
    shutil.copy(DATA / "graph-2023.4.sqlite.xz", inside)
    file = NsysFile(inside / "tiny.sqlite")
    for layer in range(60):
        file.range_(f"layers.{layer}", 100 * layer, 100 * layer + 50)
        file.kernel(10_000 + 100 * layer, 10_010 + 101 * layer, launched=(100 * layer + 1, 100 * layer + 2))
    file.write()
    return inside


@pytest.mark.slow
def test_a_client_over_stdio(folder: Path) -> None:
    mcp = pytest.importorskip("mcp")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    arguments = ["-m", "nvprof_kit", "mcp", str(folder)]
    started = mcp.StdioServerParameters(
        command=sys.executable, args=arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    async def talk() -> dict[str, Any]:
        async with mcp.stdio_client(started) as (read, write), mcp.ClientSession(read, write) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools

            async def call(tool: str, **arguments: Any) -> Any:
                result = await session.call_tool(tool, arguments)
                return result.content[0].text if result.is_error else json.loads(result.content[0].text)

            return {
                "tools": tools,
                "captures": await call("captures"),
                "layers": await call("layers", capture="tiny.sqlite", max_rows=5),
                "kernels": await call("summary", capture="graph-2023.4.sqlite.xz", max_rows=1),
                "flops": await call("flops", capture="tiny.sqlite"),
                "outside": await call("layers", capture="../../etc/passwd"),
                "sql": await call("query", capture="tiny.sqlite", sql="SELECT count(*) AS n FROM operations"),
                "steal": await call("query", capture="tiny.sqlite", sql="SELECT * FROM read_text('/etc/passwd')"),
                "skill": (await session.read_resource("nvprof-kit://skill")).contents[0].text,
            }

    seen = asyncio.run(asyncio.wait_for(talk(), 120))
    assert {tool.name for tool in seen["tools"]} == set(TOOLS)
    assert all(tool.annotations.read_only_hint and tool.description for tool in seen["tools"])
    assert [row["capture"] for row in seen["captures"]["rows"]] == ["graph-2023.4.sqlite.xz", "tiny.sqlite"]
    # kernel n takes 10 + n ns: the costliest are the last
    assert [(row["layer"], row["gpu_self_ns"]) for row in seen["layers"]["rows"]] == [
        (f"layers.{layer}", 10 + layer) for layer in (59, 58, 57, 56, 55)
    ]
    assert seen["layers"]["rows_left_out"] == 55
    kernels = nvprof_kit.open(folder / "graph-2023.4.sqlite.xz").summary("kernel").to_frame()
    assert seen["kernels"]["rows"][0]["gpu_total_ns"] == kernels["gpu_total_ns"].iloc[0]
    assert seen["kernels"]["rows_left_out"] == len(kernels) - 1
    assert "no tiny.flops.json next to it" in seen["flops"]["unavailable"] and seen["flops"]["rows"] == []
    assert "outside" in seen["outside"]
    assert seen["sql"]["rows"] == [{"n": 60}]
    assert isinstance(seen["steal"], str) and "root:" not in seen["steal"]
    assert seen["skill"].startswith("---\nname: nvprof-kit\n")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ("../secret.sqlite", "outside"),
        ("/etc/passwd", "outside"),
        ("link.sqlite", "outside"),
        ("up/secret.sqlite", "outside"),
        ("away.nsys-rep", "away.sqlite is a link that leads outside"),
        ("counted.sqlite", "counted.flops.json is a link that leads outside"),
        ("gone.sqlite", "no such file"),
        ("notes.txt", "no capture"),
        (".", "no such file"),
        ("a\0b", "no such file"),
        ("run.nsys-rep", "not exported yet, and nothing is written here"),
    ],
)
def test_what_is_not_opened(folder: Path, named: str, complaint: str) -> None:
    (folder.parent / "secret.sqlite").write_bytes((folder / "tiny.sqlite").read_bytes())
    (folder / "link.sqlite").symlink_to(folder.parent / "secret.sqlite")
    (folder / "up").symlink_to(folder.parent)
    (folder / "away.nsys-rep").write_text("text")
    (folder / "away.sqlite").symlink_to(folder.parent / "secret.sqlite")
    (folder.parent / "secret.sqlite").touch()
    (folder / "counted.sqlite").write_bytes((folder / "tiny.sqlite").read_bytes())
    (folder.parent / "secret.json").write_text("{}")
    (folder / "counted.flops.json").symlink_to(folder.parent / "secret.json")
    for name in ("notes.txt", "run.nsys-rep"):
        (folder / name).write_text("text")
    with pytest.raises(nvprof_kit.UsageError, match=complaint):
        Captures(folder).path(named)
    assert "link.sqlite" not in [row["capture"] for row in Captures(folder).listed()[0]]


def test_a_report_whose_export_is_there(folder: Path) -> None:
    (folder / "tiny.flops.json").write_text("{}")
    assert "tiny.flops.json" not in [row["capture"] for row in Captures(folder).listed()[0]]
    (folder / "tiny.nsys-rep").write_text("text")
    os.utime(folder / "tiny.nsys-rep", (1, 1))
    assert Captures(folder).path("tiny.nsys-rep") == folder / "tiny.sqlite"


def test_a_capture_is_read_once_and_again_when_it_changed(folder: Path) -> None:
    captures = Captures(folder)
    first = captures.open("tiny.sqlite")
    assert captures.open(str(folder / "tiny.sqlite")) is first
    os.utime(folder / "tiny.sqlite", (1, 1))
    assert captures.open("tiny.sqlite") is not first


def test_answers_are_bounded(folder: Path) -> None:
    questions = Questions(folder)
    many = f"SELECT range AS n, repeat('x', 1000) AS text FROM range({2 * MOST_ROWS})"
    told = questions.query("tiny.sqlite", many, max_rows=10**9)
    assert len(told["rows"]) == MOST_ROWS and told["rows_left_out"] == MOST_ROWS
    assert len(told["rows"][0]["text"]) == 301
    assert len(questions.layers("tiny.sqlite", max_rows=-1)["rows"]) == 1


def test_a_view_that_is_not_there_is_an_error(folder: Path) -> None:
    with pytest.raises(nvprof_kit.UsageError, match="view"):
        Questions(folder).summary("tiny.sqlite", "nonsense")
    with pytest.raises(nvprof_kit.UsageError, match="no such view of a breakdown; available: steps, idle"):
        Questions(folder).breakdown("tiny.sqlite", "nonsense")
    with pytest.raises(nvprof_kit.UsageError, match="no captures; needed those of the ranks"):
        Questions(folder).ranks([])


def test_any_error_reaches_the_client_with_its_cause() -> None:
    def question() -> Answer:
        raise ZeroDivisionError("division by zero")

    with pytest.raises(UsageError, match="ZeroDivisionError: division by zero"):
        _refusing(question, UsageError)()


def test_no_answer_has_control_characters(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("red\x1b[31m\x9b31m\u202e", 0, 50)
    file.kernel(100, 110, launched=(1, 2), name="k\x1b]0;title\x07")
    file.write()
    questions = Questions(tmp_path)
    answers = [
        _refusing(questions.layers, UsageError)("run.sqlite"),
        _refusing(questions.summary, UsageError)("run.sqlite"),
        _refusing(questions.query, UsageError)("run.sqlite", 'SELECT [name] AS "a\x1b" FROM operations'),
    ]
    with pytest.raises(UsageError) as caught:
        _refusing(questions.query, UsageError)("run.sqlite", 'SELECT "no\x1bsuch"')
    text = json.dumps(answers, ensure_ascii=False) + str(caught.value)
    assert "red\ufffd[31m\ufffd31m\ufffd" in text and "k\ufffd]0;title\ufffd" in text
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & {*text} and "\\u001b" not in text


def test_which_rank_is_slow(tmp_path: Path) -> None:
    names = [f"ddp-layer.rank{rank}-2024.2.sqlite.xz" for rank in (0, 1)]
    for name in names:
        shutil.copy(DATA / "ranks" / name, tmp_path)
    told = Questions(tmp_path).ranks(names, max_rows=3)
    assert (told["verdict"]["rank"], told["verdict"]["layer"]) == (1, "model.layers.2.mlp")
    assert 0 < len(told["rows"]) <= 3
    with pytest.raises(nvprof_kit.UsageError, match="outside"):
        Questions(tmp_path).ranks(["../other"])


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(nvprof_kit.ToolError, match=r'pip install "nvprof-kit\[mcp\]"'):
        serve_mcp(tmp_path)


ENDLESS = "WITH RECURSIVE t(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM t) SELECT count(*) FROM t"


@pytest.mark.slow
def test_a_query_ends_in_bounded_time_and_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Questions(folder)
    asked = partial(questions.query, "tiny.sqlite")
    assert asked("SELECT count(*) AS n, min(layer) AS first FROM operations")["rows"] == [
        {"n": 60, "first": "layers.0"}
    ]
    told = asked("SELECT layer FROM operations ORDER BY start_ns", max_rows=2)
    assert (len(told["rows"]), told["rows_left_out"]) == (2, 58)
    monkeypatch.setattr(query_module, "LONGEST_S", 1.0)
    with pytest.raises(UsageError, match="ended after 1 s"):
        asked(ENDLESS)
    monkeypatch.setattr(query_module, "LONGEST_S", 30.0)
    monkeypatch.setattr(query_module, "_MOST_BYTES", 64 << 20)
    with pytest.raises(UsageError, match="larger than 64 MiB"):
        asked("SELECT range AS number, 'some text ' || range AS said FROM range(100000000)")
    with pytest.raises(UsageError, match="memory"):
        asked("SELECT count(DISTINCT a.range * 100000 + b.range) FROM range(100000) AS a, range(100000) AS b")
    for words in ("SELECT * FROM read_text('/etc/passwd')", "SELECT nothing FROM operations", "", ";", "SELEC"):
        with pytest.raises(UsageError, match="cannot be answered"):
            asked(words)
