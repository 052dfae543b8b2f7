"""Captures of a job that do not fit together: lost collectives, other windows, a rank that ended early."""

import json
import lzma
import sqlite3
from pathlib import Path

import pytest
from support.captures.kineto_file import event, kernel, write
from support.captures.nsys_file import NsysFile
from support.captures.tiny_ranks import AR, MS
from support.data import DATA, unpacked

from nvprof_kit import open_job

RANKS = DATA / "ranks"


def keep_steps(file: Path, first: int, last: int) -> None:
    """Delete what was launched outside some steps, by their place."""
    with sqlite3.connect(file) as db:
        rows = db.execute(
            "SELECT e.start FROM NVTX_EVENTS AS e JOIN StringIds AS s ON s.id = e.textId "
            "WHERE e.eventType = 59 AND s.value LIKE 'step %' ORDER BY e.start"
        )
        begins = [row[0] for row in rows]
        outside = f"(start < {begins[first]} OR start >= {[*begins, 1 << 62][last + 1]})"
        calls = f"SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE {outside}"
        for table in ("KERNEL", "MEMCPY", "MEMSET"):
            db.execute(f"DELETE FROM CUPTI_ACTIVITY_KIND_{table} WHERE correlationId IN ({calls})")
        db.execute(f"DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE {outside}")
        db.execute(f"DELETE FROM NVTX_EVENTS WHERE eventType = 59 AND {outside}")
    db.close()


@pytest.mark.parametrize(("name", "place"), [("early", (0, 1)), ("later", (2, 3))])
def test_the_verdict_is_on_steps_that_several_ranks_have(tmp_path, name, place):
    """Half of the steps have rank 0 alone: they tell nobody's lateness, and are no steps without a fault."""
    names = [f"tensor-host.rank{rank}-2024.2.sqlite" for rank in (0, 1)]
    files = [unpacked(RANKS / f"{name}.xz", tmp_path / name) for name in names]
    keep_steps(files[1], *place)
    job = open_job(files)
    assert (job.verdict.rank, job.verdict.layer, job.verdict.cause) == (1, "model.layers.2.self_attn", "slow_host")
    (said,) = [one for one in job.warnings if "fewer steps" in one]
    assert said.startswith("1 rank has fewer steps than the others (1; ") and "2 of 4" in said


def test_other_windows_of_one_run_are_said(tmp_path):
    """Both windows have the run's id; nothing fits, and a rank that is not aligned is no reason to fail."""
    job = open_job([RANKS / f"ddp-{name}-2024.2.sqlite.xz" for name in ("layer.rank0", "none.rank1")])
    assert job.verdict.sentence == "no verdict: the ranks share no collective in a step"
    mixed = open_job([RANKS / f"ranks-ddp-{name}-2024.2.sqlite.xz" for name in ("layer.rank0", "none.rank1")])
    assert mixed.verdict.sentence.startswith("no verdict: are these captures of one run?")  # step by step
    assert any("2 ranks have no step in common with another one" in one for one in job.warnings)
    assert "not aligned" in str(job)
    assert job.report().save(tmp_path / "job.html").stat().st_size > 1000


@pytest.mark.slow
def test_ranks_with_layers_from_different_evidence_are_compared_without_layers(tmp_path):
    """One program twice, the second time without module events: its operators are no equals of the other's modules."""
    packed = RANKS.parent / "foreign" / "kineto-stack.json.xz"
    events = json.loads(lzma.decompress(packed.read_bytes()))["traceEvents"]
    write(tmp_path / "run.rank0.json", events)
    events = [each for each in events if each.get("cat") != "python_function"]
    # kernels launched while the loop is in `backward` take longer on the second: only that phase differs
    kernel_of = {each["args"]["correlation"]: each for each in events if each.get("cat") == "kernel"}
    backward = [each for each in events if each["name"] == "backward" and each["cat"] == "user_annotation"]
    for launch in (each for each in events if each.get("cat") in ("cuda_runtime", "cuda_driver")):
        id_, is_inside = launch["args"]["correlation"], any(0 <= launch["ts"] - it["ts"] < it["dur"] for it in backward)
        if is_inside and id_ in kernel_of:
            kernel_of[id_]["dur"] *= 1.25
    write(tmp_path / "run.rank1.json", events)
    job = open_job(tmp_path)
    layers = job.layers().to_frame()
    assert set(layers["layer"]) == {"(none)"} and {"forward", "backward", "optimizer"} < set(layers["phase"])
    rows = layers.set_index(["phase", "rank"])["median_ns"]
    assert rows["backward", 1] == pytest.approx(1.25 * rows["backward", 0], rel=0.01)
    # one kernel's phase is its module's in one, its thread's in the other
    assert (rows.xs(0, level="rank") - rows.xs(1, level="rank")).drop("backward").abs().max() < 5_000
    assert any("compared by phase, without layers" in issue and "operators (1)" in issue for issue in job.warnings)

    # where the second does not name its phases, nothing is left to compare but the whole
    write(tmp_path / "run.rank1.json", [each for each in events if each.get("cat") != "user_annotation"])
    assert set(open_job(tmp_path).layers().to_frame()["phase"]) == {"other"}

    alike = open_job([tmp_path / "run.rank0.json"])
    assert set(alike.layers().to_frame()["layer"]) > {"(none)"}
    assert not any("compared without layers" in issue for issue in alike.warnings)


def test_the_operator_around_a_launch_names_the_collective(tmp_path):
    """An all-to-all's kernel is named SendRecv; where traces have no arguments of collectives, its operator tells."""

    for rank in (0, 1):
        events = [event("user_annotation", "ProfilerStep#3", 0, 1000), event("cpu_op", "c10d::alltoall_base_", 10, 50)]
        for id_, launch, start in ((1, 20, 100), (2, 200, 300)):
            events += kernel("ncclDevKernel_SendRecv(ncclDevComm*)", start + 10 * rank, 100 - 10 * rank, launch, id_)
        write(tmp_path / f"run.rank{rank}.json", events)
    waits = open_job(tmp_path).waits().to_frame()
    assert waits["collective"].tolist() == ["stream 0 AllToAll 0", "stream 0 SendRecv 1"]


@pytest.mark.parametrize(("lost", "more_work", "named"), [(3, 2, 1), (3, 0, None), (0, 2, None)])
def test_where_most_collectives_have_no_match_the_work_is_compared(tmp_path, lost, more_work, named):
    """Both arrive at the same time at the one collective that both captures have."""
    for rank in (0, 1):
        file = NsysFile(tmp_path / f"run.rank{rank}.sqlite")
        for step in range(4):
            at, own = step * 20 * MS, (4 + more_work * rank) * MS
            file.range_(f"step {step}", at, at + 19 * MS, category="step", payload=step)
            file.range_("layers.0", at + MS, at + 2 * MS, category="forward")
            file.kernel(at + 2 * MS, at + 2 * MS + own, launched=(at + 1_200_000, at + 1_210_000))
            for begin in (at + ms * MS for ms in (9, *(range(11, 11 + lost) if rank else ()))):
                file.kernel(begin, begin + 500_000, launched=(begin - 90_000, begin - 80_000), name=AR, stream=9)
        file.write()
    verdict = open_job(tmp_path).verdict
    assert (verdict.rank, verdict.layer) == (named, None if named is None else "layers.0")
    if named is not None:
        assert "take 6.0 ms of a step of" in verdict.sentence and "6.0 ms against 4.0 ms" in verdict.sentence
        assert "60% of the collectives have no match" in verdict.sentence


def two_processes(path: Path, *marks: str) -> Path:
    """Two processes that use a device each; the second device's process has the lower id. Some have a mark."""
    file = NsysFile(path)
    for pid, device, length in ((400, 1, 2 * MS), (500, 0, 1 * MS)):
        file.range_("layers.0", 0, 4 * MS, category="forward", pid=pid)
        file.kernel(MS, MS + length, launched=(100_000, 110_000), device=device, pid=pid)
    for pid, text in zip((400, 500), marks, strict=False):
        file.range_(text, 10, None, category="user", pid=pid, style=34)
    return file.write()


def test_two_processes_of_one_file_are_never_silently_one_rank(tmp_path):
    job = open_job(two_processes(tmp_path / "run.sqlite"))
    assert job.ranks[["rank", "rank_told_by"]].values.tolist() == [[0, "device"], [1, "device"]]
    layers = job.layers().to_frame().set_index(["layer", "rank"])["median_ns"]
    assert (layers["layers.0", 0], layers["layers.0", 1]) == (MS, 2 * MS)
    assert any("numbered by their devices" in issue for issue in job.warnings)
    assert str(job).startswith("2 ranks · 0 matched collectives\n")  # without steps none are counted

    for name, marks in (("run.rank3.sqlite", ()), ("one.sqlite", ("rank 3 of 8 run a",))):
        job = open_job(two_processes(tmp_path / name, *marks))
        assert job.ranks["rank"].tolist() == [3]
        assert any("2 processes with GPU work are taken as one rank" in issue for issue in job.warnings)

    job = open_job(two_processes(tmp_path / "both.sqlite", "rank 3 of 8 run a", "rank 5 of 8 run a"))
    assert job.ranks["rank"].tolist() == [3, 5]
    assert not any("processes with GPU work" in issue for issue in job.warnings)


COMM = 0xFEEDFACECAFEBEEF  # beyond 63 bits


def one_step(folder: Path, rank: int) -> NsysFile:
    file = NsysFile(folder / f"run.rank{rank}.sqlite", nsys="2026.4")
    file.range_("step 0", 0, 200 * MS, category="step", payload=0)
    file.range_("layers.0", 0, 2 * MS, category="forward")
    file.kernel(MS, 2 * MS, launched=(100_000, 110_000))
    return file


def operation(file: NsysFile, kind: str, begin: int, end: int, *ids: int) -> None:
    """A kernel of NCCL's and the operations that it ran, which begin a little later."""
    name = f"ncclDevKernel_{'AllReduce' if kind == 'AllReduce' else 'SendRecv'}_RING_LL"
    file.kernel(begin, end, launched=(begin - 9_000, begin - 8_000), name=name, stream=9)
    row = {"text": f"nccl{kind}", "start": begin + 500, "end": end - 500, "operationClass": "collective"}
    row |= {"commHash": COMM - (1 << 64), "commRank": 0, "count": 1_000, "dataType": "ncclBfloat16"}
    file.rows["NCCL_GPU_OPERATIONS"] += [row | {"operationId": id_} for id_ in ids]


def test_lost_operations_do_not_shift_the_others(tmp_path):
    """Rank 0 lost the second of six and rank 1 the fourth: as many on both, and by order two of five would be wrong."""
    files = [one_step(tmp_path, rank) for rank in (0, 1)]
    for rank, order in enumerate(((0, 2, 3, 4, 5), (0, 1, 2, 4, 5))):
        for begin in ((10 * id_ + 10) * MS for id_ in order):  # rank 1 comes 3 ms later
            operation(files[rank], "AllReduce", begin + 3 * MS * rank, begin + 8 * MS, 70 + begin // (10 * MS))
    job = open_job([file.write() for file in files])
    found = job.waits().to_frame()
    assert found["wait_ns"].tolist() == [3 * MS] * 4
    assert set(found["late_rank"]) == {1}
    assert found["collective"].tolist() == [f"{COMM:#x} AllReduce {71 + id_}" for id_ in (0, 2, 4, 5)]
    assert set(job._tables._run("SELECT bytes FROM collectives", "df")["bytes"]) == {2_000}  # 1,000 of two bytes


def test_a_kernel_of_several_operations_is_another_with_the_same_ones(tmp_path):
    """A kernel sends 5 and receives 6; the other rank's receives 5 and sends 6. Those with 7 alone are no partners."""
    files = [one_step(tmp_path, rank) for rank in (0, 1)]
    for rank, file in enumerate(files):
        for step in range(3):
            begin, ids = (20 * step + 10) * MS, (10 * step + 5, 10 * step + 6)
            operation(file, "Send" if rank else "Recv", begin + rank * MS, begin + 8 * MS, *ids)
            operation(file, "Send", begin + 10 * MS, begin + 11 * MS, 1_000 + 2 * step + rank)
    found = open_job([file.write() for file in files]).waits().to_frame()
    assert found["wait_ns"].tolist() == [MS] * 3 and set(found["late_rank"]) == {1}
