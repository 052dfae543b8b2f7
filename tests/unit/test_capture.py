"""The front door: one capture, many questions; those of docs/how-to/ask-in-python.md asked as the page asks them."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile
from support.data import DATA, ROOT, unpacked

import nvprof_kit


@pytest.fixture
def run(file: NsysFile) -> Path:
    """Two steps of 100 ns, in each a layer that launches a gemm of 30 ns, and an all-reduce of 10 ns outside."""
    for number, zero in enumerate((0, 1000)):
        file.range_(f"step {number}", zero + 100, zero + 900, category="step", payload=number)
        file.range_("layers.0", zero + 110, zero + 200, category="forward")
        file.kernel(zero + 300, zero + 330, launched=(zero + 120, zero + 125), name="sm90_xmma_gemm_f16")
        file.kernel(zero + 400, zero + 410, launched=(zero + 220, zero + 225), name="ncclDevKernel_AllReduce_Sum_f32")
    return file.write()


def test_an_answer_prints_gives_a_frame_and_is_saved(run):
    layers = nvprof_kit.open(run).layers()
    assert "layers.0" in str(layers) and str(layers) == repr(layers)
    assert "layers.0" in layers._repr_html_() and "<script" not in layers._repr_html_()
    frame = layers.to_frame()
    # 2 steps x 30 ns in the layer, 2 x 10 ns of all-reduce outside
    assert frame.set_index("layer")["gpu_self_ns"].to_dict() == {"layers.0": 60, "(none)": 20}
    for suffix in ("csv", "json", "md", "parquet", "txt", "html", "png", "svg", "pdf"):
        path = layers.save(run.with_name(f"answer.{suffix}"))
        assert path.stat().st_size > 0
    with pytest.raises(nvprof_kit.UsageError, match="no format has this suffix"):
        layers.save(run.with_name("answer.xlsx"))


def test_a_question_after_another_reads_what_it_needs_besides():
    """Nsys has none of the columns of a capture without a GPU, which some questions ask for."""
    capture = nvprof_kit.open(DATA / "encoder-2023.4.sqlite.xz")
    capture.breakdown("steps")
    later = capture.advise().to_frame()
    assert later.equals(nvprof_kit.open(capture.path).advise().to_frame())


def test_sql_sees_the_attributed_operations(run):
    capture = nvprof_kit.open(run)
    rows = capture.sql(
        "SELECT layer, phase, step, kernel_class, sum(end_ns - start_ns)::BIGINT AS ns FROM operations "
        "GROUP BY ALL ORDER BY ALL"
    )
    assert rows.to_dict("split")["data"] == [
        ["(none)", "other", 0, "comm", 10],
        ["(none)", "other", 1, "comm", 10],
        ["layers.0", "forward", 0, "gemm", 30],
        ["layers.0", "forward", 1, "gemm", 30],
    ]


OTHER_STATEMENTS = {
    "CREATE": "CREATE TABLE t AS SELECT 1|CREATE TEMP VIEW v AS SELECT 1",
    "INSERT": "INSERT INTO operations SELECT * FROM operations|WITH t AS (SELECT 1) INSERT INTO operations FROM t",
    "UPDATE": "UPDATE operations SET layer = 'a'",
    "DELETE": "DELETE FROM operations",
    "SET": "SET VARIABLE a = 1|SET enable_external_access = true",
    "TRANSACTION": "BEGIN",
    "PREPARE": "PREPARE p AS SELECT 1",
    "CALL": "CALL pragma_version()",
    "COPY": "COPY operations TO 'x'|COPY (SELECT 1) TO '{out}'",
    "ATTACH": "ATTACH '{out}' AS other",
    "(LOAD|INSTALL)": "INSTALL httpfs",
    "EXPORT": "EXPORT DATABASE '{out}'",
    "none": "|-- nothing",
    "SELECT, SELECT": "SELECT 1; SELECT 2",
    "SELECT, CREATE": "SELECT 1; CREATE TABLE t AS SELECT 1",
    "(MULTI|CREATE)": "PIVOT operations ON layer",
}
"""What is not one statement that only reads, by its kind."""

REFUSED = [(query, f".* has {kind}") for kind, queries in OTHER_STATEMENTS.items() for query in queries.split("|")]
REFUSED += [(query, "") for query in ("FROM read_csv('/etc/a')", "FROM '/etc/a'", "SELEC 1", "FROM query_frame")]


@pytest.mark.parametrize(("query", "reason"), REFUSED)
def test_sql_takes_one_statement_that_only_reads_and_reaches_nothing_but_the_tables(run, tmp_path, query, reason):
    query_frame = run  # a local name is no table
    with pytest.raises(nvprof_kit.UsageError, match=f"cannot be answered{reason}"):
        nvprof_kit.open(query_frame).sql(query.format(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "query",
    [
        "FROM operations",
        "SELECT layer FROM operations; -- and nothing else",
        "WITH t AS (FROM operations), u AS MATERIALIZED (FROM t) FROM u",
        "VALUES (1), (2)",
        "PIVOT operations ON layer IN ('layers.0') USING sum(end_ns)",
        "DESCRIBE operations",
        "SUMMARIZE SELECT * FROM operations",
        "EXPLAIN ANALYZE FROM operations",
    ],
)
def test_sql_takes_every_statement_that_reads(run, query):
    assert len(nvprof_kit.open(run).sql(query))


def test_an_unknown_choice_or_table_names_what_there_is(run):
    capture: Any = nvprof_kit.open(run)
    asked = "layers by,layers columns,breakdown view,summary view,summary by,diff view,export data_format,ncu_plan set"
    for question, argument in map(str.split, asked.split(",")):
        with pytest.raises(nvprof_kit.UsageError, match=f"^{argument}='nosuch': no such choice; available: [a-z]"):
            getattr(capture, question)(*[capture] * (question == "diff"), **{argument: "nosuch"})
    with pytest.raises(KeyError, match="available: ranges, api"):
        capture.tables["nosuch"]


ENDLESS = "WITH RECURSIVE t(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM t) SELECT count(*) FROM t"


def test_ctrl_c_during_a_query_is_ctrl_c(run):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    capture = nvprof_kit.open(run)
    capture.sql("SELECT 1")  # imports the libraries, which must not be interrupted
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)  # again, if the first one came before the query ran
    try:
        with pytest.raises(KeyboardInterrupt):
            capture.sql(ENDLESS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


PAGE = (ROOT / "docs" / "how-to" / "ask-in-python.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("captures")
    for name in ("run", "after"):
        unpacked("slow-2024.2.sqlite.xz", place / f"{name}.sqlite")
    return place


def test_the_questions_of_the_page(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for block in blocks:
        exec(compile(block, "ask-in-python.md", "exec"), found)
    assert len(blocks) == 12 and PAGE.count("?**") == 10
    capture, third = found["capture"], found["third"]
    assert [len(one.rows) for one in found["same"]] == [len(third.rows)] * 2
    assert third.rows["gpu_self_ns"].sum() == found["same"][1].rows["gpu_self_ns"].sum()
    assert found["table"].column_names == list(capture.layers().to_frame())
    assert Path("layers.csv").read_text().startswith("step,")
    assert set(capture.sql("show tables;")["name"]) == set(capture.tables)
    assert found["slower"] == []  # it is the same capture twice


def test_an_answer_is_a_sequence_of_rows(folder):
    layers = nvprof_kit.open(folder / "run.sqlite").layers()
    rows = list(layers)
    assert len(layers) == len(rows) == len(layers.rows) and bool(layers)
    assert [row["gpu_self_ns"] for row in rows] == layers.rows["gpu_self_ns"].tolist()
    one = layers["layers.2.up"]
    assert "layers.2.up" in layers and "layers.99" not in layers
    assert {row["layer"] for row in one} == {"layers.2.up"} and 0 < len(one) < len(layers)
    assert len(layers.selected(where="layers.2.*")) > len(one)
    with pytest.raises(KeyError, match="no row is of this layer"):
        layers["layers.99"]
    with pytest.raises(KeyError, match="no row is of this layer"):
        nvprof_kit.open(folder / "run.sqlite").kernels()["layers.2.up"]


def test_polars_has_the_memory_of_arrow(folder):
    polars = pytest.importorskip("polars")
    layers = nvprof_kit.open(folder / "run.sqlite").layers()
    frame = layers.to_polars()
    assert isinstance(frame, polars.DataFrame) and frame["gpu_self_ns"].to_list() == [r["gpu_self_ns"] for r in layers]


@pytest.mark.parametrize("name", ["steps", "depth", "top", "sort", "fold"])
@pytest.mark.parametrize("value", ["three", range(3, 9, 2), range(0), -1])
def test_a_value_of_another_kind(folder, name, value):
    with pytest.raises(
        nvprof_kit.UsageError, match=name if value != -1 or name != "steps" else "none of the requested"
    ):
        str(nvprof_kit.open(folder / "run.sqlite").layers(**{name: value}))


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        *((question, r"no such view here; available: .*kernel|steps") for question in ("breakdown", "diff", "summary")),
        *((question, "this answer has a single table; leave its name out") for question in ("layers", "advise")),
    ],
)
def test_a_table_that_is_not_there_is_named_with_those_that_are(folder, question, sentence):
    capture = nvprof_kit.open(folder / "run.sqlite")
    result = capture.diff(capture) if question == "diff" else getattr(capture, question)()
    with pytest.raises(nvprof_kit.UsageError, match=f"nosuch: {sentence}"):
        result.to_frame("nosuch")
