"""Maps made by the tasks of a Slurm step: a stand-in for srun starts them with the environment that Slurm gives."""

import sys

import pytest
from support.captures.tiny_ranks import MS, capture
from support.cli import execute

from nvprof_kit import open_job

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
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    some = f'$(ls {captures}/* | awk "NR % $SLURM_NTASKS == $SLURM_PROCID")'
    words = [str(srun), "--ntasks", "3", "bash", "-c", f"{sys.executable} -m nvprof_kit ranks map -o {maps} {some}"]
    done = execute(*words, check=True)
    # 5 captures over 3 tasks
    counts = [line.rpartition(": ")[2] for line in done.stderr.splitlines() if line.endswith("maps")]
    assert sorted(counts) == ["1 maps", "2 maps", "2 maps"]
    assert open_job(maps).ranks["rank"].tolist() == [0, 1, 2, 3, 4]
    assert open_job(maps).verdict.rank in (3, None)
