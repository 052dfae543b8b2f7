"""Timer logs in, statistics, skew and verdict out."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from nvprof_kit import CaptureError, Timers, open_timers


def log(folder: Path, rank: int, stages: list[tuple[str, int, int, int | None]]) -> None:
    """A rank's log: each stage with start and length in ms, and GPU time in ms."""
    lines = [
        f"[RANK {rank}] {name}, start={1700000000 + start / 1e3:.6f}, end={1700000000 + (start + length) / 1e3:.6f}, "
        f"cpu_dur={length / 1e3:.6f}s, cuda_dur={'nan' if gpu is None else f'{gpu:.3f}'}ms\n"
        for name, start, length, gpu in stages
    ]
    (folder / f"timer_rank{rank}.log").write_text("".join(lines))


def steps(count: int, forward: list[int], backward: list[int], folder: Path, rotate: bool = False) -> Timers:
    """Ranks whose steps of 100 ms are forward, backward and an optimizer for the rest."""
    ranks = len(forward)
    for rank in range(ranks):
        stages = []
        for step in range(count):
            kind = (rank + step) % ranks if rotate else rank
            ahead, back, start = forward[kind], backward[kind], 100 * step
            stages += [
                ("forward", start, ahead, ahead),
                ("backward", start + ahead, back, back),
                ("optimizer", start + ahead + back, 100 - ahead - back, 100 - ahead - back),
            ]
        log(folder, rank, stages)
    return open_timers(folder).timers()


def test_statistics_skew_and_offsets(tmp_path: Path) -> None:
    log(tmp_path, 0, [("forward", 0, 10, 8), ("forward", 100, 30, 26)])
    log(tmp_path, 1, [("forward", 5, 20, 18), ("forward", 101, 20, 16)])
    result = open_timers(tmp_path).timers()
    assert list(result.rows.columns) == list(Timers.columns["timers"])
    row = result.rows.iloc[0]
    assert row["calls"] == 4
    assert (row["cpu_total_ns"], row["cpu_mean_ns"], row["cpu_median_ns"]) == (80e6, 20e6, 20e6)
    assert (row["cuda_min_ns"], row["cuda_max_ns"]) == (8e6, 26e6)
    assert row["skew_start_ns"] == 3e6  # (5 + 1) / 2
    assert row["skew_ns"] == 10e6  # GPU: (18 - 8 + 26 - 16) / 2
    assert result.wall_ns == 130e6
    assert result.calls["offset_ns"].tolist() == [0, 100e6, 5e6, 101e6]
    by_rank = open_timers(tmp_path).timers("rank").rows
    assert by_rank["rank"].tolist() == [0, 1]
    assert by_rank["cpu_total_ns"].tolist() == [40e6, 40e6]


def test_a_slow_rank_that_rotates_costs_as_much(tmp_path: Path) -> None:
    # every rank is slow in an eighth of the steps: their means are equal, and yet each step loses 40 of 100 ms
    verdict = steps(33, [10] * 7 + [50], [60] * 7 + [20], tmp_path, rotate=True).verdict
    assert (verdict.severity, verdict.rank) == ("warning", None)
    assert (verdict.gap_ns, verdict.score) == (40_000_000, pytest.approx(0.4))
    assert verdict.reason.startswith("the slow rank rotates: in backward the median rank waits 40.0 % of a step longer")


def of_waits(folder: Path, waits: list[list[int]]) -> Timers:
    """Steps of 100 ms; each rank's time in the collective's stage in each step."""
    for rank, own in enumerate(waits):
        log(folder, rank, [("forward", 100 * s, 95 - w, 95 - w) for s, w in enumerate(own)]
            + [("backward", 100 * s + 95 - w, w, w) for s, w in enumerate(own)]
            + [("optimizer", 100 * s + 95, 5, 5) for s in range(len(own))])  # fmt: skip
    return open_timers(folder).timers()


def test_two_ranks_in_turn_are_not_one_straggler(tmp_path: Path) -> None:
    turns = [[5 if s % 2 == rank else 80 for s in range(31)] for rank in (0, 1)]
    verdict = of_waits(tmp_path, [*turns, [80] * 31, [80] * 31]).verdict
    assert (verdict.severity, verdict.rank) == ("warning", None)
    assert verdict.reason.startswith("ranks 0 and 1 are late in turn")


def test_a_rank_that_stalls_now_and_then_is_named_if_it_is_always_the_one(tmp_path: Path) -> None:
    # rank 2 stalls in every third step; in the other steps the ranks differ by a millisecond, another one each time
    stalls = [5 if s % 3 == 0 else 80 for s in range(31)]
    others = [[80 - (s % 4 == rank) for s in range(31)] for rank in range(4)]
    verdict = of_waits(tmp_path, [others[0], others[1], stalls, others[3]]).verdict
    # behind the warm-up 10 of 30 steps, of 75 ms: 25 ms a step
    assert (verdict.severity, verdict.rank) == ("critical", 2)
    assert verdict.gap_ns == pytest.approx(25e6, rel=0.05) and "in 10 of 30 steps" in verdict.reason


def test_one_bad_step_is_no_straggler(tmp_path: Path) -> None:
    # behind the warm-up 11 steps; in one of them rank 1 waits 1,195 ms for rank 0: 109 ms a step, all of it in one
    for rank, bad in enumerate([5, 1200]):
        waits = [85] * 10 + [bad] + [85]
        log(tmp_path, rank, [("backward", 2000 * s, w, w) for s, w in enumerate(waits)])
    verdict = open_timers(tmp_path).timers().verdict
    assert (verdict.severity, verdict.rank) == ("warning", None)
    assert verdict.reason == "no straggler: call 10 alone makes up 100 % of the time lost in backward"


@pytest.mark.parametrize("late", [lambda step: 2, lambda step: step % 4])
def test_a_barrier_after_backward_does_not_hide_who_is_late(late: Callable[[int], int], tmp_path: Path) -> None:
    # the ranks wait for each other in backward: nobody waits in the barrier
    for rank in range(4):
        stages = []
        for s in range(32):
            work = 50 if late(s) == rank else 10
            stages += [("forward", 100 * s, work, work), ("backward", 100 * s + work, 70 - work, 70 - work)]
            stages += [("barrier", 100 * s + 70, 1, 1), ("optimizer", 100 * s + 71, 29, 29)]
        log(tmp_path, rank, stages)
    verdict = open_timers(tmp_path).timers().verdict
    # 40 of 100 ms a step
    assert (verdict.collective, verdict.score) == (("backward",), pytest.approx(0.4))
    assert verdict.rank == (2 if late(1) == 2 else None)


def test_a_clock_that_is_set_during_the_run_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        log(
            tmp_path,
            rank,
            [("forward", 100 * step + 3_600_000 * (rank == 1 and step > 3), 50, 50) for step in range(8)],
        )
    (warning,) = open_timers(tmp_path).timers().warnings
    assert warning.startswith("the clock of rank 1 went 3600.00 s forward against the others' during the run")


def test_fsdp_is_a_warning_at_most(tmp_path: Path) -> None:
    for rank, (work, wait) in enumerate([(10, 60), (10, 20)]):
        log(
            tmp_path,
            rank,
            [(n, 100 * s + o, d, d) for s in range(25) for n, o, d in [("forward", 0, work), ("backward", 10, wait)]],
        )
    assert open_timers(tmp_path).timers(collective=("forward", "backward")).verdict.severity == "warning"


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    log(tmp_path, 0, [("work", 0, 10, None), ("work", 20, 10, None)])
    assert open_timers(tmp_path).timers().verdict.reason == "a single rank cannot be compared"
    log(tmp_path, 1, [("work", 0, 10, None)])
    result = open_timers(tmp_path).timers()
    assert result.verdict.severity == "unknown"
    assert "--collective" in result.verdict.reason
    assert "not as often on every rank" in result.warnings[0]
    assert result.rows["cuda_total_ns"].isna().all()


def test_a_rank_without_a_log_is_named(tmp_path: Path) -> None:
    for rank in (0, 3):
        log(tmp_path, rank, [("work", 0, 10, None)])
    assert open_timers(tmp_path).timers().warnings == ("no log of rank 1, 2: it is in none of the figures",)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (None, "", "no such file or folder"),
        ("other.log", "x", "no timer_rank"),
        ("timer_rank0.log", "nothing\n", "no timer line"),
    ],
)
def test_bad_input_is_one_line(name: str | None, text: str, complaint: str, tmp_path: Path) -> None:
    folder = tmp_path / "time_log"
    if name:
        folder.mkdir()
        (folder / name).write_text(text)
    with pytest.raises(CaptureError, match=complaint):
        open_timers(folder).timers()


def test_the_report_and_the_timeline(tmp_path: Path) -> None:
    result = steps(25, [10, 10, 40, 10], [50, 50, 20, 50], tmp_path)
    console = Console(file=io.StringIO(), width=140)
    console.print(result)
    text = console.file.getvalue()
    assert "Straggler: critical. Rank 2 is the straggler" in text
    assert "It costs 30.00 ms a step, 30.0 % of it" in text
    axes = result.figure().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"forward", "backward", "optimizer"}


def test_two_ranks_late_together_are_both_named(tmp_path: Path) -> None:
    verdict = of_waits(tmp_path, [[5] * 31, [6] * 31, *[[80] * 31] * 4]).verdict
    assert (verdict.severity, verdict.rank) == ("critical", None)
    assert verdict.reason.startswith("ranks 0 and 1 are the stragglers")
