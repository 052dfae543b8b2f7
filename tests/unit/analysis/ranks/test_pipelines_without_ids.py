"""Pipelines of four stages whose captures name no communicators: every rank has one stream for both neighbours.

The job is played by hand, so who sent what to whom is known.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
from support.captures.nsys_file import NsysFile

from nvprof_kit import Job, open_job

MS, US = 1_000_000, 1_000
STAGES, MICRO_BATCHES, STEPS = 4, 4, 3
NAME = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


class Message(NamedTuple):
    """A kernel of NCCL's on a rank: kind, step, true begin and end, and the rank on the other side."""

    kind: str
    step: int
    begin: int
    end: int
    other: int


class Work(NamedTuple):
    layer: str
    phase: str
    step: int
    begin: int
    end: int


def play(replicas: int, slow: int, jitter: int, eager: bool) -> dict[int, list[Message | Work]]:
    """GPipe: all micro-batches forward, then all backward; a rank is `stage * replicas + replica`. Each stage receives,
    works, and sends; the replicas end a step together.

    Args:
        replicas: Ranks of each stage.
        slow: The stage whose forward takes 3 ms longer.
        jitter: Work varies by so much, ns.
        eager: A send that comes before its receiver is done at once.
    """
    noise, now = random.Random(1), dict.fromkeys(range(STAGES * replicas), 0)
    did: dict[int, list[Message | Work]] = {rank: [] for rank in now}

    def work(rank: int, step: int, phase: str) -> None:
        stage = rank // replicas
        took = (2 if phase == "forward" else 4) * MS + (3 * MS if phase == "forward" and stage == slow else 0)
        took += noise.randrange(jitter)
        did[rank].append(Work(f"layers.{stage}", phase, step, now[rank], now[rank] + took))
        now[rank] += took + 20 * US

    def pass_on(sender: int, receiver: int, step: int) -> None:
        begins = now[sender], now[receiver]
        end = max(begins) + 60 * US
        sent = begins[0] + 10 * US if eager and begins[0] < begins[1] - MS else end
        did[sender].append(Message("ncclSend", step, begins[0], sent, receiver))
        did[receiver].append(Message("ncclRecv", step, begins[1], end, sender))
        now[sender], now[receiver] = sent + 5 * US, end + 5 * US

    for step in range(STEPS):
        for replica in range(replicas):
            chain = [stage * replicas + replica for stage in range(STAGES)]
            for phase, order in (("forward", chain), ("backward", chain[::-1])):
                for _ in range(MICRO_BATCHES):
                    for place, rank in enumerate(order):
                        work(rank, step, phase)
                        if place + 1 < len(order):
                            pass_on(rank, order[place + 1], step)
        latest = max(now.values())
        now = dict.fromkeys(now, latest + MS)
    return did


def write(folder: Path, rank: int, did: list[Message | Work], shift: int) -> Path:
    file = NsysFile(folder / f"run.rank{rank}.sqlite", nsys="2024.2")
    for step in range(STEPS):
        mine = [one for one in did if one.step == step]
        begin, end = min(one.begin for one in mine), max(one.end for one in mine)
        file.range_(f"step {step}", shift + begin - 90 * US, shift + end, category="step", payload=step)
    for one in did:
        at = shift + one.begin - 50 * US
        launched = (at + 2 * US, at + 4 * US)
        if isinstance(one, Work):
            file.range_(f"{one.layer}", at, at + 9 * US, category=one.phase)
            file.kernel(shift + one.begin, shift + one.end, launched=launched)
        else:
            file.range_(one.kind, at, at + 9 * US, category=None, domain="NCCL")
            file.kernel(shift + one.begin, shift + one.end, launched=launched, name=NAME, stream=9)
    return file.write()


def job_of(folder: Path, did: dict[int, list[Message | Work]], ranks: list[int]) -> Job:
    shifts = random.Random(7)
    return open_job([write(folder, rank, did[rank], shifts.randrange(10**10)) for rank in ranks], workers=1)


def messages_of(did: dict[int, list[Message | Work]]) -> dict[int, list[Message]]:
    return {rank: [one for one in mine if isinstance(one, Message)] for rank, mine in did.items()}


def partner_of(messages: dict[int, list[Message]], rank: int, place: int) -> tuple[int, int]:
    """Rank and place of the message on the other side: the n-th of its direction between the two."""
    one = messages[rank][place]
    kind = "ncclRecv" if one.kind == "ncclSend" else "ncclSend"
    same = [i for i, each in enumerate(messages[rank]) if (each.kind, each.other) == (one.kind, one.other)]
    there = [i for i, each in enumerate(messages[one.other]) if (each.kind, each.other) == (kind, rank)]
    return one.other, there[same.index(place)]


def judged(job: Job, did: dict[int, list[Message | Work]]) -> tuple[int, int]:
    """How many messages are matched with the right one, and how many with another."""
    messages = messages_of(did)
    assert job._aligned is not None
    table = job._tables._frame("SELECT c, s, k, rank, index FROM matched ORDER BY rank")
    right = wrong = 0
    for _, members in table.groupby(["c", "s", "k"]):
        both = list(zip(members["rank"].tolist(), members["index"].tolist(), strict=True))
        good = len(both) == 2 and partner_of(messages, *both[0]) == both[1]
        right, wrong = right + good, wrong + (len(both) > 1 and not good)
    return right, wrong


ALL = STEPS * 2 * MICRO_BATCHES * (STAGES - 1)


@pytest.mark.parametrize(("slow", "eager"), [(1, False), (-1, True)])
def test_every_message_finds_its_partner(tmp_path: Path, slow: int, eager: bool) -> None:
    did = play(1, slow, 40 * US, eager)
    job = job_of(tmp_path, did, [0, 1, 2, 3])
    right, wrong = judged(job, did)
    assert wrong == 0 and right >= 0.9 * ALL
    assert any("cannot be matched" in one for one in job.warnings) == (right < ALL)
    if not eager:
        assert abs(int(job.waits().to_frame()["wait_ns"].sum()) - waited(messages_of(did))) <= ALL * 2 * US


def waited(messages: dict[int, list[Message]]) -> int:
    """How long all ranks waited for the other side, as it was played."""
    sums = 0
    for rank, mine in messages.items():
        for place, one in enumerate(mine):
            other, at = partner_of(messages, rank, place)
            sums += max(messages[other][at].begin - one.begin, 0)
    return sums


def test_stages_that_are_no_neighbours_are_not_matched(tmp_path: Path) -> None:
    """Ranks 0 and 2 of four: by order they would match one for one."""
    did = play(1, -1, 40 * US, eager=False)
    job = job_of(tmp_path, did, [0, 2])
    assert judged(job, did) == (0, 0)


def test_replicas_that_run_alike_are_never_mistaken(tmp_path: Path) -> None:
    """Two replicas whose work varies by 10 µs end their messages together: better none than a wrong one."""
    did = play(2, -1, 10 * US, eager=False)
    job = job_of(tmp_path, did, list(range(8)))
    assert judged(job, did)[1] == 0
    assert any("cannot be matched" in one for one in job.warnings)
