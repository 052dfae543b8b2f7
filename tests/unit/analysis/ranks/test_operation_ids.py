"""Matching by the ids that nsys gives NCCL's operations, from exports made as its documentation describes the table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from support.captures.nsys_file import NsysFile

from nvprof_kit import open_job

MS = 1_000_000
NAME = "ncclDevKernel_{}_RING_LL"
COMM = 0xFEEDFACECAFEBEEF  # beyond 63 bits


def operation(file: NsysFile, kind: str, begin: int, end: int, id_: int | None, *, stream: int = 9) -> None:
    """A kernel of NCCL's and the operation that it ran, which begins a little later."""
    name = NAME.format("SendRecv" if kind in ("Send", "Recv") else kind)
    file.kernel(begin, end, launched=(begin - 9_000, begin - 8_000), name=name, stream=stream)
    if id_ is not None:
        row = {"text": f"nccl{kind}", "start": begin + 500, "end": end - 500, "operationId": id_}
        more = {"commHash": COMM - (1 << 64), "commRank": 0, "count": 1_000, "dataType": "ncclBfloat16"}
        file.rows["NCCL_GPU_OPERATIONS"].append(row | more | {"operationClass": "collective"})


def capture(folder: Path, rank: int, late: int, order: tuple[int, ...], *, ids: bool = True) -> Path:
    """One step: a layer, then all-reduces that begin every 10 ms and end 8 ms later on both; rank 1's are `late`."""
    file = NsysFile(folder / f"run.rank{rank}.sqlite", nsys="2026.4")
    file.range_("step 0", 0, 200 * MS, category="step", payload=0)
    file.range_("layers.0", 0, 2 * MS, category="forward")
    file.kernel(MS, 2 * MS, launched=(100_000, 110_000))
    for place, id_ in enumerate(order):
        begin = (10 * id_ + 10) * MS
        operation(file, "AllReduce", begin + (late if rank else 0), begin + 8 * MS, 70 + id_ if ids else None)
        assert place >= 0
    return file.write()


def waits(tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], **more: bool) -> pd.DataFrame:
    files = [capture(tmp_path, rank, 3 * MS, order, **more) for rank, order in enumerate((first, second))]
    return open_job(files, workers=1).waits().to_frame()


def test_lost_operations_do_not_shift_the_others(tmp_path: Path) -> None:
    """Rank 0 lost the second of six and rank 1 the fourth: as many on both, and by order two of five would be wrong."""
    found = waits(tmp_path, (0, 2, 3, 4, 5), (0, 1, 2, 4, 5))
    assert found["wait_ns"].tolist() == [3 * MS] * 4  # of 0, 2, 4, 5
    assert set(found["late_rank"]) == {1}
    assert found["collective"].tolist() == [f"{COMM:#x} AllReduce {70 + id_}" for id_ in (0, 2, 4, 5)]


def test_sizes_come_with_the_operations(tmp_path: Path) -> None:
    job = open_job([capture(tmp_path, rank, 3 * MS, (0, 1, 2)) for rank in (0, 1)], workers=1)
    assert set(job._tables._frame("SELECT bytes FROM collectives")["bytes"]) == {2_000}  # 1,000 of two bytes


def test_a_kernel_of_several_operations_is_another_with_the_same_ones(tmp_path: Path) -> None:
    """A kernel sends 5 and receives 6; the other rank's receives 5 and sends 6. Those with 7 alone are no partners."""
    files = []
    for rank in (0, 1):
        file = NsysFile(tmp_path / f"run.rank{rank}.sqlite", nsys="2026.4")
        file.range_("step 0", 0, 200 * MS, category="step", payload=0)
        file.range_("layers.0", 0, 2 * MS, category="forward")
        file.kernel(MS, 2 * MS, launched=(100_000, 110_000))
        for step in range(3):
            begin = (20 * step + 10) * MS
            operation(file, "Send" if rank else "Recv", begin + rank * MS, begin + 8 * MS, 10 * step + 5)
            file.rows["NCCL_GPU_OPERATIONS"].append(
                file.rows["NCCL_GPU_OPERATIONS"][-1] | {"operationId": 10 * step + 6}
            )
            operation(file, "Send", begin + 10 * MS, begin + 11 * MS, 1_000 + 2 * step + rank)
        files.append(file.write())
    found = open_job(files, workers=1).waits().to_frame()
    assert found["wait_ns"].tolist() == [MS] * 3 and set(found["late_rank"]) == {1}
