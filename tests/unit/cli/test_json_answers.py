"""Every answer in json describes its columns, and says why a value is missing."""

import json
from typing import Any

import pytest
from click.testing import CliRunner
from support.captures import timer_log
from support.data import DATA, unpacked

import nvprof_kit
from nvprof_kit._cli import group

_BREAKDOWNS = ("steps", "idle", "communication", "copies", "launches", "queue", "critical-path")
_SUMMARIES = ("device", "overview", "model", "distributed", "operator", "kernel", "memory", "user")
_MEMORY = ("layer", "stack", "size", "allocation", "step", "segment", "leak")
_RANKS = ("", "waits", "charges", "layers", "clocks", "groups", "bubbles", "micro-batches", "critical-path", "what-if")
_JOBS = {"bubbles": "pipeline", "micro-batches": "pipeline"}

ANSWERS = {
    "layers": "layers hooks-train-2023.4.sqlite.xz --fold --columns class --columns phase",
    "layers by step": "layers ddp.rank0-2024.2.sqlite.xz --by step",
    "layers memory": "layers memory/caching-2024.2.sqlite.xz --columns memory",
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
    "ncu-layers spread": "ncu layers ncu/encoder-full-2025.3.csv.xz --capture ncu/encoder-2024.2.sqlite.xz",
    "ncu-kernels": "ncu layers ncu/layer-2025.3.csv.xz --by kernel",
    **{f"memory-{view}": f"memory PICKLE --by {view}" for view in _MEMORY},
    "timers": "timers LOGS",
    "timers ranks": "timers LOGS --by rank",
    "timers-calls": "timers LOGS --by call",
    "doctor": "doctor PLAIN",
    **{
        f"ranks-{view}".rstrip("-"): f"ranks ranks/{_JOBS.get(view, 'ddp')}-layer.rank0-2024.2.sqlite.xz "
        f"ranks/{_JOBS.get(view, 'ddp')}-layer.rank1-2024.2.sqlite.xz {f'--view {view}' if view else ''}"
        for view in _RANKS
    },
}
"""An answer for each schema, by its name and whatever more."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Inputs that are made here."""
    folder = tmp_path_factory.mktemp("inputs")
    for rank in (0, 1):
        timer_log.write(folder, rank, ("forward", 282.194, 840.809, 830.512), ("forward", 1282.194, 840.809, 830.512))
    plain = unpacked("gpt2-2023.4.sqlite.xz", folder / "gpt2.sqlite")
    pickle = unpacked("snapshots/run-2.11.pickle.xz", folder / "run.pickle")
    return {"LOGS": str(folder), "PLAIN": str(plain), "PICKLE": str(pickle)}


def answer(line: str, place: dict[str, str], *more: str) -> Any:
    words = [place.get(word) or (str(DATA / word) if word.endswith(".xz") else word) for word in line.split()]
    done = CliRunner().invoke(group, [*words, "--format", "json", *more])
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
"""The values that a column of each type may have in JSON."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_describes_itself(name, place):
    said = answer(ANSWERS[name], place)
    schema = name.split(maxsplit=1)[0]
    assert (said["schema"], said["version"]) == (f"nvprof-kit/{schema}", 1)
    tables = {
        name: rows for name, rows in said.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    assert tables
    for table, rows in tables.items():
        columns = said["columns"][table] if schema == "ranks" else said["columns"]
        assert set(columns) <= set(rows[0]) and (set(columns) == set(rows[0]) or schema == "ncu-kernels")
        for column, description in columns.items():
            types = {type(row[column]) for row in rows} - {type(None)}
            assert types <= set(TYPES[description["type"]]), (table, column, types)
            assert description["meaning"], column
            assert (description.get("unit") == "ns") == (column.rpartition("_")[2] == "ns"), column
        assert len({tuple(row) for row in rows}) == 1  # no key is missing
        numbers = {name for row in rows for name, value in row.items() if isinstance(value, (int, float))}
        assert not [name for name in numbers if name.endswith(("_ms", "_us", "_mib", "_kb")) or "seconds" in name]
    missing = {name for rows in tables.values() for row in rows for name, value in row.items() if value is None}
    assert missing == set(said["unknown"])  # each with its reason


def test_every_answer_is_looked_at():
    types = [getattr(nvprof_kit, name) for name in nvprof_kit.__all__]
    results = [one for one in types if isinstance(one, type) and issubclass(one, nvprof_kit.Result)]
    assert {name.split()[0] for name in ANSWERS} == {schema for one in results for schema in one.columns} | {"ranks"}


def test_tables_that_need_several_ranks_say_why_they_are_empty():
    alone = str(DATA / "ranks" / "ddp-layer.rank0-2024.2.sqlite.xz")
    said = json.loads(CliRunner().invoke(group, ["ranks", alone, "--format", "json"]).stdout)
    reason = "no collective was found on several ranks; name the captures of all ranks of a job"
    empty = {"replay_error", "groups", "bubbles", "micro_batches", "critical_path", "what_if"}
    assert {name for name, why in said["unknown"].items() if why == reason} == empty
    refused = CliRunner().invoke(group, ["ranks", alone, "--view", "what-if"])
    assert f"no table what-if: {reason}" in str(refused.exception)
