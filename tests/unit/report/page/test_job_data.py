"""The page of a job: ranks in time on one clock, heat maps whatever the number of ranks, and what is left out."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.captures.synthetic_job import Fault, SyntheticJob, write_maps
from support.cli import run
from support.page import column, data_of

from nvprof_kit import Job, open_job
from nvprof_kit.errors import UsageError


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("maps")
    write_maps(SyntheticJob(rows=4, columns=5, steps=4, fault=Fault("slow_layer", rank=7, layer=3)), folder, 20)
    return open_job(folder)


def heat(data: dict[str, Any], name: str, measure: int = 0) -> np.ndarray:
    """The values of a heat map, NaN where there is none."""
    found = data[name]
    packed = found["measures"][measure]
    cells = column(data, packed["cells"]).astype(float).reshape(len(found["rows"]), len(found["columns"]))
    return np.where(cells == 65_535, np.nan, cells * column(data, packed["scale"])[:, None])


@pytest.mark.slow
def test_the_heat_maps_hold_the_tables(job):
    data = data_of(job.report().data)
    layers = job.layers().to_frame()
    drawn = pd.DataFrame(heat(data, "layers"), data["layers"]["rows"], range(20))
    for row in layers.to_dict("records"):
        # to a 65,534th of the row's largest
        value = drawn.loc[f"{row['layer']} {row['phase']}", row["rank"]]
        assert value == pytest.approx(row["median_ns"], abs=drawn.to_numpy()[~np.isnan(drawn)].max() / 65_000)
    assert np.unravel_index(np.nanargmax(drawn.sub(drawn.median(axis=1), axis=0)), drawn.shape)[1] == 7
    matrix = job.answer().matrix
    assert np.nansum(heat(data, "matrix", 1)) == pytest.approx(matrix["wait_ns"].sum(), rel=1e-4)
    # without the first step, in which the profilers start
    waits, cold = job.waits().to_frame(), {0}
    assert set(job.charges().to_frame().query("cause == 'start_up'")["step"]) == cold
    later = waits[~waits["step"].isin(cold)]["wait_ns"].sum()
    assert np.nansum(heat(data, "matrix")) == pytest.approx(later, rel=1e-3)
    by_steps = heat(data, "bySteps")
    assert np.nansum(by_steps) == pytest.approx(job.answer().total_wait_ns, rel=1e-4)
    assert data["bySteps"]["rows"] == ["step 0", "step 1", "step 2", "step 3"]
    for title in ("Whom the others waited for", "Ranks unlike their equals: 1 of 20", "Clocks: 20 of 20 aligned"):
        assert title in str(job), "of many ranks the worst"


def test_the_ranks_in_time_are_those_that_matter_or_those_asked_for(job):
    data = data_of(job.report().data)
    assert 7 in data["ranks"] and len(data["ranks"]) == 12
    asked = data_of(job.report(timeline=[3, 1]).data)
    assert asked["ranks"] == [1, 3]
    assert [group["label"] for group in asked["timeline"]["groups"]] == ["rank 1", "rank 3"]
    with pytest.raises(UsageError, match="no rank 20 in the job; it has 20 ranks"):
        job.report(timeline=[20])


def test_waiting_of_a_rank_in_time_is_that_of_the_table(job):
    data = data_of(job.report(timeline=[2]).data)
    waiting = data["texts"].index("waiting")
    drawn = 0
    for row in data["timeline"]["groups"][0]["rows"]:
        if row["kind"] == "collective":
            drawn += int(column(data, row["length"])[column(data, row["phase"]) == waiting].sum())
    matrix = job.answer().matrix
    assert drawn == matrix[matrix["waiting_rank"] == 2]["wait_ns"].sum()


def test_of_more_ranks_than_columns_neighbours_share_one(job, monkeypatch):
    monkeypatch.setattr("nvprof_kit._report.page.job.MAX_COLUMNS", 8)
    data = data_of(job.report().data)
    assert data["layers"]["columns"][:2] == ["0 to 2", "3 to 5"] and len(data["layers"]["columns"]) == 7
    assert np.nanargmax(heat(data, "layers").max(axis=0)) == 2  # ranks 6 to 8
    assert data["layers"]["rank"] == [0, 3, 6, 9, 12, 15, 18]


def test_the_page_from_the_command_line(tmp_path):
    write_maps(SyntheticJob(rows=1, columns=2, steps=2), tmp_path / "maps", 2)
    page = tmp_path / "job.html"
    assert run("ranks", str(tmp_path / "maps"), "-o", str(page), "--timeline", "1") == 0
    text = page.read_text("utf-8")
    assert data_of(text.encode())["ranks"] == [1] and "default-src 'none'" in text
    assert run("ranks", str(tmp_path / "maps"), "-o", str(page), "--timeline", "one") == 2
