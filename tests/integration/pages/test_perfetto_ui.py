"""An exported trace in Perfetto itself, whose trace processor loses nothing and answers with our tables' numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser
from support.captures.nsys_file import NsysFile
from support.cli import run
from support.perfetto_ui import opened_in_perfetto, web_files

import nvprof_kit

TESTS = Path(__file__).parents[2]
DOCUMENTED = (TESTS.parent / "docs" / "report.md").read_text(encoding="utf-8").split("```sql\n")[1].split("```")[0]
"""The query that the documentation gives."""

LOST = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
EVIL = '<img src=x onerror=alert(1)>"\\ Ωμέγα·'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    web_files()
    with browser() as started:
        yield started


def exported(capture: Path, folder: Path, suffix: str = "json.gz") -> Path:
    trace = folder / f"trace.{suffix}"
    assert run("export", str(capture), "-o", str(trace)) == 0
    return trace


@pytest.mark.parametrize(
    ("capture", "suffix"), [("llama-2023.4", "json.gz"), ("graph-2023.4", "json"), ("ddp.rank0-2024.2", "json.gz")]
)
def test_its_answers_are_our_numbers(chromium, capture, suffix, tmp_path):
    path = TESTS / "data" / f"{capture}.sqlite.xz"
    with opened_in_perfetto(chromium, exported(path, tmp_path, suffix)) as ui:
        assert ui.query(LOST) == []
        ours = nvprof_kit.open(path).layers(steps="all").rows.query("gpu_ops > 0").groupby(["layer", "phase"])
        assert {(layer, phase): ns for layer, phase, ns in ui.query(DOCUMENTED)} == ours["gpu_self_ns"].sum().to_dict()
        # the UI shows the processes and, opened, their tracks
        names = [name for (name,) in ui.query("SELECT name FROM thread WHERE name LIKE '%·%'")]
        assert {name.rpartition(" · ")[2] for name in names} == {"phases", "layers", "operations"}
        ui.expand()
        for name in ("GPU 0 NVIDIA H200", "Process 0: ranges on the CPU", *names[:3]):
            ui.page.get_by_text(name).first.wait_for(state="attached", timeout=10_000)


def test_hostile_names_stay_names(chromium, tmp_path):
    file = NsysFile(tmp_path / "run.sqlite")
    file.range_("step 1", 50, 900, category="step", payload=1)
    file.range_(EVIL, 100, 700)
    file.kernel(1_000, 3_345, launched=(130, 131), name=EVIL * 1000)
    with opened_in_perfetto(chromium, exported(file.write(), tmp_path)) as ui:
        assert ui.query("SELECT name, dur FROM slice WHERE category = 'operation'") == [(EVIL * 1000, 2345)]
        assert ui.query("SELECT name FROM slice WHERE category = 'layer'") == [(EVIL,)]
        layers_named = "SELECT EXTRACT_ARG(arg_set_id, 'args.layer') FROM slice WHERE category = 'operation'"
        assert ui.query(layers_named) == [(EVIL,)]
