"""Events of an nsys export that cannot be: each is refused or warned of by the name of its table and column."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.captures.nsys_file import NsysFile, thread
from support.data import unpacked

import nvprof_kit
from nvprof_kit._trace.open import open_capture
from nvprof_kit._trace.schema import NSYS_SOURCES, OPS
from nvprof_kit.errors import CaptureError

ENUMERATIONS = (
    "ENUM_NSYS_EVENT_TYPE",
    "ENUM_CUDA_MEMCPY_OPER",
    "ENUM_CUDA_MEM_KIND",
    "ENUM_CUDA_DEV_MEM_EVENT_OPER",
    "ENUM_DIAGNOSTIC_SEVERITY_LEVEL",
)
"""Those that are read; their names are taken from an export of nsys 2024.2."""

OPTIONAL = ("name", "stream", "bytes", "calls", "marks", "allocations", "samples", "scheduled", "collectives")


@pytest.fixture
def capture(file: NsysFile) -> Path:
    """A step with two layers after each other, a kernel launched in each, a copy and a memset in the second,
    and an overhead of the profiler: a row in every table that is read always.
    """
    file.range_("step 0", 100, 900, category="step", payload=0)
    file.range_("layers.0", 200, 400)
    file.range_("layers.1", 500, 700)
    file.kernel(1000, 1010, launched=(300, 310))
    file.kernel(1020, 1040, launched=(600, 610))
    file.kernel(1050, 1060, correlation=file.call("cudaMemcpyAsync_v3020", 620, 630), table="MEMCPY")
    file.kernel(1070, 1080, correlation=file.call("cudaMemsetAsync_v3020", 640, 645), table="MEMSET")
    file.overhead("Buffer Flush", 650, 660)
    for start, is_in in ((100, 1), (800, 0)):
        file.rows["SCHED_EVENTS"].append({"start": start, "isSchedIn": is_in, "globalTid": thread()})
    file.allocation(250, 512, 7)
    return file.write()


def change(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)
    return path


@pytest.fixture(scope="module")
def names_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    path = unpacked("hooks-ddp-2024.2.sqlite.xz", tmp_path_factory.mktemp("export") / "run.sqlite")
    with closing(sqlite3.connect(path)) as db:
        return {table: dict(db.execute(f"SELECT id, name FROM {table}")) for table in ENUMERATIONS}


def seen_by_doctor(path: Path) -> list[str]:
    (findings,) = nvprof_kit.doctor(path).findings.values()
    return [f"{finding.rule}: {finding.evidence}" for finding in findings if finding.severity != "ok"]


def warnings_of(path: Path) -> str:
    return " | ".join(open_capture(path, optional=OPTIONAL).info.warnings)


SHORT = {"NVTX": "NVTX_EVENTS", "MEMORY": "CUDA_GPU_MEMORY_USAGE_EVENTS"} | {
    kind: f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "RUNTIME")
}
"""Tables by a word that stands for them in the cases below."""

WARNED = [
    ("NVTX SET eventType = 99 WHERE start = 200", "NVTX_EVENTS.eventType is unknown in 1 events"),
    ("NVTX SET eventType = -1 WHERE start = 200", "NVTX_EVENTS.eventType is unknown in 1 events"),
    ("NVTX SET domainId = 99 WHERE start = 200", "NVTX_EVENTS.domainId"),
    ("NVTX SET globalTid = 1 WHERE start = 200", "NVTX_EVENTS.domainId or globalTid"),
    ("NVTX SET start = -7 WHERE start = 200", "NVTX_EVENTS.start is negative in 1 rows"),
    ("NVTX SET category = NULL WHERE eventType = 59", "NVTX_EVENTS.category is missing in every range"),
    ("NVTX SET [end] = NULL", "NVTX_EVENTS.end is missing in 3 of 3 ranges"),
    ("NVTX SET textId = NULL WHERE eventType = 59", "textId give no text to 3 of 3 ranges"),
    ("RUNTIME SET start = -1 WHERE start = 300", "RUNTIME.start is negative"),
    ("RUNTIME SET start = start + 1000000, [end] = [end] + 1000000", "4 operations begin before the call"),
    ("RUNTIME SET correlationId = NULL WHERE start = 300", "correlationId is NULL in 1 of 4"),
    ("RUNTIME SET nameId = 4096 WHERE start = 300", "StringIds lacks the text"),
    ("StringIds SET id = 4096 WHERE value = 'gemm'", "StringIds lacks the text of 1 of 1 ids"),
    ("KERNEL SET deviceId = 99", "deviceId of 2 operations is 99"),
    ("KERNEL SET start = 1000, [end] = 1010, correlationId = 1001", "1 operations stand in"),
    ("MEMCPY SET copyKind = 99", "CUPTI_ACTIVITY_KIND_MEMCPY.copyKind is 99"),
    ("MEMORY SET memKind = 99", "CUDA_GPU_MEMORY_USAGE_EVENTS.memKind is 99"),
]
REFUSED = [
    ("NVTX SET [end] = 150 WHERE start = 200", "ranges (NVTX_EVENTS): 1 end before they begin"),
    ("NVTX SET domainId = NULL WHERE eventType = 75", "NVTX_EVENTS.domainId is None"),
    ("NVTX SET category = NULL WHERE eventType = 33", "NVTX_EVENTS.category is None"),
    ("KERNEL SET [end] = 999", "operations (CUPTI_ACTIVITY_KIND_*): 2 end before they begin"),
    ("KERNEL SET [end] = 9223372036854775807", "more than 100 days apart"),
    ("KERNEL SET deviceId = 1 << 40", "device is 1099511627776"),
    ("KERNEL SET deviceId = -1", "operations (CUPTI_ACTIVITY_KIND_*): device is -1 in 2 rows"),
    ("MEMORY SET deviceId = -5", "allocations (CUDA_GPU_MEMORY_USAGE_EVENTS): device is -5"),
    ("MEMORY SET start = 1 << 62", "more than 100 days apart"),
    ("SCHED_EVENTS SET start = 1 << 62", "more than 100 days apart"),
    ("PROFILER_OVERHEAD SET start = 670", "1 end before they begin"),
]


def changed(path: Path, case: str) -> Path:
    """The capture with the change of a case."""
    word, _, rest = case.partition(" ")
    return change(path, f"UPDATE {SHORT.get(word, word)} {rest}")


@pytest.mark.parametrize(("case", "named"), WARNED)
def test_warned_of_by_name(capture, case, named):
    assert named in warnings_of(changed(capture, case))


@pytest.mark.parametrize(("case", "named"), REFUSED)
def test_refused_by_name(capture, case, named):
    with pytest.raises(CaptureError, match=re.escape(named)):
        warnings_of(changed(capture, case))


IN_CAPTURE = ("StringIds", *SHORT.values(), "PROFILER_OVERHEAD", "SCHED_EVENTS", "CUPTI_ACTIVITY_KIND_MEMSET")
COLUMNS = [
    (table, column)
    for table in IN_CAPTURE
    for column in (*NSYS_SOURCES[table].required, *NSYS_SOURCES[table].partial)
]  # fmt: skip


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_a_column_of_the_schema_is_named_where_it_is_missing_null_or_of_another_type(capture, table, column):
    """In every row, and in the last one only, because columns with one value are not read row by row."""
    optional, whole = (*OPTIONAL, *OPS), capture.read_bytes()
    with closing(sqlite3.connect(capture)) as db:
        names = ", ".join(f"[{row[1]}]" for row in db.execute(f"PRAGMA table_info({table})"))
        ((last,),) = db.execute(f"SELECT max(rowid) FROM {table}")
    with pytest.raises(CaptureError, match=f"the table {table} has no column {column}"):
        open_capture(change(capture, f'ALTER TABLE {table} RENAME "{column}" TO other'), optional=optional)
    is_text = column in NSYS_SOURCES[table].texts
    values, noun = (["NULL", "7"], "text") if is_text else (["NULL", "0.5", "'seven'", "x'ff00'"], "a whole number")
    for value, rows in [*((value, "") for value in values), (values[-1], f" WHERE rowid = {last}")]:
        capture.write_bytes(whole)
        untyped = (f"ALTER TABLE {table} RENAME TO old", f"CREATE TABLE {table} ({names})")
        change(capture, *untyped, f"INSERT INTO {table} SELECT * FROM old")
        change(capture, f'UPDATE {table} SET "{column}" = {value}{rows}')
        with pytest.raises(
            CaptureError, match=rf"{table}\.{column} is (NULL|None|not {noun})|values that are not text"
        ):
            open_capture(capture, optional=optional)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        (table, column, value)
        for table in IN_CAPTURE
        for column, (low, high) in NSYS_SOURCES[table].bounds.items()
        for value in (low - 1, high + 1)
    ],
)
def test_a_value_outside_the_bounds_of_the_schema_is_named(capture, table, column, value):
    with pytest.raises(CaptureError, match=rf"{table}\.{column} is {value} in"):
        warnings_of(change(capture, f'UPDATE {table} SET "{column}" = {value}'))


def test_texts_in_another_encoding_are_read(capture):
    path = changed(capture, "NVTX SET textId = NULL, text = CAST(x'6cffe9' AS TEXT) WHERE start = 200")
    assert "l\ufffd\ufffd" in open_capture(path).ranges["text"].tolist()


@pytest.mark.parametrize("end", ["NULL", "0", "-1"])
def test_a_range_left_open_is_no_error(capture, end):
    """Exporters wrote NULL, before 2022 also 0."""
    ranges = open_capture(change(capture, f"UPDATE NVTX_EVENTS SET [end] = {end} WHERE start = 100")).ranges
    assert ranges["end_ns"][ranges["left_open"]].tolist() == [1080], "the end of the capture"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        # the step has an end: its layer cannot stay open
        ("NVTX SET [end] = NULL WHERE start = 200", "push/pop ranges of NVTX_EVENTS end after"),
        # layers.1 begins at 500, in it, and ends after it
        ("NVTX SET [end] = 600 WHERE start = 200", "push/pop ranges of NVTX_EVENTS end after"),
        ("KERNEL SET correlationId = 9 WHERE start = 1020", "1 of 4 operations were launched by calls"),
    ],
)
def test_what_contradicts_is_warned_of_in_every_table(capture, case, said):
    opened = nvprof_kit.open(changed(capture, case))
    for result in (opened.layers(), opened.breakdown(), opened.summary()):
        assert any(said in warning for warning in result.warnings), type(result)


@pytest.mark.parametrize("table", ENUMERATIONS)
def test_an_enumeration_with_other_numbers_is_refused(capture, table, names_of):
    moved = {number + 1: name for number, name in names_of[table].items()}
    with pytest.raises(CaptureError, match=f"{table} numbers"):
        warnings_of(enumerated(capture, table, moved))


def test_a_value_with_a_new_name_is_warned_of(capture, names_of):
    for table, names in names_of.items():
        enumerated(capture, table, names)
    assert warnings_of(capture) == ""
    change(capture, "UPDATE ENUM_CUDA_MEMCPY_OPER SET name = 'HOST_TO_DEVICE' WHERE id = 1")
    assert "ENUM_CUDA_MEMCPY_OPER calls 1 'HOST_TO_DEVICE'; it is read as CUDA_MEMCPY_KIND_HTOD" in warnings_of(capture)


def enumerated(path: Path, table: str, names: dict[int, Any]) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE {table} (id INTEGER, name TEXT, label TEXT)")
        db.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", [(one, name, name) for one, name in names.items()])
    return path


def test_durations_that_cannot_be_added_up_are_refused(file):
    """Three of 40 days beside each other: no two moments are 100 days apart, but sums are exact to 104 days only."""
    file.range_("layers.0", 200, 400)
    for stream in (7, 8, 9):
        file.kernel(1000, 1000 + 40 * 86_400 * 10**9, launched=(300, 310), stream=stream)
    with pytest.raises(CaptureError, match=r"the durations of 3 rows add up to 120 days"):
        open_capture(file.write())


@pytest.mark.parametrize(
    ("table", "create", "said"),
    [
        # without its kernels a capture has another answer, and a capture without kernels is none that is wrong
        ("CUPTI_ACTIVITY_KIND_KERNEL", "VIEW {} AS SELECT * FROM old", "is a view, needed the table {}"),
        (SHORT["KERNEL"], "TABLE cupti_activity_kind_kernel AS SELECT * FROM old", "letters, needed the table {}"),
        ("StringIds", "TABLE {} AS SELECT * FROM old UNION ALL SELECT id, 'other' FROM old", "id has several values"),
    ],
)
def test_a_table_of_another_form_is_refused(capture, table, create, said):
    change(capture, f"ALTER TABLE {table} RENAME TO old", f"CREATE {create.format(table)}")
    with pytest.raises(CaptureError, match=said.format(table)):
        open_capture(capture)


DESCRIPTIONS = (
    "CREATE TABLE DIAGNOSTIC_EVENT (severity INT, text TEXT, globalPid INT)",
    "INSERT INTO DIAGNOSTIC_EVENT VALUES (3, 'it broke', 1.5)",  # a process that is none is no fault of the message
    "CREATE TABLE ANALYSIS_DETAILS (duration INT, stopTime INT)",
    "INSERT INTO ANALYSIS_DETAILS VALUES (900, 900)",
    "CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)",
    "INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'here')",
)


@pytest.mark.parametrize(
    ("change_", "named"),
    [
        ("ALTER TABLE TARGET_INFO_GPU RENAME COLUMN id TO gpu", "the table TARGET_INFO_GPU has no column id"),
        ("UPDATE TARGET_INFO_GPU SET name = NULL", "TARGET_INFO_GPU.name is not a text in 1 of 1 rows"),
        ("UPDATE META_DATA_EXPORT SET value = NULL", "META_DATA_EXPORT.value is not a text"),
        ("ALTER TABLE DIAGNOSTIC_EVENT DROP COLUMN severity", "the table DIAGNOSTIC_EVENT has no column severity"),
        ("UPDATE DIAGNOSTIC_EVENT SET text = NULL", "DIAGNOSTIC_EVENT.text is not a text in 1 of 1 rows"),
        ("UPDATE ANALYSIS_DETAILS SET stopTime = NULL", "ANALYSIS_DETAILS.stopTime is not given in 1 of 1 rows"),
    ],
)
def test_tables_that_describe_the_system_are_warned_of(capture, change_, named):
    assert "nsys warns: it broke" in warnings_of(change(capture, *DESCRIPTIONS))
    changed = warnings_of(change(capture, change_))
    assert named in changed
    assert "nsys warns: None" not in changed
    assert any(named in seen for seen in seen_by_doctor(capture))


def test_the_environment_is_missed_by_doctor_only(capture):
    change(capture, *DESCRIPTIONS, "ALTER TABLE TARGET_INFO_SYSTEM_ENV DROP COLUMN value")
    assert "SYSTEM_ENV" not in warnings_of(capture)
    seen = " | ".join(seen_by_doctor(capture))
    assert "the table TARGET_INFO_SYSTEM_ENV has no column value: what it describes is unknown" in seen
    assert "privacy" not in seen
