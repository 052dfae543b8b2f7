"""Maps made by the tasks of a Slurm step, started by a stand-in for srun, and on a Dask cluster that loses a worker."""

import os
import signal
import sys

import pytest
from support.captures.tiny_ranks import MS, capture
from support.cli import executable, execute

from nvprof_kit import map_captures, open_job

SRUN = """#!/usr/bin/env bash
# srun --ntasks N COMMAND...: all tasks at once, each with its number
tasks=$2; shift 2
for ((task = 0; task < tasks; task++)); do
  SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_NTASKS=$tasks SLURM_LOCALID=$task "$@" &
  started+=($!)
done
for one in "${started[@]}"; do wait "$one" || exit 1; done
"""


@pytest.mark.slow
def test_tasks_share_the_captures(tmp_path):
    captures, maps = tmp_path / "captures", tmp_path / "maps"
    captures.mkdir()
    for rank in range(5):
        capture(captures, rank, slower=2 * MS if rank == 3 else 0)
    srun = executable(tmp_path / "srun", SRUN)
    some = f'$(ls {captures}/* | awk "NR % $SLURM_NTASKS == $SLURM_PROCID")'
    words = [str(srun), "--ntasks", "3", "bash", "-c", f"{sys.executable} -m nvprof_kit ranks map -o {maps} {some}"]
    done = execute(*words, check=True)
    # 5 captures over 3 tasks
    counts = [line.rpartition(": ")[2] for line in done.stderr.splitlines() if line.endswith("maps")]
    assert sorted(counts) == ["1 maps", "2 maps", "2 maps"]
    assert open_job(maps).ranks["rank"].tolist() == [0, 1, 2, 3, 4]
    assert open_job(maps).verdict.rank in (3, None)


@pytest.mark.slow
def test_nothing_is_lost_with_a_worker(tmp_path):
    distributed = pytest.importorskip("distributed")
    files = [capture(tmp_path, rank) for rank in range(12)]
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        victim = next(iter(cluster.workers.values())).pid
        seen: list[str] = []

        def done(name: str) -> None:
            seen.append(name)
            if len(seen) == 2:
                os.kill(victim, signal.SIGKILL)

        names = map_captures(files, tmp_path / "maps", dask=cluster.scheduler_address, notify=done)
    assert len(names) == len(set(names)) == 12
    assert len(list((tmp_path / "maps" / "ranks").glob("*.parquet"))) == 12
