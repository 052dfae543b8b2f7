"""Timer logs in, statistics, skew and verdict out."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from support.captures import timer_log

from nvprof_kit import CaptureError, Timers, UsageError, open_timers

Stages = list[tuple[str, int, int, int | None]]


def steps_of(lengths: list[dict[str, int]]) -> Stages:
    """Steps of 100 ms, in each its stages one behind the other."""
    return [
        (name, 100 * step + sum([*stages.values()][:place]), length, length)
        for step, stages in enumerate(lengths)
        for place, (name, length) in enumerate(stages.items())
    ]


def of_waits(waits: list[list[int]]) -> list[Stages]:
    """Of each rank steps: forward, backward, which ends with a collective, and an optimizer of 5 ms; from the rank's
    time in the collective's stage in each step.
    """
    return [steps_of([{"forward": 95 - wait, "backward": wait, "optimizer": 5} for wait in own]) for own in waits]


def barriers(late: Callable[[int], int]) -> list[Stages]:
    """The ranks wait for each other in backward: nobody waits in the barrier behind it."""
    work = [[50 if late(step) == rank else 10 for step in range(32)] for rank in range(4)]
    return [
        steps_of([{"forward": ms, "backward": 70 - ms, "barrier": 1, "optimizer": 29} for ms in own]) for own in work
    ]


def timed(folder: Path, ranks: list[Stages], collective: tuple[str, ...] = ()) -> Timers:
    for rank, stages in enumerate(ranks):
        timer_log.write(folder, rank, *stages)
    return open_timers(folder).timers(collective=collective)


def test_statistics_skew_and_offsets(tmp_path):
    timer_log.write(tmp_path, 0, ("forward", 0, 10, 8), ("forward", 100, 30, 26))
    timer_log.write(tmp_path, 1, ("forward", 5, 20, 18), ("forward", 101, 20, 16))
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


STALLS = [[80 - (step % 4 == rank) for step in range(31)] for rank in range(4)]
STALLS[2] = [5 if step % 3 == 0 else 80 for step in range(31)]
BAD_STEP = [[85] * 10 + [bad] + [85] for bad in (5, 1200)]
VERDICTS: dict[str, tuple[list[Stages], tuple[str, ...], tuple[str, int | None, float], str]] = {
    # every rank is slow in an eighth of the steps: their means are equal, and yet each step loses 40 of 100 ms
    "rotating": (of_waits([[20 if (rank + step) % 8 == 7 else 60 for step in range(33)] for rank in range(8)]), (),
                 ("warning", None, 0.4), "the slow rank rotates: in backward the median rank waits 40.0 % of a step"),
    "in turn": (of_waits([*([5 if step % 2 == rank else 80 for step in range(31)] for rank in (0, 1)), [80] * 31,
                          [80] * 31]), (), ("warning", None, 0.75), "ranks 0 and 1 are late in turn"),
    # rank 2 stalls in every third step, behind the warm-up 10 of 30, of 75 ms: 25 ms a step; in the other steps the
    # ranks differ by a millisecond, another one each time
    "stalls": (of_waits(STALLS), (), ("critical", 2, 0.25), "in 10 of 30 steps"),
    # behind the warm-up 11 steps; in one of them rank 1 waits 1,195 ms for rank 0: 109 ms a step, all of it in one
    "one bad step": ([[("backward", 2000 * step, wait, wait) for step, wait in enumerate(own)] for own in BAD_STEP], (),
                     ("warning", None, 1.0),
                     "no straggler: call 10 alone makes up 100 % of the time lost in backward"),
    "a barrier behind": (barriers(lambda step: 2), (), ("critical", 2, 0.4), "least in backward"),
    "a barrier, in turn": (barriers(lambda step: step % 4), (), ("warning", None, 0.4), "in backward"),
    "two together": (of_waits([[5] * 31, [6] * 31, *[[80] * 31] * 4]), (), ("critical", None, 0.75),
                     "ranks 0 and 1 are the stragglers"),
    "sharded": ([[(name, 100 * step + start, length, length) for step in range(25)
                  for name, start, length in (("forward", 0, 10), ("backward", 10, wait))] for wait in (60, 20)],
                ("forward", "backward"), ("warning", 1, 1.0), "rank 1 is the straggler"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_who_is_late(name, tmp_path):
    ranks, collective, (severity, late_rank, score), reason = VERDICTS[name]
    verdict = timed(tmp_path, ranks, collective).verdict
    assert (verdict.severity, verdict.rank, reason in verdict.reason) == (severity, late_rank, True), verdict
    assert verdict.score == pytest.approx(score, rel=0.06) or name in ("one bad step", "sharded")


def test_a_clock_that_is_set_during_the_run_is_named(tmp_path):
    for rank in range(3):
        starts = [100 * step + 3_600_000 * (rank == 1 and step > 3) for step in range(8)]
        timer_log.write(tmp_path, rank, *(("forward", start, 50, 50) for start in starts))
    (warning,) = open_timers(tmp_path).timers().warnings
    assert warning.startswith("the clock of rank 1 went 3600.00 s forward against the others' during the run")


def test_what_cannot_be_told_is_said(tmp_path):
    timer_log.write(tmp_path, 0, ("work", 0, 10, None), ("work", 20, 10, None))
    assert open_timers(tmp_path).timers().verdict.reason == "a single rank cannot be compared"
    timer_log.write(tmp_path, 1, ("work", 0, 10, None))
    result = open_timers(tmp_path).timers()
    assert result.verdict.severity == "unknown"
    assert "--collective" in result.verdict.reason
    with pytest.raises(UsageError, match="collective='nosuch': no such choice; available: work"):
        open_timers(tmp_path).timers(collective=("nosuch",))
    assert "not as often on every rank" in result.warnings[0]
    assert result.rows["cuda_total_ns"].isna().all()


def test_a_rank_without_a_log_is_named(tmp_path):
    for rank in (0, 3):
        timer_log.write(tmp_path, rank, ("work", 0, 10, None))
    assert open_timers(tmp_path).timers().warnings == ("no log of rank 1, 2: it is in none of the figures",)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (None, "", "no such file or folder"),
        ("other.log", "x", "no timer_rank"),
        ("timer_rank0.log", "nothing\n", "no timer line"),
    ],
)
def test_bad_input_is_one_line(name, text, complaint, tmp_path):
    folder = tmp_path / "time_log"
    if name:
        folder.mkdir()
        (folder / name).write_text(text)
    with pytest.raises(CaptureError, match=complaint):
        open_timers(folder).timers()


def test_the_report_and_the_timeline(tmp_path):
    result = timed(tmp_path, of_waits([[50] * 25, [50] * 25, [20] * 25, [50] * 25]))
    console = Console(file=io.StringIO(), width=140)
    console.print(result)
    text = console.file.getvalue()
    assert "Straggler: critical. Rank 2 is the straggler" in text
    assert "It costs 30.00 ms a step, 30.0 % of it" in text
    axes = result.figure().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"forward", "backward", "optimizer"}
