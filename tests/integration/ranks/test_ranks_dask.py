"""Maps made on a Dask cluster of worker processes, one of which is killed in the middle."""

import os
import signal

import pytest

distributed = pytest.importorskip("distributed")

from support.captures.tiny_ranks import capture  # noqa: E402

from nvprof_kit import map_captures  # noqa: E402


@pytest.mark.slow
def test_nothing_is_lost_with_a_worker(tmp_path):
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
