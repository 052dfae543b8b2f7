"""Every json answer follows the schema that it names, and bounds say what they leave out."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from nvprof_kit._cli import group
from nvprof_kit._report.export import schemas
from nvprof_kit._report.export.answer import json_answer
from nvprof_kit._report.selection import EVERYTHING, Selection

DATA = Path(__file__).parents[2] / "data"
LOG = """[RANK 0] forward, start=1716182684.282194, end=1716182685.123003, cpu_dur=0.840809s, cuda_dur=830.512ms
[RANK 0] forward, start=1716182685.282194, end=1716182686.123003, cpu_dur=0.840809s, cuda_dur=830.512ms
"""
_BREAKDOWNS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")
_SUMMARIES = ("device", "overview", "model", "distributed", "operator", "kernel", "memory", "user")
_MEMORY = ("layer", "stack", "size", "allocation", "step", "segment", "leak")
_RANKS = ("", "waits", "charges", "layers", "clocks", "groups", "bubbles", "micro-batches", "critical-path", "what-if")
_JOBS = {"bubbles": "pipeline", "micro-batches": "pipeline"}

ANSWERS = {
    "layers": "layers hooks-train-2023.4.sqlite.xz --fold --columns class --columns phase",
    "layers by step": "layers ddp.rank0-2024.2.sqlite.xz --by step",
    "layers memory": "layers memory/caching-2024.2.sqlite.xz --memory",
    "layers several": "layers gpt2-2023.4.sqlite.xz encoder-2023.4.sqlite.xz",
    **{f"breakdown-{view}": f"breakdown hooks-ddp-2024.2.sqlite.xz --view {view}" for view in _BREAKDOWNS},
    **{f"summary-{view}": f"summary slow-operators-2024.2.sqlite.xz --view {view}" for view in _SUMMARIES},
    "summary-device by step": "summary slow-cpu-2024.2.sqlite.xz --view device --by step",
    "advise": "advise slow-2024.2.sqlite.xz",
    "diff": "diff eager-2024.2.sqlite.xz slow-2024.2.sqlite.xz --anyway",
    "diff-kernels": "diff eager-2024.2.sqlite.xz slow-2024.2.sqlite.xz --anyway --view kernels",
    "flops": "flops flops/checkpoint-2024.2.sqlite.xz",
    "metrics": "metrics metrics/llama-2023.4.sqlite.xz",
    "ncu-plan": "ncu plan ncu/run-2023.4.sqlite.xz",
    "ncu-layers": "ncu layers ncu/encoder-full-2025.3.csv.xz",
    "ncu-layers spread": "ncu layers ncu/encoder-full-2025.3.csv.xz --with ncu/encoder-2024.2.sqlite.xz",
    "ncu-kernels": "ncu kernels ncu/layer-2025.3.csv.xz",
    **{f"memory-{view}": f"memory PICKLE --by {view}" for view in _MEMORY},
    "timers": "timers LOGS",
    "timers ranks": "timers LOGS --by rank",
    "timers-calls": "timers LOGS --by call",
    "doctor": "doctor PLAIN",
    **{
        f"ranks-{view}".rstrip("-"): f"ranks ranks/{_JOBS.get(view, 'ddp')}-layer.rank0-2024.2.sqlite.xz "
        f"ranks/{_JOBS.get(view, 'ddp')}-layer.rank1-2024.2.sqlite.xz --workers 1 {f'--view {view}' if view else ''}"
        for view in _RANKS
    },
}
"""An answer for each schema, by its name and whatever more."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Inputs that are made here."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "timer_rank0.log").write_text(LOG)
    (folder / "timer_rank1.log").write_text(LOG.replace("RANK 0", "RANK 1"))
    plain = folder / "gpt2.sqlite"
    plain.write_bytes(lzma.decompress((DATA / "gpt2-2023.4.sqlite.xz").read_bytes()))
    pickle = folder / "run.pickle"
    pickle.write_bytes(lzma.decompress((DATA / "snapshots" / "run-2.11.pickle.xz").read_bytes()))
    return {"LOGS": str(folder), "PLAIN": str(plain), "PICKLE": str(pickle)}


def answer(line: str, place: dict[str, str], *more: str) -> Any:
    words = [place.get(word) or (str(DATA / word) if word.endswith(".xz") else word) for word in line.split()]
    done = CliRunner().invoke(group, [*words, "--format", "json", *more])
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_the_schemas_in_the_package_are_those_of_the_code() -> None:
    for name, text in schemas.texts().items():
        made = json.loads(text)
        assert schemas.published(name.removesuffix(".json")) == made, "stale: run `make docs`"
        Draft202012Validator.check_schema(made)


def test_every_schema_has_an_answer() -> None:
    assert {name.split()[0] for name in ANSWERS} == set(schemas.TABLES) - {schemas.ANY} | {"ranks"}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_follows_its_schema(name: str, place: dict[str, str]) -> None:
    said = answer(ANSWERS[name], place)
    schema = name.split(maxsplit=1)[0]
    assert (said["schema"], said["version"]) == (f"nvprof-kit/{schema}", 1)
    Draft202012Validator(schemas.published(schema)).validate(said)
    tables = [value for value in said.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    assert tables
    missing = {column for rows in tables for row in rows for column, value in row.items() if value is None}
    assert missing == set(said["unknown"])  # each with its reason
    for rows in tables:
        assert len({tuple(row) for row in rows}) == 1  # no key is missing
        told = {column for row in rows for column, value in row.items() if isinstance(value, (int, float))}
        assert not [column for column in told if column.endswith(("_ms", "_us", "_mib", "_kb")) or "seconds" in column]


def test_every_time_and_size_names_its_unit() -> None:
    for table, columns in schemas.TABLES.items():
        for column, meaning in columns.items():
            if schemas.kind_of(table, column) in ("integer", "number") and " in ns" in meaning:
                assert schemas.unit_of(column) == "ns", (table, column)


def test_rows_beyond_a_bound_are_left_out_and_counted(place: dict[str, str]) -> None:
    whole = answer("layers gpt2-2023.4.sqlite.xz", place)
    said = answer("layers gpt2-2023.4.sqlite.xz", place, "--max-rows", "5")
    costs = sorted((row["gpu_self_ns"] for row in whole["rows"]), reverse=True)
    assert whole["truncated"] is None
    assert said["truncated"] == {
        "rows_left_out": len(costs) - 5,
        "rows": len(costs),
        "bound": "max_rows",
        "kept": "the rows with the largest gpu_self_ns",
    }
    assert sorted((row["gpu_self_ns"] for row in said["rows"]), reverse=True) == costs[:5]
    assert [row for row in whole["rows"] if row in said["rows"]] == said["rows"]  # in the model's order


@pytest.mark.parametrize("line", ["layers gpt2-2023.4.sqlite.xz", ANSWERS["ranks"], ANSWERS["ncu-kernels"]])
def test_an_answer_fits_its_budget(line: str, place: dict[str, str]) -> None:
    words = [str(DATA / word) if word.endswith(".xz") else word for word in line.split()]
    done = CliRunner().invoke(group, [*words, "--format", "json", "--budget", "6000"])
    assert done.exit_code == 0 and len(done.stdout.encode()) <= 6000
    assert json.loads(done.stdout)["truncated"]


def test_a_budget_that_no_answer_fits_is_named() -> None:
    words = ["layers", str(DATA / "gpt2-2023.4.sqlite.xz"), "--format", "json", "--budget", "9"]
    done = CliRunner().invoke(group, words)
    assert json.loads(done.stdout)["rows"] == []
    assert f"without rows has {len(done.stdout.encode())} bytes: more than --budget 9" in done.stderr


def test_tables_that_need_several_ranks_say_why_they_are_empty() -> None:
    alone = str(DATA / "ranks" / "ddp-layer.rank0-2024.2.sqlite.xz")
    said = json.loads(CliRunner().invoke(group, ["ranks", alone, "--format", "json"]).stdout)
    reason = "no collective was found on several ranks; name the captures of all ranks of a job"
    empty = {"replay_error", "groups", "bubbles", "micro_batches", "critical_path", "what_if"}
    assert {name for name, why in said["unknown"].items() if why == reason} == empty
    refused = CliRunner().invoke(group, ["ranks", alone, "--view", "what-if"])
    assert f"no table what-if: {reason}" in str(refused.exception)


def test_an_infinite_value_is_null_with_its_reason() -> None:
    said = json.loads(json_answer("rows", pd.DataFrame({"ratio": [float("inf"), 1.0]}), (), (), EVERYTHING))
    assert said["rows"][0]["ratio"] is None and set(said["unknown"]) == {"ratio"}


def test_a_budget_is_for_json() -> None:
    done = CliRunner().invoke(group, ["layers", str(DATA / "gpt2-2023.4.sqlite.xz"), "--budget", "99"])
    assert "--budget limits json output" in str(done.exception)


def test_csv_says_on_stderr_what_is_left_out(place: dict[str, str]) -> None:
    done = CliRunner().invoke(
        group, ["layers", str(DATA / "gpt2-2023.4.sqlite.xz"), "--format", "csv", "--max-rows", "2"]
    )
    assert len(done.stdout.splitlines()) == 3 and not done.stdout.startswith("!")
    assert "rows are left out (--max-rows); here are the rows with the largest gpu_self_ns" in done.stderr


def test_what_is_missing_is_null_with_its_reason() -> None:
    table = pd.DataFrame(
        {"step": pd.array([1, None], dtype="Int64"), "gpu_self_ns": [5, 6], "share": [0.5, float("nan")]}
    )
    said = json.loads(json_answer("layers", table, (), ("a",), EVERYTHING))
    assert said["rows"][1] == {"step": None, "gpu_self_ns": 6, "share": None}
    assert said["unknown"] == {"step": "missing outside steps", "share": schemas.reasons("layers", ["share"])["share"]}


def test_a_budget_too_small_for_any_row_leaves_the_frame() -> None:
    table = pd.DataFrame({"gpu_self_ns": range(50)})
    said = json.loads(json_answer("rows", table, (), (), Selection(budget=1)))
    assert said["rows"] == [] and said["truncated"]["rows_left_out"] == 50


def test_the_list_that_json_was_can_still_be_had(monkeypatch: pytest.MonkeyPatch, place: dict[str, str]) -> None:
    monkeypatch.setenv("NVPROF_KIT_JSON", "list")
    words = ["layers", str(DATA / "gpt2-2023.4.sqlite.xz"), "--format", "json"]
    done = CliRunner().invoke(group, words)
    assert isinstance(json.loads(done.stdout), list)
    assert "the next release has no such thing" in done.stderr
