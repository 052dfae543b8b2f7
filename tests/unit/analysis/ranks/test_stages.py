"""Pipelines of four stages: messages matched by peers that PyTorch recorded, or stage by stage, and told groups."""

import random

import pandas as pd
import pytest
from support.data import DATA

from nvprof_kit import Job, open_job
from nvprof_kit._ranks.messages import pair_messages

STAGES = DATA / "ranks" / "stages"
MS, US = 1_000_000, 1_000
MICRO_BATCHES, STEPS = 4, 4


def matched_rows(job: Job) -> pd.DataFrame:
    """What took part in each match in a step, in each rank's order."""
    assert job._aligned is not None
    return job._tables._run("SELECT c, s, k, m.rank, index, x.kind, m.step FROM matched AS m JOIN collectives AS x "
                            "USING (rank, index) WHERE m.step >= 0 ORDER BY m.rank, index", "df")  # fmt: skip


def by_program(job: Job) -> tuple[int, int, int]:
    """Matched messages, those matched otherwise than ScheduleGPipe sends them, and all messages of the senders.

    All forward messages of a step are launched before its backward messages, so on a rank between two others, the
    first four sends go to the next stage and the last four to the previous one.
    """
    rows = matched_rows(job)
    rows["nth"] = rows.groupby(["rank", "step", "kind"]).cumcount()
    matched = wrong = 0
    for _, both in rows.groupby(["c", "s", "k"]):
        if len(both) < 2:
            continue
        matched += 1
        passed = {what(one) for one in both.itertuples()}
        wrong += len(both) != 2 or len(passed) != 1
    return matched, wrong, int((rows["kind"] == "Send").sum())


def what(one: object) -> tuple[int, int, int, int]:
    """Sender, receiver, step and number of a message."""
    rank, kind, nth, step = (int(one.rank), str(one.kind), int(one.nth), int(one.step))
    ahead = (rank < 3) if kind == "Send" else (rank > 0)
    forward = ahead and nth < MICRO_BATCHES
    number = nth if forward or not ahead else nth - MICRO_BATCHES
    if kind == "Send":
        return rank, rank + 1 if forward else rank - 1, step, number
    return rank - 1 if forward else rank + 1, rank, step, number


@pytest.mark.parametrize(
    ("captures", "rank", "layer"),
    [("pipeline-first-stage", 0, "layers.0.mlp"), ("kineto/pipeline-host", 3, "layers.3.self_attn")],
)
def test_real_pipelines_of_four_stages(captures, rank, layer):
    job = open_job(sorted(STAGES.glob(f"{captures}.rank*")))
    assert by_program(job) == (3 * 2 * MICRO_BATCHES * STEPS, 0, 3 * 2 * MICRO_BATCHES * STEPS)
    assert (job.verdict.rank, job.verdict.layer) == (rank, layer)
    groups = job.groups().to_frame()
    assert groups["ranks"].tolist() == ["0, 1", "1, 2", "2, 3"]
    assert set(groups["name"]) == {"default_pg"} and set(groups["parallel"]) == {"pipeline"}
    assert not job.warnings


def one_forward_one_backward(rank: int, micro_batches: int) -> list[set[tuple[int, int, str, int]]]:
    """What each kernel of a rank sends and receives in a step of Schedule1F1B on four stages, in order: sender,
    receiver, forward or backward, number.
    """
    kernels: list[set[tuple[int, int, str, int]]] = []

    def passed(*messages: tuple[int, int, str, int]) -> None:
        held = {one for one in messages if 0 <= one[0] < 4 and 0 <= one[1] < 4}
        kernels.extend([held] if held else [])

    first = min(micro_batches, 4 - rank)
    for number in range(first):
        passed((rank - 1, rank, "forward", number))
        if number < first - 1:
            passed((rank, rank + 1, "forward", number))
    forward, backward = first - 1, 0
    while True:
        passed((rank, rank + 1, "forward", forward), (rank + 1, rank, "backward", backward))
        if forward == micro_batches - 1:
            break
        forward += 1
        passed((rank, rank - 1, "backward", backward), (rank - 1, rank, "forward", forward))
        backward += 1
    for number in range(backward, micro_batches):
        if number > backward:
            passed((rank + 1, rank, "backward", number))
        passed((rank, rank - 1, "backward", number))
    return kernels


def test_one_forward_one_backward():
    """Its kernels send and receive at once: `SendRecv`."""
    job = open_job(sorted(STAGES.glob("1f1b-first-stage.rank*")))
    rows = matched_rows(job)
    passed = {rank: one_forward_one_backward(rank, 8) for rank in range(4)}
    rows["nth"] = rows.groupby(["rank", "step"]).cumcount()
    counts = rows.groupby(["rank", "step"]).size().unstack("rank")
    assert (counts == [len(passed[rank]) for rank in range(4)]).all(axis=None) and len(counts) == STEPS
    pairs = [
        [passed[int(one.rank)][int(one.nth)] for one in both.itertuples()] for _, both in rows.groupby(["c", "s", "k"])
    ]
    assert len(pairs) == 30 * STEPS and all(len(both) == 2 and both[0] == both[1] for both in pairs)
    assert (job.verdict.rank, job.verdict.layer) == (0, "layers.0.mlp")
    assert not job.warnings


def gpipe(late: int, replicas: int = 1, jitter: int = 400 * US) -> tuple[pd.DataFrame, dict[int, tuple[int, int, int]]]:
    """The messages of four stages on shared GPUs: a receive ends up to `late` ns after its send. And of each row the
    sender, the receiver and the number of the message. A rank is ``stage * replicas + replica``.
    """
    noise, rows, sent = random.Random(3), [], {}
    shift = [noise.randrange(10**9) for _ in range(4 * replicas)]
    now = [0] * (4 * replicas)
    number = 0
    for step in range(STEPS):
        for replica in range(replicas):
            for order in (range(4), range(3, -1, -1)):
                for _ in range(MICRO_BATCHES):
                    for stage in order:
                        rank = stage * replicas + replica
                        now[rank] += 4 * MS + noise.randrange(jitter)
                        other = rank + replicas * (order[1] - order[0])
                        if stage == order[-1]:
                            continue
                        begin = max(now[rank], now[other])
                        ends = begin + 200 * US, begin + 200 * US + noise.randrange(late)
                        for who, kind, end in ((rank, "Send", ends[0]), (other, "Recv", ends[1])):
                            sent[len(rows)] = (rank, other, number)
                            rows.append((who, len(rows), kind, step, -1, now[who] + shift[who], end + shift[who]))
                            now[who] = end
                        number += 1
        now = [max(now)] * len(now)
    return pd.DataFrame(rows, columns=["rank", "index", "kind", "step", "bytes", "start_ns", "end_ns"]), sent


def numbered(frame: pd.DataFrame, sent: dict[int, tuple[int, int, int]], **how: object) -> tuple[int, int]:
    """How many messages are matched rightly and wrongly."""
    stages = {rank: rank // (frame["rank"].nunique() // 4) for rank in frame["rank"].unique()}
    found = pair_messages(frame, stages, **how)[0]
    pairs = [set(map(sent.__getitem__, mine["index"])) for _, mine in found.groupby(["c", "k"]) if len(mine) > 1]
    return sum(len(one) == 1 for one in pairs), sum(len(one) > 1 for one in pairs)


def test_receives_that_end_late_are_matched_stage_by_stage():
    frame, sent = gpipe(160 * US)
    assert numbered(frame, sent) == (len(frame) // 2, 0)


def test_a_lost_message_costs_only_its_step():
    """Without one receive of rank 2, its step has no assignment between ranks 1 and 2."""
    frame, sent = gpipe(160 * US)
    lost = frame[(frame["rank"] == 2) & (frame["kind"] == "Recv") & (frame["step"] == 1)].index[2]
    right, wrong = numbered(frame.drop(index=lost), sent)
    assert wrong == 0 and right >= (STEPS - 1) * 3 * 2 * MICRO_BATCHES


def test_replicas_that_run_alike_are_matched_by_the_groups_that_are_told():
    frame, sent = gpipe(160 * US, replicas=2, jitter=5 * US)
    assert numbered(frame, sent)[1] == 0
    right, wrong = numbered(frame, sent, may_pass=lambda one, other: one % 2 == other % 2)
    assert (right, wrong) == (len(frame) // 2, 0)
