"""The front door: one capture, many questions."""

import signal
from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile

import nvprof_kit


@pytest.fixture
def run(file: NsysFile) -> Path:
    """Two steps of 100 ns, in each a layer that launches a gemm of 30 ns, and an all-reduce of 10 ns outside."""
    for number, zero in enumerate((0, 1000)):
        file.range_(f"step {number}", zero + 100, zero + 900, category="step", payload=number)
        file.range_("layers.0", zero + 110, zero + 200, category="forward")
        file.kernel(zero + 300, zero + 330, launched=(zero + 120, zero + 125), name="sm90_xmma_gemm_f16")
        file.kernel(
            zero + 400, zero + 410, launched=(zero + 220, zero + 225), name="ncclDevKernel_AllReduce_Sum_f32_RING"
        )
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
    capture = nvprof_kit.open(Path(__file__).parents[1] / "data" / "encoder-2023.4.sqlite.xz")
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
REFUSED += [
    (query, "") for query in ("SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM '/etc/passwd'", "SELEC 1")
]
REFUSED += [("SELECT * FROM query_frame", "")]  # a local name is no table either


@pytest.mark.parametrize(("query", "reason"), REFUSED)
def test_sql_takes_one_statement_that_only_reads_and_reaches_nothing_but_the_tables(run, tmp_path, query, reason):
    query_frame = run
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


def test_an_unknown_view_or_table_names_what_there_is(run):
    capture: Any = nvprof_kit.open(run)
    with pytest.raises(nvprof_kit.UsageError, match="available: device, overview"):
        capture.summary("nosuch")
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
